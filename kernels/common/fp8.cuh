// Conversions of fp8 e4m3 (OCP "e4m3fn": 4 exponent bits, 3 mantissa bits, largest value 448, no
// infinity, NaN 0x7f and 0xff) on each hardware level.
//
// From sm_89 on there are instructions. Below, the code's bits move into the fields of a wider
// float, where they stand for the value times 2^(7 - its bias), denormals included; a
// multiplication by the inverse is exact. NaN does not survive that and is put in by hand.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/common/ptx.cuh"
#include "kernels/common/vec.cuh"

namespace astrai {

namespace fp8_detail {

__host__ __device__ inline uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
__host__ __device__ inline float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

}  // namespace fp8_detail

// The value of a code.
__host__ __device__ inline float e4m3_to_float(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t sign = (code & 0x80u) << 24;
  if (magnitude == 0x7fu) return fp8_detail::bits_float(sign | 0x7fc00000u);
  const float value = fp8_detail::bits_float(magnitude << 20) * 0x1p120f;
  return fp8_detail::bits_float(fp8_detail::float_bits(value) | sign);
}

// The nearest code, ties to even. Values beyond +-448 and infinities give +-448, NaN gives NaN.
__host__ __device__ inline uint8_t float_to_e4m3(float x) {
  const uint32_t bits = fp8_detail::float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = bits >> 24 & 0x80u;
  uint32_t code;
  if (magnitude > 0x7f800000u) {
    code = 0x7fu;
  } else if (magnitude >= 0x43e00000u) {  // 448
    code = 0x7eu;
  } else if (magnitude < 0x3c800000u) {  // 2^-6: denormal codes, multiples of 2^-9
    // The sum's lowest bit is worth 2^-9, so the addition rounds.
    const float sum = fp8_detail::bits_float(magnitude) + 16384.0f;
    code = fp8_detail::float_bits(sum) - 0x46800000u;
  } else {
    const uint32_t rebased = magnitude - (120u << 23);  // exponent bias 127 to 7
    code = (rebased + 0x7ffffu + (rebased >> 20 & 1u)) >> 20;
  }
  return static_cast<uint8_t>(sign | code);
}

#ifdef __CUDACC__

// ---- By bits: any level -------------------------------------------------------------------------

namespace fp8_detail {

// Two codes, in the upper bytes of the halves, to two T without NaN.
template <typename T>
__device__ __forceinline__ uint32_t finite_from_high_bytes(uint32_t codes) {
  constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr int kShift =
      kIsBf16 ? 4 : 1;  // exponent and mantissa to the lower bits of T's exponent
  const uint32_t fields = (codes & 0x80008000u) | (codes & 0x7f007f00u) >> kShift;
  if constexpr (kIsBf16) {
    constexpr uint32_t kTwoTo120 = 0x7b807b80u, kMinusZero = 0x80008000u;
    return ptx::fma_bf16x2(fields, kTwoTo120, kMinusZero);  // sm_80 has no product alone
  } else {
    constexpr uint32_t kTwoTo8 = 0x5c005c00u;
    return ptx::mul_f16x2(fields, kTwoTo8);
  }
}

template <typename T>
__device__ __forceinline__ void from_e4m3x4_by_bits(uint32_t codes, uint32_t& low, uint32_t& high) {
  // The upper bit of a byte says that it is NaN; the selectors copy it all over a half.
  const uint32_t is_nan = (codes & 0x7f7f7f7fu) + 0x01010101u;
  low = finite_from_high_bytes<T>(__byte_perm(codes, 0, 0x1404)) | ptx::prmt(is_nan, 0, 0x9988);
  high = finite_from_high_bytes<T>(__byte_perm(codes, 0, 0x3424)) | ptx::prmt(is_nan, 0, 0xbbaa);
}

}  // namespace fp8_detail

// ---- What kernels use ---------------------------------------------------------------------------

// Four codes to two registers of two T (bf16 or fp16), exact. The lowest byte comes first: it is
// the low half of `low`.
template <typename T>
__device__ __forceinline__ void from_e4m3x4(uint32_t codes, uint32_t& low, uint32_t& high) {
#if defined(ASTRAI_EMULATE) || __CUDA_ARCH__ >= 890
  low = ptx::cvt_f16x2_e4m3x2(static_cast<uint16_t>(codes));
  high = ptx::cvt_f16x2_e4m3x2(static_cast<uint16_t>(codes >> 16));
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const float2 first = unpack2<__half>(low), second = unpack2<__half>(high);
    low = pack2<T>(first.x, first.y);
    high = pack2<T>(second.x, second.y);
  }
#else
  fp8_detail::from_e4m3x4_by_bits<T>(codes, low, high);
#endif
}

__device__ __forceinline__ float from_e4m3(__nv_fp8_e4m3 x) { return e4m3_to_float(x.__x); }

// Two floats to two codes, `low` in the lower byte; rounded as by float_to_e4m3.
__device__ __forceinline__ uint16_t to_e4m3x2(float low, float high) {
#if defined(ASTRAI_EMULATE) || __CUDA_ARCH__ >= 890
  return ptx::cvt_e4m3x2_satfinite(high, low);
#else
  return static_cast<uint16_t>(float_to_e4m3(high) << 8 | float_to_e4m3(low));
#endif
}

// Rounds kWidth floats and writes them in one access, aligned to kWidth bytes.
template <int kWidth>
__device__ __forceinline__ void store_e4m3(const float (&x)[kWidth], __nv_fp8_e4m3* target) {
  static_assert(kWidth == 1 || kWidth == 2 || kWidth == 4 || kWidth == 8, "one access");
  if constexpr (kWidth == 1) {
    target->__x = float_to_e4m3(x[0]);
  } else if constexpr (kWidth == 2) {
    const uint16_t codes[1] = {to_e4m3x2(x[0], x[1])};
    ptx::st_global(target, codes);
  } else {
    uint32_t codes[kWidth / 4];
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) {
      codes[i] = to_e4m3x2(x[4 * i], x[4 * i + 1]) |
                 static_cast<uint32_t>(to_e4m3x2(x[4 * i + 2], x[4 * i + 3])) << 16;
    }
    ptx::st_global(target, codes);
  }
}

#endif  // __CUDACC__

}  // namespace astrai
