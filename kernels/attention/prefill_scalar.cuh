// Prefill attention without tensor cores: one warp per query row. Any alignment, any head dim up to
// 256.
#pragma once

#include "kernels/attention/prefill_args.cuh"
#include "kernels/attention/scalar_row.cuh"

namespace astrai::attention {

// The schedule's tiles are kScalarPrefillRows packed rows.
template <typename T, typename QSchedule, typename KvSource>
__global__ __launch_bounds__(kScalarPrefillRows * 32) void prefill_scalar_kernel(
    const __grid_constant__ PrefillArgs<QSchedule, KvSource> args) {
  const int lane = threadIdx.x % 32;
  const QWork work = args.schedule.at(blockIdx.x);
  const PackedRows rows = {args.group, work.row_end};
  const int row = work.first_row + static_cast<int>(threadIdx.x) / 32;
  if (work.batch < 0 || row >= rows.end) return;
  const int position = rows.position(row);
  const int head = work.kv_head * args.group + rows.head(row, position);
  const ScalarKeys keys(args.score, work.batch, head, position, work.q_len,
                        args.kv.length(work.batch));

  ScalarRow<T> state(static_cast<const T*>(args.q) + work.q_offset + position * args.q_seq_stride +
                         head * args.q_head_stride,
                     args.head_dim, args.v_head_dim, args.score);
  const auto kv_rows = args.kv.rows(work.batch, work.kv_head);
  auto k_walk = kv_rows.walk_k(keys.window.first, 1, lane);
  auto v_walk = kv_rows.walk_v(keys.window.first, 1, lane);
  for (int key = keys.window.first; key < keys.window.end; ++key) {
    const int page = kv_rows.page(key);
    const auto* k = k_walk.next(page);
    const auto* v = v_walk.next(page);
    if (keys.allows(key, page)) state.attend(k, v);
  }
  const RowEnd end = end_of_row(state.max, state.sum, state.rule.scale, value_scale(args.score),
                                sink_of(args.score, head));
  state.store(static_cast<T*>(args.out) + work.out_offset + position * args.out_seq_stride +
                  head * args.out_head_stride,
              end.factor);
  if (args.lse != nullptr && lane == 0) {
    args.lse[(work.lse_row + position) * args.q_heads + head] = end.lse;
  }
}

}  // namespace astrai::attention
