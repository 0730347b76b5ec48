// The two fp8 formats (OCP 8-bit floating point) and the arithmetic of scales.
//
// e4m3: 4 exponent bits, 3 of mantissa, no infinity, NaN 0x7f and 0xff. e5m2: IEEE like, 5 exponent
// bits, 2 of mantissa. A tensor is stored as codes and a step: value = code * step. Quantisation
// multiplies by 1 / step. Plain functions for host and device.
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"

// Functions marked so are also called by kernels.
#ifdef __CUDACC__
#define ASTRAI_FP8_HOST_DEVICE __host__ __device__
#else
#define ASTRAI_FP8_HOST_DEVICE
#endif

namespace astrai::fp8 {

constexpr float kE4M3Max = 448.0f;
constexpr float kE5M2Max = 57344.0f;

// Steps are never below this: of a tensor of zeros, and of amax such as 1e-45 and 1e-38, whose own
// steps would have no finite reciprocal.
constexpr float kMinStep = 1e-12f;

// Elements of K that share a step in block scaling.
constexpr int kScaleBlock = 128;

constexpr bool is_fp8(DType dtype) { return dtype == DType::kE4M3 || dtype == DType::kE5M2; }

// Largest finite value of a format.
ASTRAI_FP8_HOST_DEVICE constexpr float max_of(DType format) {
  return format == DType::kE5M2 ? kE5M2Max : kE4M3Max;
}

// False for NaN and infinities, without a call that only one side has.
ASTRAI_FP8_HOST_DEVICE constexpr bool is_finite(float x) { return x - x == 0.0f; }

// The step that maps amax to `fp8_max * margin`. With fp8_max = max_of(format) and margin 1, amax
// becomes the largest code. Both divisions are rounded. amax must be finite.
ASTRAI_FP8_HOST_DEVICE constexpr float step_of(float amax, float fp8_max, float margin = 1.0f) {
  const float step = amax / fp8_max / margin;
  return step > kMinStep ? step : kMinStep;
}

// What quantisation multiplies by. Finite for every step that step_of gives.
ASTRAI_FP8_HOST_DEVICE constexpr float multiplier_of(float step) { return 1.0f / step; }

}  // namespace astrai::fp8
