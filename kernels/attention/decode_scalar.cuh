// Decode attention without tensor cores: one block per query row, its warps taking the keys in
// turn. Any alignment, any head dim up to 256.
#pragma once

#include "kernels/attention/decode_args.cuh"
#include "kernels/attention/kv_append.cuh"
#include "kernels/attention/scalar_row.cuh"

namespace astrai::attention {

inline constexpr int kScalarDecodeWarps = 8;

// Blocks in order: request, position (up to the most of a request), query head.
template <typename T, typename KvSource>
__global__ __launch_bounds__(kScalarDecodeWarps * 32) void decode_scalar_kernel(
    const __grid_constant__ DecodeArgs<KvSource> args) {
  __shared__ float warp_out[kScalarDecodeWarps][kMaxScalarHeadDim];
  __shared__ float warp_max[kScalarDecodeWarps];
  __shared__ float warp_sum[kScalarDecodeWarps];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int q_heads = args.kv_heads * args.group;
  const int row = blockIdx.x / q_heads;
  const int head = blockIdx.x - row * q_heads;
  const int batch = row / args.queries.q_len;
  const int position = row - batch * args.queries.q_len;
  const int q_len = args.queries.length(batch);
  const int kv_len = args.kv.length(batch);
  if (position >= q_len) return;

  const int kv_head = head / args.group;
  const auto kv_rows = args.kv.rows(batch, kv_head);
  const ScalarKeys keys(args.score, batch, head, position, q_len, kv_len);
  if constexpr (KvSource::kPaged) {
    if (args.append.k.data != nullptr) {
      // All blocks that read these tokens put the same bytes there: none waits for another.
      append_tokens<T, 1, KvSource>(args.append, args.queries, kv_rows, batch, kv_head, q_len,
                                    kv_len, args.head_dim, args.v_head_dim, 0, kv_len,
                                    [](int) { return true; });
      __syncthreads();
    }
  }

  const T* q = static_cast<const T*>(args.q.data) +
               args.queries.offset(batch, args.q.batch_stride, args.q.seq_stride) +
               position * args.q.seq_stride + head * args.q.head_stride;
  ScalarRow<T> state(q, args.head_dim, args.v_head_dim, args.score);
  const int first = keys.window.first + warp;
  auto k_walk = kv_rows.walk_k(first, kScalarDecodeWarps, lane);
  auto v_walk = kv_rows.walk_v(first, kScalarDecodeWarps, lane);
  for (int key = first; key < keys.window.end; key += kScalarDecodeWarps) {
    const int page = kv_rows.page(key);
    const auto* k = k_walk.next(page);
    const auto* v = v_walk.next(page);
    if (keys.allows(key, page)) state.attend(k, v);
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
  const float scale = state.rule.scale;
  for (int other = 1; other < kScalarDecodeWarps; ++other) {
    if (warp_sum[other] == 0.0f) continue;
    const float now = fmaxf(state.max, warp_max[other]);
    const float own = exp2_of_difference(state.max, now, scale);
    const float weight = exp2_of_difference(warp_max[other], now, scale);
    state.max = now;
    state.sum = state.sum * own + warp_sum[other] * weight;
#pragma unroll
    for (int i = 0; i < ScalarRow<T>::kPerLane; ++i) {
      state.o[i] = state.o[i] * own + warp_out[other][lane + 32 * i] * weight;
    }
  }
  const RowEnd end =
      end_of_row(state.max, state.sum, scale, value_scale(args.score), sink_of(args.score, head));
  state.store(static_cast<T*>(args.out) +
                  args.queries.offset(batch, args.out_batch_stride, args.out_seq_stride) +
                  position * args.out_seq_stride + head * args.out_head_stride,
              end.factor);
  if (args.lse != nullptr && lane == 0) {
    args.lse[(args.queries.token(batch) + position) * q_heads + head] = end.lse;
  }
}

}  // namespace astrai::attention
