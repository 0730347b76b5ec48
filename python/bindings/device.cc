#include "python/bindings/device.h"

#include <array>
#include <cstdlib>
#include <sstream>

#include "python/bindings/errors.h"

// A list with commas, unquoted: -DASTRAI_CUDA_ARCHS=sm_80,sm_89,compute_80.
#ifndef ASTRAI_CUDA_ARCHS
#define ASTRAI_CUDA_ARCHS
#endif
#define ASTRAI_TEXT_OF(...) #__VA_ARGS__
#define ASTRAI_TEXT(...) ASTRAI_TEXT_OF(__VA_ARGS__)

namespace astrai::bindings {
namespace {

constexpr int kMaxDevices = 64;
// The runtime is CUDA 13; its minor versions run on every driver for CUDA 13.
constexpr int kNeededDriver = 13000;

struct Device {
  bool known = false;
  int major = 0, minor = 0, sm_count = 0;
};

std::string version_text(int major, int minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

// Guarded by the GIL.
const Device& device_info(const char* function, int device) {
  static std::array<Device, kMaxDevices> devices;
  if (device < 0 || device >= kMaxDevices) {
    raise(ErrorClass::kRuntime,
          std::string(function) + ": no device " + std::to_string(device) + " on this machine");
  }
  Device& info = devices[device];
  if (info.known) return info;
  Device fresh;
  cudaError_t status =
      cudaDeviceGetAttribute(&fresh.major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&fresh.minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&fresh.sm_count, cudaDevAttrMultiProcessorCount, device);
  }
  require_launched(function, status);
  fresh.known = true;
  info = fresh;
  return info;
}

}  // namespace

const char* built_archs() {
  static const char* const archs = ASTRAI_TEXT(ASTRAI_CUDA_ARCHS);
  return archs;
}

bool archs_cover(const std::string& archs, int major, int minor) {
  // A build that does not tell its archs: the driver decides at launch.
  if (archs.empty()) return true;
  std::istringstream items(archs);
  for (std::string item; std::getline(items, item, ',');) {
    const size_t underscore = item.find('_');
    if (underscore == std::string::npos) continue;
    const bool is_ptx = item.compare(0, underscore, "compute") == 0;
    char* suffix = nullptr;
    const long number = std::strtol(item.c_str() + underscore + 1, &suffix, 10);
    const int arch_major = static_cast<int>(number / 10),
              arch_minor = static_cast<int>(number % 10);
    const bool exact_only = *suffix == 'a';
    if (arch_major == major && arch_minor == minor) return true;
    if (exact_only) continue;
    if (is_ptx ? number <= major * 10 + minor : arch_major == major && arch_minor <= minor) {
      return true;
    }
  }
  return false;
}

void require_capability(const char* function, const std::string& archs, int major, int minor) {
  if (archs_cover(archs, major, minor)) return;
  raise(ErrorClass::kUnsupported, std::string(function) + ": the device has compute capability " +
                                      version_text(major, minor) +
                                      ", but this build has kernels for " + archs + " only");
}

void require_capability(const char* function, int device) {
  const Device& info = device_info(function, device);
  require_capability(function, built_archs(), info.major, info.minor);
}

int sm_count(int device) { return device_info("sm_count", device).sm_count; }

std::string why_no_device() {
  int driver = 0;
  cudaError_t status = cudaDriverGetVersion(&driver);
  if (status == cudaSuccess && driver == 0) {
    return "This machine has no GPU, or no NVIDIA driver is installed.";
  }
  if (status == cudaSuccess && driver < kNeededDriver) {
    return "The NVIDIA driver is too old: it supports CUDA " +
           version_text(driver / 1000, driver % 1000 / 10) +
           ", and these kernels are built with CUDA 13, which needs driver 580 or newer.";
  }
  int count = 0;
  if (status == cudaSuccess) status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) cudaGetLastError();  // not sticky: leave a clean state
  if (status == cudaErrorNoDevice || (status == cudaSuccess && count == 0)) {
    return "No GPU is visible on this machine (CUDA_VISIBLE_DEVICES may hide it).";
  }
  if (status != cudaSuccess) {
    return std::string("The GPU cannot be used: ") + cudaGetErrorString(status) + " (" +
           cudaGetErrorName(status) + ").";
  }
  std::string found;
  for (int i = 0; i < count; ++i) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, i);
    if (archs_cover(built_archs(), major, minor)) return "";
    found += (found.empty() ? "" : ", ") + version_text(major, minor);
    if (major < 8) found += " (older than sm_80)";
  }
  return "The GPU has compute capability " + found + ", and this build has kernels for " +
         built_archs() + " only.";
}

DeviceGuard::DeviceGuard(const char* function, int device) {
  int current = 0;
  require_launched(function, cudaGetDevice(&current));
  if (current == device) return;
  require_launched(function, cudaSetDevice(device));
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

void require_launched(const char* function, cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // takes a non-sticky error off this thread
  raise(ErrorClass::kRuntime, std::string(function) + ": " + cudaGetErrorString(status) + " (" +
                                  cudaGetErrorName(status) + "); this build has kernels for " +
                                  built_archs());
}

}  // namespace astrai::bindings
