// Definition of PrefillKernel, included by the translation units that instantiate it.
#pragma once

#include "kernels/attention/prefill_mma.cuh"
#include "kernels/common/launch.h"

namespace astrai::attention {

template <typename T, int kQkDim, int kVDim, int kRows, typename QSchedule, typename KvSource>
cudaError_t PrefillKernel<T, kQkDim, kVDim, kRows, QSchedule, KvSource>::launch(
    const PrefillArgs<QSchedule, KvSource>& args, int64_t blocks, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(blocks));
  config.block = dim3(kTile.threads());
  config.smem_bytes = kTile.smem_bytes();
  config.stream = stream;
  return astrai::launch<prefill_mma_kernel<T, kQkDim, kVDim, kRows, QSchedule, KvSource>>(config,
                                                                                          args);
}

// Both element types of Q, and K and V of the same type.
#define ASTRAI_PREFILL_ROWS(qk_dim, v_dim, rows, schedule, source)            \
  template struct PrefillKernel<__nv_bfloat16, qk_dim, v_dim, rows, schedule, \
                                source<__nv_bfloat16>>;                       \
  template struct PrefillKernel<__half, qk_dim, v_dim, rows, schedule, source<__half>>

// What every pair of head dims has: small tiles, also with K and V of e4m3.
#define ASTRAI_PREFILL_KERNELS(qk_dim, v_dim, schedule, source)                            \
  ASTRAI_PREFILL_ROWS(qk_dim, v_dim, kPrefillSmallRows, schedule, source);                 \
  template struct PrefillKernel<__nv_bfloat16, qk_dim, v_dim, kPrefillSmallRows, schedule, \
                                source<__nv_fp8_e4m3>>;                                    \
  template struct PrefillKernel<__half, qk_dim, v_dim, kPrefillSmallRows, schedule,        \
                                source<__nv_fp8_e4m3>>

// What those of has_large_prefill_tile have beside.
#define ASTRAI_PREFILL_LARGE_KERNELS(qk_dim, v_dim, schedule, source) \
  ASTRAI_PREFILL_ROWS(qk_dim, v_dim, kPrefillLargeRows, schedule, source)

}  // namespace astrai::attention
