// Entry points of prefill: check, plan, fill the kernel's arguments, launch.

#include "kernels/attention/attention.h"
#include "kernels/attention/dispatch.cuh"
#include "kernels/attention/kv_append.h"
#include "kernels/attention/prefill_plan.h"
#include "kernels/attention/prefill_scalar.cuh"
#include "kernels/common/device.h"
#include "kernels/common/launch.h"

namespace astrai::attention {
namespace {

bool longest_first(const AttentionParams& p) { return p.causal || p.window_right >= 0; }

DenseQSchedule make_schedule(const AttentionParams& p, const QWorkMap&, const PrefillPlan& plan,
                             DenseQSchedule*) {
  DenseQSchedule schedule = {};
  schedule.q_len = p.q_len;
  schedule.rows = p.q_len * (p.q_heads / p.kv_heads);
  schedule.kv_heads = p.kv_heads;
  schedule.tile_rows = plan.tile_rows;
  schedule.row_tiles = plan.row_tiles;
  schedule.pairs = p.batch * p.kv_heads;
  schedule.section = plan.section;
  schedule.longest_first = longest_first(p);
  schedule.q_batch_stride = p.q.batch_stride;
  schedule.out_batch_stride = p.out_batch_stride;
  return schedule;
}

PackedQSchedule make_schedule(const AttentionParams& p, const QWorkMap& map,
                              const PrefillPlan& plan, PackedQSchedule*) {
  PackedQSchedule schedule = {};
  schedule.queries = {p.q_len, p.qo_indptr};
  if (plan.use_map) {
    schedule.map_batch = map.batch;
    schedule.map_tile = map.tile;
  }
  schedule.tiles_per_request = plan.tiles_per_request;
  schedule.entries = plan.entries;
  schedule.kv_heads = p.kv_heads;
  schedule.group = p.q_heads / p.kv_heads;
  schedule.tile_rows = plan.tile_rows;
  schedule.blocks_per_entry = plan.blocks_per_entry;
  schedule.longest_first = longest_first(p);
  schedule.q_batch_stride = p.q.batch_stride;
  schedule.q_seq_stride = p.q.seq_stride;
  schedule.out_batch_stride = p.out_batch_stride;
  schedule.out_seq_stride = p.out_seq_stride;
  return schedule;
}

template <typename QSchedule, typename KvSource>
PrefillArgs<QSchedule, KvSource> prefill_args(const AttentionParams& p, const QWorkMap& map,
                                              const KvSource& source, const PrefillPlan& plan,
                                              void* workspace, bool append_inside) {
  PrefillArgs<QSchedule, KvSource> args = {};
  args.schedule = make_schedule(p, map, plan, static_cast<QSchedule*>(nullptr));
  args.kv = source;
  args.score = score_args(p);
  args.q = p.q.data;
  args.q_seq_stride = p.q.seq_stride;
  args.q_head_stride = p.q.head_stride;
  args.out = p.out;
  args.out_seq_stride = p.out_seq_stride;
  args.out_head_stride = p.out_head_stride;
  args.lse = p.lse;
  args.group = p.q_heads / p.kv_heads;
  args.q_heads = p.q_heads;
  args.head_dim = p.head_dim;
  args.v_head_dim = p.v_head_dim;
  if (append_inside) args.append = append_args(p);
  args.splits = plan.splits;
  args.fixed_splits = plan.fixed_splits;
  args.slot_rows = plan.slot_rows;
  if (plan.workspace_bytes > 0) {
    args.workspace = split_workspace(workspace, plan.blocks, plan.slot_rows, plan.dims.v);
  }
  return args;
}

#ifndef ASTRAI_NO_MMA

template <typename T, int kQkDim, int kVDim, typename QSchedule, typename KvSource>
cudaError_t launch_tile(const PrefillArgs<QSchedule, KvSource>& args, const PrefillPlan& plan,
                        cudaStream_t stream) {
  constexpr int kElementBytes = static_cast<int>(sizeof(typename KvSource::Element));
  if constexpr (has_large_prefill_tile({kQkDim, kVDim}, kElementBytes)) {
    if (plan.tile_rows == kPrefillLargeRows) {
      return PrefillKernel<T, kQkDim, kVDim, kPrefillLargeRows, QSchedule, KvSource>::launch(
          args, plan.blocks, stream);
    }
  }
  if (plan.tile_rows != kPrefillSmallRows) return cudaErrorInvalidValue;
  return PrefillKernel<T, kQkDim, kVDim, kPrefillSmallRows, QSchedule, KvSource>::launch(
      args, plan.blocks, stream);
}

template <typename T, typename QSchedule, typename KvSource>
cudaError_t launch_on_mma(const PrefillArgs<QSchedule, KvSource>& args, const PrefillPlan& plan,
                          cudaStream_t stream) {
  const HeadDims dims = plan.dims;
  if (dims.qk == 64) return launch_tile<T, 64, 64>(args, plan, stream);
  if (dims.qk == 96) return launch_tile<T, 96, 96>(args, plan, stream);
  if (dims.qk == 128) return launch_tile<T, 128, 128>(args, plan, stream);
  if (dims.qk == 192 && dims.v == 128) return launch_tile<T, 192, 128>(args, plan, stream);
  if (dims.qk == 192) return launch_tile<T, 192, 192>(args, plan, stream);
  return launch_tile<T, 256, 256>(args, plan, stream);
}

#endif  // ASTRAI_NO_MMA

template <typename T, typename QSchedule, typename KvSource>
cudaError_t launch_on_scalar(const PrefillArgs<QSchedule, KvSource>& args, const PrefillPlan& plan,
                             cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(kScalarPrefillRows * 32);
  config.stream = stream;
  return launch<prefill_scalar_kernel<T, QSchedule, KvSource>>(config, args);
}

template <typename T, typename QSchedule, typename KvSource>
cudaError_t launch_scheduled(const AttentionParams& p, const QWorkMap& map, const KvSource& source,
                             const PrefillPlan& plan, void* workspace, bool append_inside,
                             cudaStream_t stream) {
  const auto args = prefill_args<QSchedule>(p, map, source, plan, workspace, append_inside);
#ifndef ASTRAI_NO_MMA
  if (plan.variant == Variant::kMma) return launch_on_mma<T>(args, plan, stream);
#endif  // ASTRAI_NO_MMA
  return launch_on_scalar<T>(args, plan, stream);
}

}  // namespace

cudaError_t launch_prefill(const AttentionParams& p, const QWorkMap& map, const PrefillPlan& plan,
                           void* workspace, cudaStream_t stream) {
  if (!is_launchable(plan.blocks)) return cudaErrorInvalidValue;
  if (plan.workspace_bytes > 0 && workspace == nullptr) return cudaErrorInvalidValue;
  // With few new tokens each block puts those that it reads: that costs less than a launch.
  const bool append = p.new_k.data != nullptr;
  const bool append_inside =
      append && plan.variant == Variant::kMma && p.q_len <= kMaxDecodeQueries;
  if (append && !append_inside) {
    const cudaError_t error = launch_kv_append(p, stream);
    if (error != cudaSuccess) return error;
  }
  return with_types(p, [&](auto element, auto source) {
    using T = decltype(element);
    using KvSource = decltype(source);
    if constexpr (!KvSource::kPaged) {
      if (p.qo_indptr == nullptr) {
        return launch_scheduled<T, DenseQSchedule>(p, map, source, plan, workspace, append_inside,
                                                   stream);
      }
    }
    return launch_scheduled<T, PackedQSchedule>(p, map, source, plan, workspace, append_inside,
                                                stream);
  });
}

cudaError_t launch_prefill(const AttentionParams& p, const QWorkMap& map, void* workspace,
                           size_t workspace_bytes, cudaStream_t stream) {
  if (why_not_implemented(p) != nullptr) return cudaErrorInvalidValue;
  if (map.size < 0 || (map.size > 0 && (map.batch == nullptr || map.tile == nullptr))) {
    return cudaErrorInvalidValue;
  }
  if (p.batch == 0 || p.q_len == 0 || (p.qo_indptr != nullptr && p.total_q == 0)) {
    return cudaSuccess;
  }
  DeviceInfo device;
  const cudaError_t error = current_device_info(&device);
  if (error != cudaSuccess) return error;
  const bool usable = workspace != nullptr && reinterpret_cast<uintptr_t>(workspace) % 16 == 0;
  const size_t limit = usable ? workspace_bytes : 0;
  const PrefillPlan plan = plan_prefill(p, p.qo_indptr == nullptr ? 0 : map.size, device, limit);
  if (plan.workspace_bytes > limit) return cudaErrorInvalidValue;  // deterministic
  return launch_prefill(p, map, plan, workspace, stream);
}

}  // namespace astrai::attention
