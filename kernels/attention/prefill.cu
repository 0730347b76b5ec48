// Entry points of prefill over dense tensors: check, plan, fill the kernel's arguments, launch.

#include "kernels/attention/attention.h"
#include "kernels/attention/dense.cuh"
#include "kernels/attention/mma_launch.cuh"
#include "kernels/attention/plan.h"
#include "kernels/attention/prefill_scalar.cuh"
#include "kernels/attention/softmax.cuh"
#include "kernels/common/device.h"
#include "kernels/common/launch.h"

namespace astrai::attention {
namespace {

template <typename T>
PrefillArgs<DenseQSchedule, ContigKV<T>> prefill_args(const DenseParams& p,
                                                      const PrefillPlan& plan) {
  const ScoreScale scale(p.scale);
  PrefillArgs<DenseQSchedule, ContigKV<T>> args = {};
  args.schedule.q_len = p.q_len;
  args.schedule.kv_heads = p.kv_heads;
  args.schedule.tile_rows = plan.tile_rows;
  args.schedule.row_tiles = static_cast<int>(plan.row_tiles);
  args.schedule.pairs = p.batch * p.kv_heads;
  args.schedule.section = static_cast<int>(plan.section);
  args.schedule.longest_first = p.causal;
  args.schedule.q_batch_stride = p.q.batch_stride;
  args.schedule.out_batch_stride = p.out_batch_stride;
  args.kv = contig_kv<T>(p);
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
  args.log2_scale = scale.log2_scale;
  args.negate_q = scale.negate_q;
  args.causal = p.causal;
  args.mask = p.mask;
  return args;
}

#ifdef ASTRAI_NO_MMA

// plan.cc never chooses Variant::kMma in such builds.
template <typename T>
cudaError_t prefill_on_mma(const PrefillArgs<DenseQSchedule, ContigKV<T>>&, const PrefillPlan&,
                           cudaStream_t) {
  return cudaErrorInvalidValue;
}

#else

template <typename T>
cudaError_t prefill_on_mma(const PrefillArgs<DenseQSchedule, ContigKV<T>>& args,
                           const PrefillPlan& plan, cudaStream_t stream) {
  if (args.head_dim == 64) return launch_prefill_mma<T, 64>(args, plan, stream);
  if (args.head_dim == 128) return launch_prefill_mma<T, 128>(args, plan, stream);
  if (args.head_dim == 256) return launch_prefill_mma<T, 256>(args, plan, stream);
  return cudaErrorInvalidValue;
}

#endif  // ASTRAI_NO_MMA

}  // namespace

cudaError_t launch_prefill(const DenseParams& params, const PrefillPlan& plan,
                           cudaStream_t stream) {
  if (!is_launchable(plan.blocks)) return cudaErrorInvalidValue;
  return with_element_type(params.dtype, [&](auto element) {
    using T = decltype(element);
    const auto args = prefill_args<T>(params, plan);
    if (plan.variant == Variant::kMma) return prefill_on_mma<T>(args, plan, stream);
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(plan.blocks));
    config.block = dim3(kScalarPrefillRows * 32);
    config.stream = stream;
    return launch<prefill_scalar_kernel<T, DenseQSchedule, ContigKV<T>>>(config, args);
  });
}

cudaError_t launch_prefill(const DenseParams& params, cudaStream_t stream) {
  if (why_not_implemented(params) != nullptr) return cudaErrorInvalidValue;
  if (params.batch == 0 || params.q_len == 0) return cudaSuccess;
  DeviceInfo device;
  const cudaError_t error = current_device_info(&device);
  if (error != cudaSuccess) return error;
  return launch_prefill(params, plan_prefill(params, device), stream);
}

}  // namespace astrai::attention
