// The Q work map, made on the device.
//
// The tiles of a request need a place that follows from qo_indptr alone. Let request b begin at
// query s: it gets the entries from s / kQMapRows + min(b, s) on. Up to the next request these are
// enough, since a request of n > 0 queries moves the first term by at least ceil(n / kQMapRows) - 1
// and the second by at least 1; and they end at q_work_map_capacity. So no sum over the requests is
// needed: each entry finds its request by bisection. Entries that are left over have no work.
#include "kernels/attention/attention.h"
#include "kernels/common/launch.h"

namespace astrai::attention {
namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ int first_entry(const int32_t* qo_indptr, int b) {
  const int start = qo_indptr[b];
  return start / kQMapRows + min(b, start);
}

__global__ __launch_bounds__(kThreads) void q_work_map_kernel(const int32_t* qo_indptr, int batch,
                                                              int32_t* map_batch, int32_t* map_tile,
                                                              int capacity) {
  const int entry = blockIdx.x * kThreads + threadIdx.x;
  if (entry >= capacity) return;
  int low = 0;  // the last request that begins at or before the entry lies in low .. high - 1
  int high = batch;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (first_entry(qo_indptr, middle) <= entry) {
      low = middle;
    } else {
      high = middle;
    }
  }
  int tile = -1;
  if (batch > 0) {
    const int q_len = qo_indptr[low + 1] - qo_indptr[low];
    const int place = entry - first_entry(qo_indptr, low);
    if (place < (q_len + kQMapRows - 1) / kQMapRows) tile = place;
  }
  map_batch[entry] = tile < 0 ? -1 : low;
  map_tile[entry] = max(tile, 0);
}

}  // namespace

cudaError_t launch_q_work_map(const int32_t* qo_indptr, int batch, int32_t* map_batch,
                              int32_t* map_tile, int capacity, cudaStream_t stream) {
  if (batch < 0 || capacity < 0) return cudaErrorInvalidValue;
  if (capacity == 0) return cudaSuccess;
  if (qo_indptr == nullptr || map_batch == nullptr || map_tile == nullptr) {
    return cudaErrorInvalidValue;
  }
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(ceil_div(capacity, kThreads)));
  config.block = dim3(kThreads);
  config.stream = stream;
  return launch<q_work_map_kernel>(config, qo_indptr, batch, map_batch, map_tile, capacity);
}

}  // namespace astrai::attention
