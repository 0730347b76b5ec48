// Vectors of 16-bit floats: one memory access of 2, 4, 8 or 16 bytes, and conversion to fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/common/ptx.cuh"

namespace astrai {

// kWidth elements of T (2 bytes each), held as raw bits so that a copy keeps every NaN payload.
template <typename T, int kWidth>
struct Vec {
  static_assert(sizeof(T) == 2, "Vec holds 16-bit floats");
  static_assert(kWidth == 2 || kWidth == 4 || kWidth == 8, "Vec is one 4, 8 or 16 byte access");
  uint32_t bits[kWidth / 2];
};

template <typename T>
struct Vec<T, 1> {
  static_assert(sizeof(T) == 2, "Vec holds 16-bit floats");
  uint16_t bits[1];
};

// Loads and stores keep their order: a kernel that works in place relies on its loads standing
// before its stores.
template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> load_vec(const T* address) {
  Vec<T, kWidth> v;
  ptx::ld_global(v.bits, address);
  return v;
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_vec(T* address, const Vec<T, kWidth>& v) {
  ptx::st_global(address, v.bits);
}

// Two elements of T in one register <-> fp32. The element at the lower address comes first.
template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t bits);

template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t bits) {
  // A bfloat16 is the upper half of an fp32: no conversion instruction is needed.
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}

template <>
__device__ __forceinline__ float2 unpack2<__half>(uint32_t bits) {
  const __half2 h = __halves2half2(__ushort_as_half(static_cast<unsigned short>(bits & 0xffffu)),
                                   __ushort_as_half(static_cast<unsigned short>(bits >> 16)));
  return __half22float2(h);
}

// Rounds to nearest, ties to even.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float low, float high) {
  return ptx::cvt_bf16x2(high, low);
}

template <>
__device__ __forceinline__ uint32_t pack2<__half>(float low, float high) {
  return ptx::cvt_f16x2(high, low);
}

template <typename T, int kWidth>
__device__ __forceinline__ void unpack(const Vec<T, kWidth>& v, float (&values)[kWidth]) {
  if constexpr (kWidth == 1) {
    values[0] = unpack2<T>(v.bits[0]).x;
  } else {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      const float2 pair = unpack2<T>(v.bits[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> pack(const float (&values)[kWidth]) {
  Vec<T, kWidth> v;
  if constexpr (kWidth == 1) {
    v.bits[0] = static_cast<uint16_t>(pack2<T>(values[0], 0.0f));
  } else {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) v.bits[i] = pack2<T>(values[2 * i], values[2 * i + 1]);
  }
  return v;
}

}  // namespace astrai
