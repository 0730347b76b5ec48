// The CUDA device of a call: guard, compute capability, launch errors.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace astrai::bindings {

// What the kernels of this module are compiled for, as "sm_80,sm_89,sm_90a,compute_80": sm_X is
// machine code, compute_X is PTX. Set by the build (ASTRAI_CUDA_ARCHS).
const char* built_archs();

// Whether a device of this compute capability can run code built for `archs`. Machine code runs on
// devices of the same major version with at least its minor version; PTX on every newer device; an
// "a" suffix binds either to exactly that version.
bool archs_cover(const std::string& archs, int major, int minor);

// NotImplementedError (a RuntimeError) naming the device's compute capability and the built archs,
// if they do not cover it.
void require_capability(const char* function, const std::string& archs, int major, int minor);

// The same for an existing device; capability and SM count are read once per device.
void require_capability(const char* function, int device);
int sm_count(int device);

// Empty if kernels can run here, else the reason as a sentence: no driver, a driver that is too
// old, no GPU, no GPU that the built archs cover.
std::string why_no_device();

// Makes `device` current for a scope. The runtime linked here is not torch's; both follow the
// driver's current context, so leaving it as it was found is enough for torch.
class DeviceGuard {
 public:
  DeviceGuard(const char* function, int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  // -1: nothing to put back
};

// RuntimeError with the kernel's name if a launch did not succeed.
void require_launched(const char* function, cudaError_t status);

}  // namespace astrai::bindings
