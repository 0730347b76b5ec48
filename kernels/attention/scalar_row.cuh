// One query row, held by one warp, against one key at a time: plain fp32 arithmetic that reads
// element by element, so that rows may lie at any address. The readable statement of what the MMA
// kernels compute.
#pragma once

#include <cstdint>

#include "kernels/attention/softmax.cuh"
#include "kernels/common/reduce.cuh"

namespace astrai::attention {

inline constexpr int kMaxScalarHeadDim = 256;

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16* y) { *y = __float2bfloat16(x); }
__device__ __forceinline__ void from_float(float x, __half* y) { *y = __float2half(x); }

// Lane l holds the elements l, l + 32, ... of the query and of the output.
template <typename T>
struct ScalarRow {
  static constexpr int kPerLane = kMaxScalarHeadDim / 32;

  float q[kPerLane];
  float o[kPerLane];  // sum of exp2(c * score - c * max) * v
  float max = neg_inf();
  float sum = 0.0f;
  int head_dim;
  float scale;  // c, see softmax.cuh

  __device__ __forceinline__ ScalarRow(const T* row, int dim, float log2_scale, bool negate)
      : head_dim(dim), scale(log2_scale) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float x = lane + 32 * i < head_dim ? to_float(row[lane + 32 * i]) : 0.0f;
      q[i] = negate ? -x : x;
      o[i] = 0.0f;
    }
  }

  // Takes one key in. k and v point to this lane's first element of their rows.
  __device__ __forceinline__ void attend(const T* k, const T* v) {
    const int lane = threadIdx.x % 32;
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i < head_dim) dot = fmaf(q[i], to_float(k[32 * i]), dot);
    }
    dot = lanes_sum<32>(dot);
    const float now = fmaxf(max, dot);
    const float factor = exp2_of_difference(max, now, scale);
    const float p = exp2_of_difference(dot, now, scale);
    max = now;
    sum = fmaf(sum, factor, p);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i < head_dim) o[i] = fmaf(p, to_float(v[32 * i]), o[i] * factor);
    }
  }

  // Writes the normalised output to `row`; 0 if no key was taken in.
  __device__ __forceinline__ void store(T* row) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i < head_dim)
        from_float(sum == 0.0f ? 0.0f : o[i] / sum, row + lane + 32 * i);
    }
  }
};

}  // namespace astrai::attention
