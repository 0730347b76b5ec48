// One query row, held by one warp, against one key at a time: plain fp32 arithmetic that reads
// element by element, so that rows may lie at any address. The readable statement of what the MMA
// kernels compute.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/attention/mask.cuh"
#include "kernels/attention/score.cuh"
#include "kernels/attention/softmax.cuh"
#include "kernels/common/fp8.cuh"
#include "kernels/common/reduce.cuh"

namespace astrai::attention {

inline constexpr int kMaxScalarHeadDim = 256;

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return from_e4m3(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16* y) { *y = __float2bfloat16(x); }
__device__ __forceinline__ void from_float(float x, __half* y) { *y = __float2half(x); }

// The keys that one query row may see.
struct ScalarKeys {
  KeyRange window;
  bool masked;
  const uint8_t* mask;  // of key 0; null = the row lies outside the mask
  int mask_width;

  __device__ __forceinline__ ScalarKeys(const ScoreArgs& score, int batch, int head, int position,
                                        int q_len, int kv_len)
      : window(keys_in_window(score, position, position, kv_len - q_len, kv_len)),
        masked(score.mask.data != nullptr),
        mask(nullptr),
        mask_width(score.mask.width) {
    if (masked && position < score.mask.rows) mask = mask_row(score.mask, batch, head, position);
  }

  // Whether a key inside the window is allowed; `page` is its table entry, 0 if there is no table.
  __device__ __forceinline__ bool allows(int key, int page) const {
    if (page < 0) return false;
    return !masked || (mask != nullptr && key < mask_width && mask[key] != 0);
  }
};

// Lane l holds the elements l, l + 32, ... of the query and of the output.
template <typename T>
struct ScalarRow {
  static constexpr int kPerLane = kMaxScalarHeadDim / 32;

  float q[kPerLane];
  float o[kPerLane];  // sum of exp2(c * score - c * max) * v
  float max = neg_inf();
  float sum = 0.0f;
  int head_dim;
  int v_head_dim;
  ScoreRule rule;

  __device__ __forceinline__ ScalarRow(const T* row, int dim, int v_dim, const ScoreArgs& score)
      : head_dim(dim), v_head_dim(v_dim), rule(score) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float x = lane + 32 * i < head_dim ? to_float(row[lane + 32 * i]) : 0.0f;
      q[i] = score.negate_q ? -x : x;
      o[i] = 0.0f;
    }
  }

  // Takes one key in. k and v point to this lane's first element of their rows.
  template <typename E>
  __device__ __forceinline__ void attend(const E* k, const E* v) {
    const int lane = threadIdx.x % 32;
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i < head_dim) dot = fmaf(q[i], to_float(k[32 * i]), dot);
    }
    dot = lanes_sum<32>(dot);
    if (rule.inner != 0.0f) dot = rule.cap(dot);
    const float now = fmaxf(max, dot);
    const float factor = exp2_of_difference(max, now, rule.scale);
    const float p = exp2_of_difference(dot, now, rule.scale);
    max = now;
    sum = fmaf(sum, factor, p);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i < v_head_dim) o[i] = fmaf(p, to_float(v[32 * i]), o[i] * factor);
    }
  }

  // Writes the output to `row`, times `factor` of end_of_row; 0 if no key was taken in.
  __device__ __forceinline__ void store(T* row, float factor) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i < v_head_dim) {
        from_float(factor == 0.0f ? 0.0f : o[i] * factor, row + lane + 32 * i);
      }
    }
  }
};

}  // namespace astrai::attention
