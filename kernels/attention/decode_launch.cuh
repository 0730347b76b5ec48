// Definition of DecodeKernel, included by the translation units that instantiate it.
#pragma once

#include "kernels/attention/decode_mma.cuh"
#include "kernels/common/device.h"
#include "kernels/common/launch.h"

namespace astrai::attention {

template <typename T, int kQkDim, int kVDim, typename KvSource>
cudaError_t DecodeKernel<T, kQkDim, kVDim, KvSource>::residency(Residency* residency) {
  DeviceInfo device;
  cudaError_t error = current_device_info(&device);
  if (error != cudaSuccess) return error;
  residency->clusters[0] = resident_decode_blocks(kTile, device);
  LaunchConfig config;
  config.block = dim3(kTile.threads());
  config.smem_bytes = kTile.smem_bytes();
  for (int log2 = 1; log2 < kClusterSizes; ++log2) {
    config.cluster_blocks = 1 << log2;
    config.grid = dim3(static_cast<unsigned>(config.cluster_blocks));
    error = resident_clusters<decode_mma_kernel<T, kQkDim, kVDim, KvSource>>(
        config, &residency->clusters[log2]);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename T, int kQkDim, int kVDim, typename KvSource>
cudaError_t DecodeKernel<T, kQkDim, kVDim, KvSource>::launch(const DecodeArgs<KvSource>& args,
                                                             int64_t blocks, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(blocks));
  config.block = dim3(kTile.threads());
  config.smem_bytes = kTile.smem_bytes();
  config.stream = stream;
  config.cluster_blocks = args.cluster_blocks;
  config.overlaps_previous = true;
  return astrai::launch<decode_mma_kernel<T, kQkDim, kVDim, KvSource>>(config, args);
}

// Both element types of Q, one type of K and V (KvElement<T>), paged or not.
#define ASTRAI_DECODE_KERNELS(qk_dim, v_dim, source)                                 \
  template struct DecodeKernel<__nv_bfloat16, qk_dim, v_dim, source<__nv_bfloat16>>; \
  template struct DecodeKernel<__half, qk_dim, v_dim, source<__half>>;               \
  template struct DecodeKernel<__nv_bfloat16, qk_dim, v_dim, source<__nv_fp8_e4m3>>; \
  template struct DecodeKernel<__half, qk_dim, v_dim, source<__nv_fp8_e4m3>>

}  // namespace astrai::attention
