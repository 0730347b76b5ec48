// Merges two attention results over disjoint keys.
//
// A result over the keys of a set, with the logarithm of its sum of exponentials, is all that a
// merge needs (Milakov and Gimelshein 2018; "attention states" of Ye et al. 2025, FlashInfer).
// Every byte is read once and written once, in 16-byte accesses where rows allow them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/attention/attention.h"
#include "kernels/common/launch.h"
#include "kernels/common/vec.cuh"

namespace astrai::attention {
namespace {

constexpr int kThreads = 128;

// kWidth elements of T, in one access, as fp32.
template <typename T, int kWidth>
struct Elements {
  static __device__ __forceinline__ void load(const T* address, float (&x)[kWidth]) {
    unpack(load_vec<T, kWidth>(address), x);
  }
  static __device__ __forceinline__ void store(T* address, const float (&x)[kWidth]) {
    store_vec(address, pack<T>(x));
  }
};

template <int kWidth>
struct Elements<float, kWidth> {
  static __device__ __forceinline__ void load(const float* address, float (&x)[kWidth]) {
    uint32_t bits[kWidth];
    ptx::ld_global(bits, address);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = __uint_as_float(bits[i]);
  }
  static __device__ __forceinline__ void store(float* address, const float (&x)[kWidth]) {
    uint32_t bits[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) bits[i] = __float_as_uint(x[i]);
    ptx::st_global(address, bits);
  }
};

// Shares of the two results in the merged one.
struct MergedState {
  float lse;
  float share_a;
  float share_b;
};

__device__ __forceinline__ MergedState merge_lse(float a, float b) {
  const float most = fmaxf(a, b);
  if (most == -INFINITY) return {-INFINITY, 0.0f, 0.0f};
  const float weight_a = expf(a - most);
  const float weight_b = expf(b - most);
  const float sum = weight_a + weight_b;
  return {most + logf(sum), weight_a / sum, weight_b / sum};
}

// Threads of one y work on one row, in steps of kWidth elements.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    merge_states_kernel(const __grid_constant__ MergeParams p) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool has_row = row < p.rows;
  MergedState state = {};
  if (has_row) state = merge_lse(p.lse_a[row], p.lse_b[row]);
  __syncthreads();  // lse may be written where others of the row still read
  if (!has_row) return;
  if (threadIdx.x == 0) p.lse[row] = state.lse;

  const int64_t first = row * p.head_dim;
  const T* a = static_cast<const T*>(p.out_a) + first;
  const T* b = static_cast<const T*>(p.out_b) + first;
  T* out = static_cast<T*>(p.out) + first;
  for (int i = threadIdx.x * kWidth; i < p.head_dim; i += blockDim.x * kWidth) {
    float x[kWidth], y[kWidth];
    Elements<T, kWidth>::load(a + i, x);
    Elements<T, kWidth>::load(b + i, y);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      // A result without a share may hold anything.
      const float from_a = state.share_a == 0.0f ? 0.0f : state.share_a * x[j];
      const float from_b = state.share_b == 0.0f ? 0.0f : state.share_b * y[j];
      x[j] = from_a + from_b;
    }
    Elements<T, kWidth>::store(out + i, x);
  }
}

template <typename T, int kWidth>
cudaError_t launch_width(const MergeParams& p, cudaStream_t stream) {
  const int columns = std::clamp(ceil_div(p.head_dim, kWidth), 1, kThreads);
  const int rows = kThreads / columns;
  const int64_t blocks = ceil_div(p.rows, int64_t{rows});
  if (blocks > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidValue;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(blocks));
  config.block = dim3(columns, rows);
  config.stream = stream;
  return launch<merge_states_kernel<T, kWidth>>(config, p);
}

template <typename T>
cudaError_t launch_type(const MergeParams& p, cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  bool wide = p.head_dim % kWidth == 0;
  for (const void* pointer : {p.out_a, p.out_b, static_cast<const void*>(p.out)}) {
    wide = wide && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  }
  return wide ? launch_width<T, kWidth>(p, stream) : launch_width<T, 1>(p, stream);
}

}  // namespace

cudaError_t launch_merge_states(const MergeParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.head_dim < 0) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  for (const void* pointer : {p.out_a, p.out_b, static_cast<const void*>(p.out)}) {
    if (pointer == nullptr && p.head_dim > 0) return cudaErrorInvalidValue;
  }
  if (p.lse_a == nullptr || p.lse_b == nullptr || p.lse == nullptr) return cudaErrorInvalidValue;
  switch (p.dtype) {
    case DType::kBF16:
      return launch_type<__nv_bfloat16>(p, stream);
    case DType::kFP16:
      return launch_type<__half>(p, stream);
    case DType::kFP32:
      return launch_type<float>(p, stream);
    case DType::kE4M3:
    case DType::kE5M2:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace astrai::attention
