// Definition of launch_prefill_mma, included by the translation units that instantiate it.
#pragma once

#include "kernels/attention/mma_launch.cuh"
#include "kernels/attention/prefill_mma.cuh"
#include "kernels/common/launch.h"

namespace astrai::attention {

template <typename T, int kHeadDim, int kRows>
cudaError_t launch_prefill_tile(const PrefillArgs<DenseQSchedule, ContigKV<T>>& args,
                                const PrefillPlan& plan, cudaStream_t stream) {
  constexpr PrefillTile kTile = prefill_tile(kHeadDim, kRows);
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(kTile.threads());
  config.smem_bytes = kTile.smem_bytes();
  config.stream = stream;
  return launch<prefill_mma_kernel<T, kHeadDim, kRows, DenseQSchedule, ContigKV<T>>>(config, args);
}

template <typename T, int kHeadDim>
cudaError_t launch_prefill_mma(const PrefillArgs<DenseQSchedule, ContigKV<T>>& args,
                               const PrefillPlan& plan, cudaStream_t stream) {
  switch (plan.tile_rows) {
    case kPrefillLargeRows:
      return launch_prefill_tile<T, kHeadDim, kPrefillLargeRows>(args, plan, stream);
    case kPrefillSmallRows:
      return launch_prefill_tile<T, kHeadDim, kPrefillSmallRows>(args, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace astrai::attention
