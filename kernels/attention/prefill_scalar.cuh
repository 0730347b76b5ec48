// Prefill attention without tensor cores: one warp per query row. Any alignment, any head dim up to
// 256.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/attention/mask.cuh"
#include "kernels/attention/plan.h"
#include "kernels/attention/prefill_args.cuh"
#include "kernels/attention/scalar_row.cuh"

namespace astrai::attention {

// The schedule's tiles are kScalarPrefillRows packed rows.
template <typename T, typename QSchedule, typename KvSource>
__global__ __launch_bounds__(kScalarPrefillRows * 32) void prefill_scalar_kernel(
    const __grid_constant__ PrefillArgs<QSchedule, KvSource> args) {
  const int lane = threadIdx.x % 32;
  const QWork work = args.schedule.at(blockIdx.x);
  const PackedRows rows = {args.group, work.q_len * args.group};
  const int row = work.first_row + threadIdx.x / 32;
  if (row >= rows.total) return;
  const int position = rows.position(row);
  const int head = work.kv_head * args.group + rows.head(row, position);
  const int kv_len = args.kv.length(work.batch);
  const int end = args.causal ? max(0, position + kv_len - work.q_len + 1) : kv_len;

  ScalarRow<T> state(static_cast<const T*>(args.q) + work.q_offset + position * args.q_seq_stride +
                         head * args.q_head_stride,
                     args.head_dim, args.log2_scale, args.negate_q);
  const auto kv_rows = args.kv.rows(work.batch, work.kv_head);
  auto k_walk = kv_rows.walk_k(0, 1, lane);
  auto v_walk = kv_rows.walk_v(0, 1, lane);
  const uint8_t* allowed =
      args.mask.data == nullptr ? nullptr : mask_row(args.mask, work.batch, head, position);
  for (int key = 0; key < end; ++key) {
    const T* k = k_walk.next();
    const T* v = v_walk.next();
    if (allowed == nullptr || allowed[key] != 0) state.attend(k, v);
  }
  state.store(static_cast<T*>(args.out) + work.out_offset + position * args.out_seq_stride +
              head * args.out_head_stride);
  if (args.lse != nullptr && lane == 0) {
    args.lse[(work.lse_row + position) * args.q_heads + head] =
        row_lse(state.max, state.sum, state.scale);
  }
}

}  // namespace astrai::attention
