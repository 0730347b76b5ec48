// What a launch plan needs to know about the current device, asked from the driver once per device.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

namespace astrai {

struct DeviceInfo {
  int sm_count = 0;
  int smem_per_block = 0;  // bytes one block may use (opt-in limit)
  int smem_per_sm = 0;     // bytes
};

// Info of the current device. Safe to call from several threads, and under graph capture.
inline cudaError_t current_device_info(DeviceInfo* info) {
  constexpr int kCachedDevices = 64;  // devices of higher index are asked anew at every call
  static DeviceInfo cache[kCachedDevices];
  // 0 empty, 1 being written, 2 filled: whoever finds it not filled asks the driver for itself.
  static std::atomic<int> state[kCachedDevices];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const bool cached = device < kCachedDevices;
  if (cached && state[device].load(std::memory_order_acquire) == 2) {
    *info = cache[device];
    return cudaSuccess;
  }
  error = cudaDeviceGetAttribute(&info->sm_count, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&info->smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                 device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&info->smem_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                 device);
  if (error != cudaSuccess) return error;
  int empty = 0;
  if (cached && state[device].compare_exchange_strong(empty, 1, std::memory_order_acq_rel)) {
    cache[device] = *info;
    state[device].store(2, std::memory_order_release);
  }
  return cudaSuccess;
}

}  // namespace astrai
