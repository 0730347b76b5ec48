#include "kernels/rotary/rotary.h"

#include "kernels/common/launch.h"
#include "kernels/rotary/plan.h"
#include "kernels/rotary/rotary_kernel.cuh"

namespace astrai::rotary {
namespace {

template <auto kKernel>
cudaError_t launch_kernel(const RotaryParams& p, const RotaryPlan& plan, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(plan.grid_x), plan.grid_y, plan.grid_z);
  config.block = dim3(plan.block_x, plan.block_y, plan.block_z);
  config.stream = stream;
  config.overlaps_previous = true;
  return launch<kKernel>(config, p, plan);
}

template <typename T, int kWidth, bool kSplitPairs>
cudaError_t launch_variant(const RotaryParams& p, const RotaryPlan& plan, cudaStream_t stream) {
  if constexpr (kWidth == (kSplitPairs ? plan_detail::kSingleSplitWidth : 8)) {
    constexpr auto kFromTable = rotary_single_kernel<T, kWidth, kSplitPairs, AngleSource::kTable>;
    constexpr auto kFromTokens =
        rotary_single_kernel<T, kWidth, kSplitPairs, AngleSource::kPerToken>;
    if (plan.single) {
      return p.source == AngleSource::kTable ? launch_kernel<kFromTable>(p, plan, stream)
                                             : launch_kernel<kFromTokens>(p, plan, stream);
    }
  }
  return launch_kernel<rotary_kernel<T, kWidth, kSplitPairs>>(p, plan, stream);
}

template <typename T, int kWidth>
cudaError_t launch_width(const RotaryParams& p, const RotaryPlan& plan, cudaStream_t stream) {
  if constexpr (kWidth == 1) {
    return launch_variant<T, kWidth, true>(p, plan, stream);
  } else {
    return plan.split_pairs ? launch_variant<T, kWidth, true>(p, plan, stream)
                            : launch_variant<T, kWidth, false>(p, plan, stream);
  }
}

template <typename T>
cudaError_t launch_type(const RotaryParams& p, const RotaryPlan& plan, cudaStream_t stream) {
  switch (plan.width) {
    case 8:
      return launch_width<T, 8>(p, plan, stream);
    case 4:
      return launch_width<T, 4>(p, plan, stream);
    case 2:
      return launch_width<T, 2>(p, plan, stream);
    case 1:
      return launch_width<T, 1>(p, plan, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_rotary(const RotaryParams& params, cudaStream_t stream) {
  if (!can_implement(params)) return cudaErrorInvalidValue;
  if (is_empty(params)) return cudaSuccess;
  int sm_count = 0;
  const cudaError_t error = current_sm_count(&sm_count);
  if (error != cudaSuccess) return error;
  const RotaryParams p = plan_detail::collapse_batch(params);
  const RotaryPlan plan = make_plan(p, sm_count);
  return p.dtype == DType::kBF16 ? launch_type<__nv_bfloat16>(p, plan, stream)
                                 : launch_type<__half>(p, plan, stream);
}

}  // namespace astrai::rotary
