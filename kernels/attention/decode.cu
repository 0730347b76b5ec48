// Entry points of decode: check, plan, fill the kernel's arguments, launch.

#include "kernels/attention/attention.h"
#include "kernels/attention/decode_plan.h"
#include "kernels/attention/decode_scalar.cuh"
#include "kernels/attention/dispatch.cuh"
#include "kernels/attention/work_split.cuh"
#include "kernels/common/launch.h"

namespace astrai::attention {
namespace {

// Workers of each pair if all pairs, of at most `pair_units` units, are cut alike; else 0.
int pieces_of_each_pair(const AttentionParams& p, const DecodePlan& plan, uint32_t pair_units) {
  const uint32_t pairs = static_cast<uint32_t>(p.batch) * p.kv_heads;
  const uint32_t workers =
      used_workers(pair_units * pairs, static_cast<uint32_t>(plan.workers), pairs);
  return workers % pairs == 0 ? static_cast<int>(workers / pairs) : 0;
}

template <typename KvSource>
DecodeArgs<KvSource> decode_args(const AttentionParams& p, const KvSource& source,
                                 const DecodePlan& plan, void* workspace) {
  DecodeArgs<KvSource> args = {};
  args.kv = source;
  args.queries = {p.q_len, p.qo_indptr};
  args.score = score_args(p);
  args.q = p.q;
  args.out = p.out;
  args.out_batch_stride = p.out_batch_stride;
  args.out_seq_stride = p.out_seq_stride;
  args.out_head_stride = p.out_head_stride;
  args.lse = p.lse;
  args.append = append_args(p);
  args.batch = p.batch;
  args.kv_heads = p.kv_heads;
  args.group = p.q_heads / p.kv_heads;
  args.head_dim = p.head_dim;
  args.v_head_dim = p.v_head_dim;
  args.cluster_blocks = plan.cluster_blocks;
  args.workers = plan.workers;
  args.unit_keys = plan.unit_keys;
  args.deterministic = plan.fixed_splits > 0;
  args.pieces_each = plan.fixed_splits;
  args.equal_lengths = p.qo_indptr == nullptr && p.kv_indptr == nullptr;
  // Where lengths stand on the device, the most that a request may have.
  args.equal = decode_request(args.score, p.q_len, p.kv_len);
  if (plan.workers > 0) {
    const uint32_t units = args.equal.units(plan.unit_keys);
    args.equal_units = units;
    // The kv heads of one request have equal lengths, and pairs that are not cut need none.
    if (args.equal_lengths || p.batch == 1 || units == 1) {
      args.pieces_each = pieces_of_each_pair(p, plan, units);
    }
  }
  if (plan.workspace_bytes > 0) {
    const int64_t slots =
        plan.fixed_splits > 0 ? plan.blocks : static_cast<int64_t>(plan.workers) * 2;
    args.workspace = split_workspace(workspace, slots, kMmaRows, plan.dims.v);
  }
  return args;
}

template <typename T, typename KvSource>
cudaError_t decode_on_scalar(const DecodeArgs<KvSource>& args, const DecodePlan& plan,
                             cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(kScalarDecodeWarps * 32);
  config.stream = stream;
  return launch<decode_scalar_kernel<T, KvSource>>(config, args);
}

#ifndef ASTRAI_NO_MMA

// Calls f with the DecodeKernel for these head dims.
template <typename T, typename KvSource, typename F>
cudaError_t with_kernel(HeadDims dims, F f) {
  if (dims.qk == 64) return f(DecodeKernel<T, 64, 64, KvSource>());
  if (dims.qk == 96) return f(DecodeKernel<T, 96, 96, KvSource>());
  if (dims.qk == 128) return f(DecodeKernel<T, 128, 128, KvSource>());
  if (dims.qk == 192 && dims.v == 128) return f(DecodeKernel<T, 192, 128, KvSource>());
  if (dims.qk == 192) return f(DecodeKernel<T, 192, 192, KvSource>());
  return f(DecodeKernel<T, 256, 256, KvSource>());
}

#endif  // ASTRAI_NO_MMA

// How many blocks and clusters the current device holds of the kernel that would run.
cudaError_t residency_of(const AttentionParams& p, Residency* residency) {
#ifndef ASTRAI_NO_MMA
  if (choose_variant(p) == Variant::kMma && !p.deterministic) {
    return with_types(p, [&](auto element, auto source) {
      return with_kernel<decltype(element), decltype(source)>(
          kernel_dims(p.head_dim, p.v_head_dim),
          [&](auto kernel) { return decltype(kernel)::residency(residency); });
    });
  }
#endif  // ASTRAI_NO_MMA
  return cudaSuccess;
}

}  // namespace

cudaError_t launch_decode(const AttentionParams& p, const DecodePlan& plan, void* workspace,
                          cudaStream_t stream) {
  if (!is_launchable(plan.blocks)) return cudaErrorInvalidValue;
  if (plan.workspace_bytes > 0 && workspace == nullptr) return cudaErrorInvalidValue;
  return with_types(p, [&](auto element, auto source) {
    using T = decltype(element);
    using KvSource = decltype(source);
    const DecodeArgs<KvSource> args = decode_args(p, source, plan, workspace);
#ifndef ASTRAI_NO_MMA
    if (plan.variant == Variant::kMma) {
      return with_kernel<T, KvSource>(plan.dims, [&](auto kernel) {
        return decltype(kernel)::launch(args, plan.blocks, stream);
      });
    }
#endif  // ASTRAI_NO_MMA
    return decode_on_scalar<T>(args, plan, stream);
  });
}

cudaError_t launch_decode(const AttentionParams& p, void* workspace, size_t workspace_bytes,
                          cudaStream_t stream) {
  if (p.q_len > kMaxDecodeQueries || why_not_implemented(p) != nullptr) {
    return cudaErrorInvalidValue;
  }
  if (p.batch == 0 || p.q_len == 0) return cudaSuccess;
  // Too many rows for one MMA: the prefill kernel splits the keys as well. No request has more
  // queries than one entry of a work map stands for, so it needs no map.
  if (!fits_decode(p)) return launch_prefill(p, QWorkMap(), workspace, workspace_bytes, stream);
  Residency residency;
  const cudaError_t error = residency_of(p, &residency);
  if (error != cudaSuccess) return error;
  const bool usable = workspace != nullptr && reinterpret_cast<uintptr_t>(workspace) % 16 == 0;
  const size_t limit = usable ? workspace_bytes : 0;
  const DecodePlan plan = plan_decode(p, residency, limit);
  if (plan.workspace_bytes > limit) return cudaErrorInvalidValue;  // deterministic
  return launch_decode(p, plan, workspace, stream);
}

}  // namespace astrai::attention
