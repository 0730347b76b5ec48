// Decode attention without tensor cores: one block per query head, its warps taking the keys in
// turn. Any alignment, any head dim up to 256.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/attention/decode_args.cuh"
#include "kernels/attention/mask.cuh"
#include "kernels/attention/scalar_row.cuh"

namespace astrai::attention {

inline constexpr int kScalarDecodeWarps = 8;

template <typename T, typename KvSource>
__global__ __launch_bounds__(kScalarDecodeWarps * 32) void decode_scalar_kernel(
    const __grid_constant__ DecodeArgs<KvSource> args) {
  __shared__ float warp_out[kScalarDecodeWarps][kMaxScalarHeadDim];
  __shared__ float warp_max[kScalarDecodeWarps];
  __shared__ float warp_sum[kScalarDecodeWarps];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int batch = blockIdx.x / args.q_heads;
  const int head = blockIdx.x - batch * args.q_heads;
  const int kv_len = args.kv.length(batch);

  ScalarRow<T> state(
      static_cast<const T*>(args.q) + batch * args.q_batch_stride + head * args.q_head_stride,
      args.head_dim, args.log2_scale, args.negate_q);
  const auto kv_rows = args.kv.rows(batch, head / (args.q_heads / args.kv_heads));
  auto k_walk = kv_rows.walk_k(warp, kScalarDecodeWarps, lane);
  auto v_walk = kv_rows.walk_v(warp, kScalarDecodeWarps, lane);
  const uint8_t* allowed =
      args.mask.data == nullptr ? nullptr : mask_row(args.mask, batch, head, 0);
  for (int key = warp; key < kv_len; key += kScalarDecodeWarps) {
    const T* k = k_walk.next();
    const T* v = v_walk.next();
    if (allowed == nullptr || allowed[key] != 0) state.attend(k, v);
  }

  if (lane == 0) {
    warp_max[warp] = state.max;
    warp_sum[warp] = state.sum;
  }
#pragma unroll
  for (int i = 0; i < ScalarRow<T>::kPerLane; ++i) warp_out[warp][lane + 32 * i] = state.o[i];
  __syncthreads();
  if (warp != 0) return;

  // The first warp merges the others into its own state.
  for (int other = 1; other < kScalarDecodeWarps; ++other) {
    if (warp_sum[other] == 0.0f) continue;
    const float now = fmaxf(state.max, warp_max[other]);
    const float own = exp2_of_difference(state.max, now, state.scale);
    const float weight = exp2_of_difference(warp_max[other], now, state.scale);
    state.max = now;
    state.sum = state.sum * own + warp_sum[other] * weight;
#pragma unroll
    for (int i = 0; i < ScalarRow<T>::kPerLane; ++i) {
      state.o[i] = state.o[i] * own + warp_out[other][lane + 32 * i] * weight;
    }
  }
  state.store(static_cast<T*>(args.out) + batch * args.out_batch_stride +
              head * args.out_head_stride);
  if (args.lse != nullptr && lane == 0) {
    args.lse[static_cast<int64_t>(batch) * args.q_heads + head] =
        row_lse(state.max, state.sum, state.scale);
  }
}

}  // namespace astrai::attention
