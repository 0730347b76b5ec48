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
  // Neighbouring blocks in x that form a cluster (sm_90), up to 16; divides grid.x.
  int cluster_blocks = 1;
  // Whether the kernel's blocks may start before the stream's kernel in front has ended (sm_90):
  // the kernel waits by itself, see dependent_launch.cuh.
  bool overlaps_previous = false;
};

namespace launch_detail {

// Devices of higher index are asked anew at every call instead of being cached.
constexpr int kCachedDevices = 64;

// What `ask` says of a device, a number from 0 on, asked again only after an error.
template <typename Ask>
cudaError_t ask_once(std::atomic<int> (&cache)[kCachedDevices], int device, int* answer, Ask ask) {
  const bool cached = device < kCachedDevices;
  if (cached) {
    *answer = cache[device].load(std::memory_order_acquire) - 1;  // 0 = not asked yet
    if (*answer >= 0) return cudaSuccess;
  }
  const cudaError_t error = ask(answer);
  if (error == cudaSuccess && cached) {
    cache[device].store(*answer + 1, std::memory_order_release);
  }
  return error;
}

// Blocks of more than 48 KB of shared memory, static and dynamic parts together, must be allowed
// once per kernel and device. A kernel without a dynamic part cannot have more.
template <auto kKernel>
cudaError_t allow_shared_memory(size_t bytes, int device) {
  if (bytes == 0) return cudaSuccess;
  static std::atomic<int> cache[kCachedDevices];
  int most = 0;
  const cudaError_t error = ask_once(cache, device, &most, [device](int* dynamic) {
    int limit = 0;
    cudaError_t error =
        cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error != cudaSuccess) return error;
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, kKernel);
    if (error != cudaSuccess) return error;
    // All that the device has beside the kernel's static part: no later call needs more.
    *dynamic = limit - static_cast<int>(attributes.sharedSizeBytes);
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, *dynamic);
  });
  if (error != cudaSuccess) return error;
  return bytes <= static_cast<size_t>(most) ? cudaSuccess : cudaErrorInvalidValue;
}

// Clusters of more than 8 blocks must be allowed once per kernel and device: not every device with
// clusters has them.
template <auto kKernel>
cudaError_t allow_cluster(int blocks, int device) {
  constexpr int kPortableBlocks = 8;
  if (blocks <= kPortableBlocks) return cudaSuccess;
  static std::atomic<int> cache[kCachedDevices];
  int allowed = 0;
  return ask_once(cache, device, &allowed, [](int* answer) {
    *answer = 1;
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  });
}

// Whether the current device runs code of the kernel that was compiled for sm_90 or later, and not
// the PTX of a lower level.
template <auto kKernel>
cudaError_t runs_sm90_code(int device, bool* runs) {
  static std::atomic<int> cache[kCachedDevices];
  int answer = 0;
  const cudaError_t error = ask_once(cache, device, &answer, [](int* is_sm90) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kKernel);
    *is_sm90 = error == cudaSuccess && attributes.ptxVersion >= 90;
    return error;
  });
  *runs = answer == 1;
  return error;
}

constexpr int kMostAttributes = 2;

// The configuration in the runtime's terms. Points to `attributes`, which must outlive it.
inline cudaLaunchConfig_t native_config(const LaunchConfig& config,
                                        cudaLaunchAttribute (&attributes)[kMostAttributes]) {
  cudaLaunchConfig_t native = {};
  native.gridDim = config.grid;
  native.blockDim = config.block;
  native.dynamicSmemBytes = config.smem_bytes;
  native.stream = config.stream;
  native.attrs = attributes;
  if (config.cluster_blocks > 1) {
    cudaLaunchAttribute& attribute = attributes[native.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(config.cluster_blocks);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
  }
  if (config.overlaps_previous) {
    cudaLaunchAttribute& attribute = attributes[native.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return native;
}

}  // namespace launch_detail

// Launches kKernel with `args` on the current device. Returns the launch error, if any.
template <auto kKernel, typename... Args>
cudaError_t launch(LaunchConfig config, Args&&... args) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = launch_detail::allow_shared_memory<kKernel>(config.smem_bytes, device);
  if (error != cudaSuccess) return error;
  error = launch_detail::allow_cluster<kKernel>(config.cluster_blocks, device);
  if (error != cudaSuccess) return error;
  if (config.overlaps_previous) {
    error = launch_detail::runs_sm90_code<kKernel>(device, &config.overlaps_previous);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[launch_detail::kMostAttributes];
  const cudaLaunchConfig_t native = launch_detail::native_config(config, attributes);
  return cudaLaunchKernelEx(&native, kKernel, static_cast<Args&&>(args)...);
}

// Clusters of config.cluster_blocks blocks of kKernel that the current device holds at a time; 0 if
// it has no clusters, or runs code of the kernel that was compiled for a level below sm_90. Asked
// from the driver once per device and cluster size: the rest of `config` is taken to be the same in
// every call.
template <auto kKernel>
cudaError_t resident_clusters(const LaunchConfig& config, int* clusters) {
  constexpr int kMostBlocks = 16;
  static std::atomic<int> cache[kMostBlocks + 1][launch_detail::kCachedDevices];
  if (config.cluster_blocks > kMostBlocks) return cudaErrorInvalidValue;
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return launch_detail::ask_once(
      cache[config.cluster_blocks], device, clusters, [&config, device](int* resident) {
        *resident = 0;
        bool has_clusters = false;
        cudaError_t error = launch_detail::runs_sm90_code<kKernel>(device, &has_clusters);
        if (error != cudaSuccess || !has_clusters) return error;
        error = launch_detail::allow_shared_memory<kKernel>(config.smem_bytes, device);
        if (error != cudaSuccess) return error;
        error = launch_detail::allow_cluster<kKernel>(config.cluster_blocks, device);
        if (error != cudaSuccess) return error;
        cudaLaunchAttribute attributes[launch_detail::kMostAttributes];
        const cudaLaunchConfig_t native = launch_detail::native_config(config, attributes);
        return cudaOccupancyMaxActiveClusters(resident, kKernel, &native);
      });
}

// Number of SMs of the current device, asked from the driver once per device.
inline cudaError_t current_sm_count(int* count) {
  static std::atomic<int> cache[launch_detail::kCachedDevices];
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return launch_detail::ask_once(cache, device, count, [device](int* sms) {
    return cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device);
  });
}

}  // namespace astrai
