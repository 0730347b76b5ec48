// Conversion of fp32 to codes of either format on each hardware level.
#pragma once

#include "kernels/common/dtype.h"
#include "kernels/common/fp8.cuh"
#include "kernels/common/ptx.cuh"

namespace astrai::fp8 {

// The nearest e5m2 code, ties to even. Values beyond +-57344 and infinities give +-57344, NaN NaN.
__host__ __device__ inline uint8_t float_to_e5m2(float x) {
  const uint32_t bits = fp8_detail::float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = bits >> 24 & 0x80u;
  uint32_t code;
  if (magnitude > 0x7f800000u) {
    code = 0x7fu;
  } else if (magnitude >= 0x47600000u) {  // 57344
    code = 0x7bu;
  } else if (magnitude < 0x38800000u) {  // 2^-14: denormal codes, multiples of 2^-16
    // The sum's lowest bit is worth 2^-16, so the addition rounds.
    const float sum = fp8_detail::bits_float(magnitude) + 128.0f;
    code = fp8_detail::float_bits(sum) - 0x43000000u;
  } else {
    const uint32_t rebased = magnitude - (112u << 23);  // exponent bias 127 to 15
    code = (rebased + 0xfffffu + (rebased >> 21 & 1u)) >> 21;
  }
  return static_cast<uint8_t>(sign | code);
}

#ifdef __CUDACC__

// Four floats to four codes, the first in the lowest byte.
template <DType kFormat>
__device__ __forceinline__ uint32_t to_fp8x4(float a, float b, float c, float d) {
  static_assert(kFormat == DType::kE4M3 || kFormat == DType::kE5M2, "an fp8 format");
  if constexpr (kFormat == DType::kE4M3) {
    return to_e4m3x2(a, b) | static_cast<uint32_t>(to_e4m3x2(c, d)) << 16;
  } else {
#if defined(ASTRAI_EMULATE) || __CUDA_ARCH__ >= 890
    return ptx::cvt_e5m2x2_satfinite(b, a) | static_cast<uint32_t>(ptx::cvt_e5m2x2_satfinite(d, c))
                                                 << 16;
#else
    return float_to_e5m2(a) | float_to_e5m2(b) << 8 | float_to_e5m2(c) << 16 |
           static_cast<uint32_t>(float_to_e5m2(d)) << 24;
#endif
  }
}

#endif  // __CUDACC__

}  // namespace astrai::fp8
