// Conversions between fp32 and 16-bit floats, bit by bit.
#pragma once

#include <cstdint>
#include <cstring>

namespace astrai::emulator {

inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline float bf16_to_float(uint16_t bits) { return float_of_bits(uint32_t{bits} << 16); }

// Round to nearest even. NaN becomes the canonical NaN, as on the GPU.
inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = bits_of_float(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float fp16_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  // With the exponent field moved to fp32's place, the value is too small by 2^112: denormals too.
  const float magnitude = float_of_bits(uint32_t{bits & 0x7fffu} << 13) * 0x1p112f;
  const uint32_t top = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return float_of_bits(bits_of_float(magnitude) | top | sign);
}

inline uint16_t float_to_fp16(float x) {
  const uint32_t bits = bits_of_float(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more rounds to infinity
  if (magnitude < 0x38800000u) {
    // Denormal: adding 0.5 leaves the multiple of 2^-24 in the low bits, rounded by the addition.
    const float shifted = float_of_bits(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(bits_of_float(shifted) - 0x3f000000u);
  }
  const uint32_t rebased = magnitude - 0x38000000u;  // exponent bias 127 to 15
  return sign | static_cast<uint16_t>((rebased + 0xfffu + (rebased >> 13 & 1u)) >> 13);
}

}  // namespace astrai::emulator
