// Second step of split decode: merges the partial results of a row's splits.
#pragma once

#include <cstdint>

#include "kernels/attention/decode_args.cuh"
#include "kernels/attention/softmax.cuh"
#include "kernels/common/vec.cuh"

namespace astrai::attention {

inline constexpr int kCombineThreads = 256;

// One block per (batch, query head). Its threads stand in groups that each hold the head dim, 4
// elements a thread; group g takes the splits g, g + groups, ...
template <typename T, int kHeadDim, typename KvSource>
__global__ __launch_bounds__(kCombineThreads) void decode_combine_kernel(
    const __grid_constant__ DecodeArgs<KvSource> args) {
  constexpr int kQuads = kHeadDim / 4;
  constexpr int kGroups = kCombineThreads / kQuads;
  __shared__ float4 group_out[kGroups][kQuads];
  __shared__ float group_sum[kGroups];
  __shared__ float warp_max[kCombineThreads / 32];

  const int64_t row = blockIdx.x;
  const int splits = args.splits;
  const float* max_sum = args.partials.max_sum + row * splits * 2;
  float max = neg_inf();
  for (int split = threadIdx.x; split < splits; split += kCombineThreads) {
    max = fmaxf(max, max_sum[2 * split]);
  }
  max = lanes_max<32>(max);
  if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = max;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCombineThreads / 32; ++i) max = fmaxf(max, warp_max[i]);
  const float base = row_base(max, args.log2_scale);

  const int column = threadIdx.x % kQuads * 4;
  const int group = threadIdx.x / kQuads;
  float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
  float sum = 0.0f;
  const float* part = args.partials.out + row * splits * kHeadDim + column;
#pragma unroll 4
  for (int split = group; split < splits; split += kGroups) {
    const float2 state = *reinterpret_cast<const float2*>(max_sum + 2 * split);
    const float4 p =
        *reinterpret_cast<const float4*>(part + static_cast<int64_t>(split) * kHeadDim);
    if (state.y == 0.0f) continue;  // no key in this split
    const float weight = exp2_approx(__fmul_rn(state.x, args.log2_scale) - base);
    sum = fmaf(weight, state.y, sum);
    o.x = fmaf(weight, p.x, o.x);
    o.y = fmaf(weight, p.y, o.y);
    o.z = fmaf(weight, p.z, o.z);
    o.w = fmaf(weight, p.w, o.w);
  }
  group_out[group][threadIdx.x % kQuads] = o;
  if (column == 0) group_sum[group] = sum;
  __syncthreads();
  if (group != 0) return;

#pragma unroll
  for (int g = 1; g < kGroups; ++g) {
    const float4 p = group_out[g][threadIdx.x % kQuads];
    sum += group_sum[g];
    o.x += p.x;
    o.y += p.y;
    o.z += p.z;
    o.w += p.w;
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  const int64_t batch = row / args.q_heads;
  const int64_t head = row - batch * args.q_heads;
  T* target = static_cast<T*>(args.out) + batch * args.out_batch_stride +
              head * args.out_head_stride + column;
  *reinterpret_cast<uint2*>(target) =
      make_uint2(pack2<T>(o.x * inverse, o.y * inverse), pack2<T>(o.z * inverse, o.w * inverse));
  if (args.lse != nullptr && column == 0) args.lse[row] = row_lse(max, sum, args.log2_scale);
}

}  // namespace astrai::attention
