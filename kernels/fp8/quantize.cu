#include "kernels/fp8/quantize.h"

#include "kernels/common/launch.h"
#include "kernels/fp8/quantize_kernel.cuh"
#include "kernels/fp8/quantize_plan.h"

namespace astrai::fp8 {
namespace {

template <typename T, DType kFormat>
cudaError_t launch_tiles(const QuantizeParams& p, const QuantizePlan& plan, bool measure,
                         cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(plan.tiles));
  config.block = dim3(kQuantizeThreads);
  config.stream = stream;
  return plan.thread_rows == 4 ? launch<quantize_kernel<T, kFormat, 4>>(config, p, plan, measure)
                               : launch<quantize_kernel<T, kFormat, 1>>(config, p, plan, measure);
}

template <typename T>
cudaError_t launch_type(QuantizeParams p, const QuantizePlan& plan, cudaStream_t stream) {
  auto tiles = [&](bool measure) {
    return p.out_type == DType::kE4M3 ? launch_tiles<T, DType::kE4M3>(p, plan, measure, stream)
                                      : launch_tiles<T, DType::kE5M2>(p, plan, measure, stream);
  };
  cudaError_t error = cudaSuccess;
  if (p.scaling == Scaling::kDynamic) {
    error = cudaMemsetAsync(p.finite_amax, 0, sizeof(float), stream);
    if (error == cudaSuccess) error = tiles(true);
    p.amax = nullptr;
  } else if (p.scaling == Scaling::kRowwise) {
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(p.batch * p.rows));
    config.block = dim3(kQuantizeThreads);
    config.stream = stream;
    error = launch<row_steps_kernel<T>>(config, p, plan);
  }
  return error == cudaSuccess ? tiles(false) : error;
}

}  // namespace

cudaError_t launch_quantize(const QuantizeParams& params, cudaStream_t stream) {
  if (!can_implement(params)) return cudaErrorInvalidValue;
  if (params.amax != nullptr && !params.accumulate_amax) {
    const cudaError_t error = cudaMemsetAsync(params.amax, 0, sizeof(float), stream);
    if (error != cudaSuccess) return error;
  }
  if (is_empty(params)) return cudaSuccess;
  int sm_count = 0;
  const cudaError_t error = current_sm_count(&sm_count);
  if (error != cudaSuccess) return error;
  QuantizeParams p = params;
  const QuantizePlan plan = make_quantize_plan(&p, sm_count);
  switch (p.in_type) {
    case DType::kBF16:
      return launch_type<__nv_bfloat16>(p, plan, stream);
    case DType::kFP16:
      return launch_type<__half>(p, plan, stream);
    default:
      return launch_type<float>(p, plan, stream);
  }
}

}  // namespace astrai::fp8
