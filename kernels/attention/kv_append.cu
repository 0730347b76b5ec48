#include "kernels/attention/kv_append.h"

#include "kernels/attention/dispatch.cuh"
#include "kernels/attention/kv_append.cuh"
#include "kernels/common/launch.h"

namespace astrai::attention {
namespace {

constexpr int kAppendThreads = 128;
constexpr int kAppendPositions = 16;  // of one block

template <typename KvSource>
struct KvAppendLaunch {
  KvSource kv;
  QueryRows queries;
  AppendArgs append;
  int kv_heads;
  int head_dim;
  int v_head_dim;
  int chunks;  // blocks of a (request, kv head)
};

// Blocks in order: request, chunk of positions, kv head. Element by element: this is not where the
// time of a launch with many queries goes.
template <typename T, typename KvSource>
__global__ __launch_bounds__(kAppendThreads) void kv_append_kernel(
    const __grid_constant__ KvAppendLaunch<KvSource> args) {
  const int step = blockIdx.x / args.kv_heads;
  const int kv_head = blockIdx.x - step * args.kv_heads;
  const int batch = step / args.chunks;
  const int chunk = step - batch * args.chunks;
  const int q_len = args.queries.length(batch);
  const int kv_len = args.kv.length(batch);
  const int begin = kv_len - q_len + chunk * kAppendPositions;
  append_tokens<T, 1, KvSource>(args.append, args.queries, args.kv.rows(batch, kv_head), batch,
                                kv_head, q_len, kv_len, args.head_dim, args.v_head_dim, begin,
                                min(begin + kAppendPositions, kv_len), [](int) { return true; });
}

}  // namespace

cudaError_t launch_kv_append(const AttentionParams& p, cudaStream_t stream) {
  return with_types(p, [&](auto element, auto source) {
    using T = decltype(element);
    using KvSource = decltype(source);
    if constexpr (!KvSource::kPaged) {
      return cudaErrorInvalidValue;
    } else {
      const int chunks = ceil_div(p.q_len, kAppendPositions);
      const int64_t blocks = static_cast<int64_t>(p.batch) * chunks * p.kv_heads;
      if (!is_launchable(blocks)) return cudaErrorInvalidValue;
      LaunchConfig config;
      config.grid = dim3(static_cast<unsigned>(blocks));
      config.block = dim3(kAppendThreads);
      config.stream = stream;
      const KvAppendLaunch<KvSource> args = {
          source,     {p.q_len, p.qo_indptr}, append_args(p), p.kv_heads,
          p.head_dim, p.v_head_dim,           chunks};
      return launch<kv_append_kernel<T, KvSource>>(config, args);
    }
  });
}

}  // namespace astrai::attention
