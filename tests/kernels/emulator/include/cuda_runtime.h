// CUDA C++ for the CPU: the keywords, the built-in variables and functions that kernels use, and
// the launch. See tests/kernels/emulator/README.md.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/kernels/emulator/device.h"

// ---- Keywords -----------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
// Every block runs on an OS thread of its own.
#define __shared__ static thread_local

// ---- Launch -------------------------------------------------------------------------------------

template <typename T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(pointer), bytes);
}

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  // As on a GPU, the arguments are copied when the kernel is launched.
  std::tuple<std::decay_t<Params>...> copy(static_cast<Args&&>(args)...);
  return astrai::emulator::launch(*config, reinterpret_cast<const void*>(kernel),
                                  [kernel, copy] { std::apply(kernel, copy); });
}

template <typename... Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Params...)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
template <typename... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute,
                                 int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
template <typename... Params>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(Params...),
                                                          int threads, size_t smem_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      blocks, reinterpret_cast<const void*>(kernel), threads, smem_bytes);
}
template <typename... Params>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void (*kernel)(Params...),
                                           const cudaLaunchConfig_t* config) {
  return cudaOccupancyMaxActiveClusters(clusters, reinterpret_cast<const void*>(kernel), config);
}

#include "tests/kernels/emulator/builtins.h"
