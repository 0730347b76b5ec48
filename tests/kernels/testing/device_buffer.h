// CUDA side of the tests: error check, and device buffers that notice what a kernel must not do.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/testing/testing.h"

namespace astrai::testing {

inline void require_cuda(cudaError_t error, const char* file, int line, const char* text) {
  if (error == cudaSuccess) return;
  throw Abort(std::string(file) + ":" + std::to_string(line) + ": " + text + ": " +
              cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

// Leaves the case if a CUDA call fails.
#define REQUIRE_CUDA(call) ::astrai::testing::require_cuda((call), __FILE__, __LINE__, #call)

// Bytes that cudaMalloc could give now.
inline size_t free_device_bytes() {
  size_t free = 0, total = 0;
  REQUIRE_CUDA(cudaMemGetInfo(&free, &total));
  return free;
}

// `count` elements on the device.
//
// New memory is poisoned: every byte is 0xff, which is a NaN in bf16, fp16, fp32, e4m3 and e5m2 and
// -1 in integers. On both sides stand guard bytes; the destructor fails the case if a kernel wrote
// there. `shift` elements moves the start away from its 256-byte alignment.
template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t count, size_t shift = 0) : count_(count) {
    const size_t bytes = count * sizeof(T);
    front_ = kGuard + shift * sizeof(T);
    total_ = front_ + bytes + kGuard;
    REQUIRE_CUDA(cudaMalloc(&base_, total_));
    REQUIRE_CUDA(cudaMemset(base_, kCanary, total_));
    poison();
  }
  explicit DeviceBuffer(const std::vector<T>& host, size_t shift = 0)
      : DeviceBuffer(host.size(), shift) {
    upload(host);
  }
  ~DeviceBuffer() {
    if (base_ == nullptr) return;
    if (!guards_intact()) {
      add_failure(__FILE__, __LINE__, "a kernel wrote outside of its buffer, or had an error");
    }
    cudaFree(base_);
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)),
        count_(other.count_),
        front_(other.front_),
        total_(other.total_) {}
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* data() { return reinterpret_cast<T*>(base_ + front_); }
  const T* data() const { return reinterpret_cast<const T*>(base_ + front_); }
  size_t size() const { return count_; }

  // Waits until it is done: cudaMemset is asynchronous, and non-blocking streams would not wait for
  // it.
  void poison() {
    REQUIRE_CUDA(cudaMemset(data(), kPoison, count_ * sizeof(T)));
    REQUIRE_CUDA(cudaDeviceSynchronize());
  }
  void upload(const std::vector<T>& host) {
    REQUIRE(host.size() == count_);
    if (count_ == 0) return;
    REQUIRE_CUDA(cudaMemcpy(data(), host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  // Waits for the work of all blocking streams.
  std::vector<T> download() const {
    std::vector<T> host(count_);
    if (count_ == 0) return host;
    REQUIRE_CUDA(cudaMemcpy(host.data(), data(), count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  static constexpr size_t kGuard = 4096;
  static constexpr int kCanary = 0xa5;
  static constexpr int kPoison = 0xff;

  bool guards_intact() const {
    std::vector<uint8_t> front(front_), back(kGuard);
    if (cudaMemcpy(front.data(), base_, front_, cudaMemcpyDeviceToHost) != cudaSuccess)
      return false;
    if (cudaMemcpy(back.data(), base_ + total_ - kGuard, kGuard, cudaMemcpyDeviceToHost) !=
        cudaSuccess) {
      return false;
    }
    for (const uint8_t byte : front) {
      if (byte != kCanary) return false;
    }
    for (const uint8_t byte : back) {
      if (byte != kCanary) return false;
    }
    return true;
  }

  uint8_t* base_ = nullptr;
  size_t count_ = 0, front_ = 0, total_ = 0;
};

// T from fp64 with T's one rounding (through fp32, as torch does it).
template <typename T>
T from_double(double value) {
  return static_cast<T>(static_cast<float>(value));
}
template <>
inline __nv_bfloat16 from_double<__nv_bfloat16>(double value) {
  return __float2bfloat16_rn(static_cast<float>(value));
}
template <>
inline __half from_double<__half>(double value) {
  return __float2half_rn(static_cast<float>(value));
}

// Normally distributed elements, times `scale`.
template <typename T>
std::vector<T> random_normal(Rng& rng, size_t count, double scale = 1.0) {
  std::vector<T> values(count);
  for (T& value : values) value = from_double<T>(scale * rng.normal());
  return values;
}

// The elements' bits, to compare exactly (also NaN, also -0).
template <typename T>
std::vector<uint16_t> bits_of(const std::vector<T>& values) {
  static_assert(sizeof(T) == 2, "bits_of takes 16-bit types");
  std::vector<uint16_t> bits(values.size());
  const auto* raw = reinterpret_cast<const uint16_t*>(values.data());
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = raw[i];
  return bits;
}

}  // namespace astrai::testing
