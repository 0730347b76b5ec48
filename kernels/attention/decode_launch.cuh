// Definition of launch_decode_mma, included by the translation units that instantiate it.
#pragma once

#include "kernels/attention/decode_combine.cuh"
#include "kernels/attention/decode_mma.cuh"
#include "kernels/attention/mma_launch.cuh"
#include "kernels/common/launch.h"

namespace astrai::attention {

template <typename T, int kHeadDim>
cudaError_t launch_decode_mma(const DecodeArgs<ContigKV<T>>& args, const DecodePlan& plan,
                              int batch, cudaStream_t stream) {
  constexpr DecodeTile kTile = decode_tile(kHeadDim);
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(kTile.warps * 32);
  config.smem_bytes = kTile.smem_bytes();
  config.stream = stream;
  const cudaError_t error = launch<decode_mma_kernel<T, kHeadDim, ContigKV<T>>>(config, args);
  if (error != cudaSuccess || plan.splits == 1) return error;
  LaunchConfig combine;
  combine.grid = dim3(static_cast<unsigned>(batch * args.q_heads));
  combine.block = dim3(kCombineThreads);
  combine.stream = stream;
  return launch<decode_combine_kernel<T, kHeadDim, ContigKV<T>>>(combine, args);
}

}  // namespace astrai::attention
