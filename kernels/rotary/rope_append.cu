#include "kernels/rotary/rope_append.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/common/launch.h"
#include "kernels/rotary/rope_append_kernel.cuh"
#include "kernels/rotary/rope_append_plan.h"

namespace astrai::rotary {
namespace {

template <typename T, typename E, int kWidth, bool kSplitPairs>
cudaError_t launch_variant(const RopeAppendParams& p, const RopeAppendPlan& plan,
                           cudaStream_t stream) {
  const RotaryPlan& r = plan.rotary;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(r.grid_x), r.grid_y, r.grid_z);
  config.block = dim3(r.block_x, r.block_y, r.block_z);
  config.stream = stream;
  config.overlaps_previous = true;
  return launch<rope_append_kernel<T, E, kWidth, kSplitPairs>>(config, p, plan);
}

template <typename T, typename E>
cudaError_t launch_types(const RopeAppendParams& p, const RopeAppendPlan& plan,
                         cudaStream_t stream) {
  const bool split = plan.rotary.split_pairs;
  switch (plan.rotary.width) {
    case 8:
      return split ? launch_variant<T, E, 8, true>(p, plan, stream)
                   : launch_variant<T, E, 8, false>(p, plan, stream);
    case 2:
      return split ? launch_variant<T, E, 2, true>(p, plan, stream)
                   : launch_variant<T, E, 2, false>(p, plan, stream);
    case 1:
      return launch_variant<T, E, 1, true>(p, plan, stream);
  }
  return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t launch_type(const RopeAppendParams& p, const RopeAppendPlan& plan,
                        cudaStream_t stream) {
  return p.cache_dtype == DType::kE4M3 ? launch_types<T, __nv_fp8_e4m3>(p, plan, stream)
                                       : launch_types<T, T>(p, plan, stream);
}

}  // namespace

cudaError_t launch_rope_append(const RopeAppendParams& params, cudaStream_t stream) {
  if (!can_implement(params)) return cudaErrorInvalidValue;
  if (is_empty(params)) return cudaSuccess;
  int sm_count = 0;
  const cudaError_t error = current_sm_count(&sm_count);
  if (error != cudaSuccess) return error;
  const RopeAppendParams p = plan_detail::collapse_pages(params);
  const RopeAppendPlan plan = make_plan(p, sm_count);
  return p.dtype == DType::kBF16 ? launch_type<__nv_bfloat16>(p, plan, stream)
                                 : launch_type<__half>(p, plan, stream);
}

}  // namespace astrai::rotary
