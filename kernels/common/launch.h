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

// Clusters of more than 8 blocks must be allowed once per kernel and device: not every device with
// clusters has them.
template <auto kKernel>
cudaError_t allow_cluster(int blocks) {
  constexpr int kPortableBlocks = 8;
  if (blocks <= kPortableBlocks) return cudaSuccess;
  static std::atomic<bool> allowed[kCachedDevices];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const bool cached = device < kCachedDevices;
  if (cached && allowed[device].load(std::memory_order_acquire)) return cudaSuccess;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error == cudaSuccess && cached) allowed[device].store(true, std::memory_order_release);
  return error;
}

// Whether the current device runs code of the kernel that was compiled for sm_90 or later, and not
// the PTX of a lower level. Asked from the driver once per device.
template <auto kKernel>
cudaError_t runs_sm90_code(bool* runs) {
  static std::atomic<int> cache[kCachedDevices];  // 0 = not asked yet, 1 = no, 2 = yes
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const bool cached = device < kCachedDevices;
  if (cached) {
    const int known = cache[device].load(std::memory_order_relaxed);
    *runs = known == 2;
    if (known != 0) return cudaSuccess;
  }
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, kKernel);
  if (error != cudaSuccess) return error;
  *runs = attributes.ptxVersion >= 90;
  if (cached) cache[device].store(*runs ? 2 : 1, std::memory_order_relaxed);
  return cudaSuccess;
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
  cudaError_t error = launch_detail::allow_shared_memory<kKernel>(config.smem_bytes);
  if (error != cudaSuccess) return error;
  error = launch_detail::allow_cluster<kKernel>(config.cluster_blocks);
  if (error != cudaSuccess) return error;
  if (config.overlaps_previous) {
    error = launch_detail::runs_sm90_code<kKernel>(&config.overlaps_previous);
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
  constexpr int kSizes = 17;
  // Answers plus 1; 0 = not asked yet.
  static std::atomic<int> cache[launch_detail::kCachedDevices][kSizes];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const bool cached = device < launch_detail::kCachedDevices && config.cluster_blocks < kSizes;
  if (cached) {
    *clusters = cache[device][config.cluster_blocks].load(std::memory_order_relaxed) - 1;
    if (*clusters >= 0) return cudaSuccess;
  }
  *clusters = 0;
  bool has_clusters = false;
  error = launch_detail::runs_sm90_code<kKernel>(&has_clusters);
  if (error != cudaSuccess) return error;
  if (has_clusters) {
    error = launch_detail::allow_shared_memory<kKernel>(config.smem_bytes);
    if (error != cudaSuccess) return error;
    error = launch_detail::allow_cluster<kKernel>(config.cluster_blocks);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[launch_detail::kMostAttributes];
    const cudaLaunchConfig_t native = launch_detail::native_config(config, attributes);
    error = cudaOccupancyMaxActiveClusters(clusters, kKernel, &native);
    if (error != cudaSuccess) return error;
  }
  if (cached) {
    cache[device][config.cluster_blocks].store(*clusters + 1, std::memory_order_relaxed);
  }
  return cudaSuccess;
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
