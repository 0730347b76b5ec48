// Online softmax on fp32 scores, in base 2.
//
// State per row: `max`, the largest raw score so far, and `sum`, the sum of exp2(c * score - c *
// max), with c = scale * log2(e) > 0. A row without any key keeps max -inf and sum 0; -inf minus
// -inf is never formed, and no finite number stands for "masked", so logits of any size are exact.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "kernels/common/ptx.cuh"
#include "kernels/common/reduce.cuh"

namespace astrai::attention {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// c * score - base is one FMA, with base = c * max rounded. All weights of a row share that
// rounding, so it cancels, but beyond this size of base it could reach more than 2^0.5 and overflow
// them: there, differences come first.
inline constexpr float kLargestSharedBase = 16777216.0f;  // 2^24

// A scale as the kernels use it, c > 0 and normal: scale 0 becomes the smallest normal number,
// under which every finite dot product below 2^100 still gives weight 1; one above FLT_MAX becomes
// FLT_MAX. NaN passes.
__host__ __device__ inline float normal_scale(float c) {
  return c < FLT_MIN ? FLT_MIN : c > FLT_MAX ? FLT_MAX : c;
}

#ifdef __CUDACC__

__device__ __forceinline__ float neg_inf() { return __uint_as_float(0xff800000u); }

// 2^x to about 2 ulp; -inf gives 0, denormal results are flushed to 0.
__device__ __forceinline__ float exp2_approx(float x) { return ptx::ex2_approx_ftz(x); }

// exp2(c * (score - max)), 0 for a score of -inf.
__device__ __forceinline__ float exp2_of_difference(float score, float max, float scale) {
  return score == neg_inf() ? 0.0f : exp2_approx((score - max) * scale);
}

// c * max, the exponent that is subtracted in a row; 0 for a row without keys. Not contracted into
// an FMA, so that every use of it sees the same rounded value.
__device__ __forceinline__ float row_base(float max, float scale) {
  return max == neg_inf() ? 0.0f : __fmul_rn(max, scale);
}

// Natural-log sum of exponentials of a row.
__device__ __forceinline__ float row_lse(float max, float sum, float scale) {
  return sum == 0.0f ? neg_inf() : (row_base(max, scale) + log2f(sum)) * kLn2;
}

// Softmax state of the rows that one lane sees in kMt m blocks of an MMA accumulator: two per
// block, each shared by the 4 lanes of a quad. `sum` holds this lane's part only until finish().
template <int kMt>
struct SoftmaxRows {
  float max[kMt][2];
  float sum[kMt][2];

  __device__ __forceinline__ SoftmaxRows() {
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
      max[mt][0] = max[mt][1] = neg_inf();
      sum[mt][0] = sum[mt][1] = 0.0f;
    }
  }

  // Turns raw scores (masked ones are -inf) into exp2(c * score - c * max) in place, and says in
  // `factor` what earlier sums and outputs of the row are to be multiplied with. Returns whether
  // any factor differs from 1.
  template <int kNt>
  __device__ __forceinline__ bool update(float (&s)[kMt][kNt][4], float scale,
                                         float (&factor)[kMt][2]) {
    bool changed = false;
    bool large = false;
    float shift[kMt][2];
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = fmaxf(s[mt][0][2 * half], s[mt][0][2 * half + 1]);
#pragma unroll
        for (int nt = 1; nt < kNt; ++nt) {
          top = fmaxf(top, fmaxf(s[mt][nt][2 * half], s[mt][nt][2 * half + 1]));
        }
        const float before = max[mt][half];
        max[mt][half] = fmaxf(before, lanes_max<4>(top));
        shift[mt][half] = row_base(max[mt][half], scale);
        factor[mt][half] = exp2_approx(__fmul_rn(before, scale) - shift[mt][half]);
        if (fabsf(shift[mt][half]) > kLargestSharedBase) {
          factor[mt][half] = exp2_approx((before - max[mt][half]) * scale);
          large = true;
        }
        changed |= factor[mt][half] != 1.0f;
      }
    }
    // One branch for all rows, so that the exponentials below stand in one basic block and overlap.
    if (large) subtract_first(s, shift);
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float part = 0.0f;
#pragma unroll
        for (int nt = 0; nt < kNt; ++nt) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            s[mt][nt][i] = exp2_approx(fmaf(s[mt][nt][i], scale, -shift[mt][half]));
            part += s[mt][nt][i];
          }
        }
        sum[mt][half] = fmaf(sum[mt][half], factor[mt][half], part);
      }
    }
    return changed;
  }

  // Rows whose base is too large to be shared (kLargestSharedBase): subtracts the maximum from the
  // scores at once, and leaves no shift.
  template <int kNt>
  __device__ __forceinline__ void subtract_first(float (&s)[kMt][kNt][4],
                                                 float (&shift)[kMt][2]) const {
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool large = fabsf(shift[mt][half]) > kLargestSharedBase;
        const float subtrahend = large ? max[mt][half] : 0.0f;
        if (large) shift[mt][half] = 0.0f;
#pragma unroll
        for (int nt = 0; nt < kNt; ++nt) {
          s[mt][nt][2 * half] -= subtrahend;
          s[mt][nt][2 * half + 1] -= subtrahend;
        }
      }
    }
  }

  // Adds up the lanes' parts of the sums.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
      sum[mt][0] = lanes_sum<4>(sum[mt][0]);
      sum[mt][1] = lanes_sum<4>(sum[mt][1]);
    }
  }
};

// Multiplies accumulated outputs with the factors of update(), if any lane of the warp needs it.
template <int kMt, int kNt>
__device__ __forceinline__ void rescale(float (&o)[kMt][kNt][4], const float (&factor)[kMt][2],
                                        bool changed) {
  if (!__any_sync(0xffffffffu, changed)) return;
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
    for (int nt = 0; nt < kNt; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[mt][nt][i] *= factor[mt][i >> 1];
    }
  }
}

#endif  // __CUDACC__

}  // namespace astrai::attention
