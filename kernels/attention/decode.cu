// Entry points of decode over dense tensors: check, plan, fill the kernel's arguments, launch.

#include "kernels/attention/attention.h"
#include "kernels/attention/decode_scalar.cuh"
#include "kernels/attention/dense.cuh"
#include "kernels/attention/mma_launch.cuh"
#include "kernels/attention/plan.h"
#include "kernels/attention/softmax.cuh"
#include "kernels/common/device.h"
#include "kernels/common/launch.h"

namespace astrai::attention {
namespace {

template <typename T>
DecodeArgs<ContigKV<T>> decode_args(const DenseParams& p, const DecodePlan& plan, void* workspace) {
  const ScoreScale scale(p.scale);
  DecodeArgs<ContigKV<T>> args = {};
  args.kv = contig_kv<T>(p);
  args.q = p.q.data;
  args.q_batch_stride = p.q.batch_stride;
  args.q_head_stride = p.q.head_stride;
  args.out = p.out;
  args.out_batch_stride = p.out_batch_stride;
  args.out_head_stride = p.out_head_stride;
  args.lse = p.lse;
  args.kv_heads = p.kv_heads;
  args.q_heads = p.q_heads;
  args.head_dim = p.head_dim;
  args.passes = plan.passes;
  args.splits = plan.splits;
  args.split_keys = plan.split_keys;
  if (plan.splits > 1) {
    const int64_t rows = static_cast<int64_t>(p.batch) * p.q_heads * plan.splits;
    args.partials.out = static_cast<float*>(workspace);
    args.partials.max_sum = args.partials.out + rows * p.head_dim;
  }
  args.log2_scale = scale.log2_scale;
  args.negate_q = scale.negate_q;
  args.mask = p.mask;
  return args;
}

#ifdef ASTRAI_NO_MMA

// plan.cc never chooses Variant::kMma in such builds.
template <typename T>
cudaError_t decode_on_mma(const DecodeArgs<ContigKV<T>>&, const DecodePlan&, int, cudaStream_t) {
  return cudaErrorInvalidValue;
}

#else

template <typename T>
cudaError_t decode_on_mma(const DecodeArgs<ContigKV<T>>& args, const DecodePlan& plan, int batch,
                          cudaStream_t stream) {
  if (args.head_dim == 64) return launch_decode_mma<T, 64>(args, plan, batch, stream);
  if (args.head_dim == 128) return launch_decode_mma<T, 128>(args, plan, batch, stream);
  if (args.head_dim == 256) return launch_decode_mma<T, 256>(args, plan, batch, stream);
  return cudaErrorInvalidValue;
}

#endif  // ASTRAI_NO_MMA

}  // namespace

cudaError_t launch_decode(const DenseParams& params, const DecodePlan& plan, void* workspace,
                          cudaStream_t stream) {
  if (!is_launchable(plan.blocks)) return cudaErrorInvalidValue;
  if (plan.workspace_bytes > 0 && workspace == nullptr) return cudaErrorInvalidValue;
  return with_element_type(params.dtype, [&](auto element) {
    using T = decltype(element);
    const DecodeArgs<ContigKV<T>> args = decode_args<T>(params, plan, workspace);
    if (plan.variant == Variant::kMma) return decode_on_mma<T>(args, plan, params.batch, stream);
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(plan.blocks));
    config.block = dim3(kScalarDecodeWarps * 32);
    config.stream = stream;
    return launch<decode_scalar_kernel<T, ContigKV<T>>>(config, args);
  });
}

cudaError_t launch_decode(const DenseParams& params, void* workspace, size_t workspace_bytes,
                          cudaStream_t stream) {
  if (params.q_len != 1 || why_not_implemented(params) != nullptr) return cudaErrorInvalidValue;
  if (params.batch == 0) return cudaSuccess;
  DeviceInfo device;
  const cudaError_t error = current_device_info(&device);
  if (error != cudaSuccess) return error;
  const bool usable = reinterpret_cast<uintptr_t>(workspace) % 16 == 0 && workspace != nullptr;
  const DecodePlan plan = plan_decode(params, device, usable ? workspace_bytes : 0);
  return launch_decode(params, plan, workspace, stream);
}

}  // namespace astrai::attention
