// Host side of a kernel launch: one call that sets what a launch needs and returns the error.
//
//   return launch<my_kernel<T, 4>>({grid, block, smem_bytes, stream}, args...);
//
// Works under CUDA-graph capture, never synchronises and never clears errors of earlier work.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace astrai {

// Quotient rounded up, for a >= 0 and b > 0.
template <typename T>
constexpr T ceil_div(T a, T b) {
  return a / b + (a % b != 0);
}

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  size_t smem_bytes = 0;  // dynamic shared memory per block
  cudaStream_t stream = nullptr;
};

namespace launch_detail {

// Devices of higher index are asked anew at every call instead of being cached.
constexpr int kCachedDevices = 64;

// Blocks of more than 48 KB of shared memory, static and dynamic parts together, must be allowed
// once per kernel and device. A kernel without a dynamic part cannot have more.
template <auto kKernel>
cudaError_t allow_shared_memory(size_t bytes) {
  if (bytes == 0) return cudaSuccess;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  // The size allowed so far. Threads that race here all set the same value (see `most`).
  static std::atomic<size_t> allowed[kCachedDevices];
  const bool cached = device < kCachedDevices;
  if (cached && allowed[device].load(std::memory_order_acquire) >= bytes) return cudaSuccess;
  int limit = 0;
  error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  if (bytes > static_cast<size_t>(limit)) return cudaErrorInvalidValue;
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, kKernel);
  if (error != cudaSuccess) return error;
  // Opt in to all that the device has beside the kernel's static part: no later call needs more.
  const size_t most = static_cast<size_t>(limit) - attributes.sharedSizeBytes;
  if (bytes > most) return cudaErrorInvalidValue;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(most));
  if (error == cudaSuccess && cached) allowed[device].store(most, std::memory_order_release);
  return error;
}

}  // namespace launch_detail

// Launches kKernel with `args` on the current device. Returns the launch error, if any.
template <auto kKernel, typename... Args>
cudaError_t launch(const LaunchConfig& config, Args&&... args) {
  const cudaError_t error = launch_detail::allow_shared_memory<kKernel>(config.smem_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t native = {};
  native.gridDim = config.grid;
  native.blockDim = config.block;
  native.dynamicSmemBytes = config.smem_bytes;
  native.stream = config.stream;
  return cudaLaunchKernelEx(&native, kKernel, static_cast<Args&&>(args)...);
}

// Number of SMs of the current device, asked from the driver once per device.
inline cudaError_t current_sm_count(int* count) {
  static std::atomic<int> cache[launch_detail::kCachedDevices];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const bool cached = device < launch_detail::kCachedDevices;
  if (cached) {
    *count = cache[device].load(std::memory_order_relaxed);
    if (*count > 0) return cudaSuccess;
  }
  error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess && cached) cache[device].store(*count, std::memory_order_relaxed);
  return error;
}

}  // namespace astrai
