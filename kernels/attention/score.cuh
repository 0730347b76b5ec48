// What turns dot products into scores, and which keys a row sees: the run-time features that all
// attention kernels share. Host code fills ScoreArgs; a kernel makes its ScoreRule of them once.
//
// Order: scale, softcap, mask. With softcap the bounded value t = tanh(scale * dot / softcap) takes
// the place of the dot product and softcap that of the scale, so that the softmax needs no case.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/attention/softmax.cuh"

namespace astrai::attention {

struct ScoreArgs {
  float log2_scale;    // |scale| * k_scale * log2(e), in the range of normal numbers
  float log2_softcap;  // softcap * log2(e); 0 = none
  bool negate_q;       // scale < 0: the sign goes into q (flipping it is exact)
  int window_left;     // negative = unlimited
  int window_right;    // negative = unlimited; 0 if causal
  float v_scale;
  const float* k_scale_pointer;  // nullable
  const float* v_scale_pointer;  // nullable
  const float* sinks;            // nullable
  MaskView mask;
};

inline ScoreArgs score_args(const AttentionParams& p) {
  ScoreArgs args = {};
  args.log2_scale = normal_scale(std::fabs(p.scale) * p.k_scale * kLog2E);
  args.log2_softcap = p.softcap * kLog2E;
  args.negate_q = p.scale < 0.0f;
  args.window_left = p.window_left;
  args.window_right = p.causal ? 0 : p.window_right;
  args.v_scale = p.v_scale;
  args.k_scale_pointer = p.k_scale_pointer;
  args.v_scale_pointer = p.v_scale_pointer;
  args.sinks = p.sinks;
  args.mask = p.mask;
  return args;
}

// Keys [first, end) that a row or a block of rows may see.
struct KeyRange {
  int first;
  int end;
};

// Keys inside the window of the rows at positions first_position .. last_position. `diagonal` =
// kv_len - q_len.
__host__ __device__ inline KeyRange keys_in_window(const ScoreArgs& args, int first_position,
                                                   int last_position, int diagonal, int kv_len) {
  KeyRange range = {0, kv_len};
  if (args.window_left >= 0) {
    const int64_t first = static_cast<int64_t>(first_position) + diagonal - args.window_left;
    range.first = static_cast<int>(first < 0 ? 0 : first > kv_len ? kv_len : first);
  }
  if (args.window_right >= 0) {
    const int64_t end = static_cast<int64_t>(last_position) + diagonal + args.window_right + 1;
    range.end = static_cast<int>(end < 0 ? 0 : end > kv_len ? kv_len : end);
  }
  if (range.end < range.first) range.end = range.first;
  return range;
}

#ifdef __CUDACC__

struct ScoreRule {
  float scale;  // c of the softmax: weight = exp2(c * value - c * max)
  float inner;  // with softcap: value = tanh(dot * inner / (2 * log2(e))); 0 = value is the dot

  ScoreRule() = default;  // for shared memory
  __device__ __forceinline__ explicit ScoreRule(const ScoreArgs& args) {
    float c = args.log2_scale;
    if (args.k_scale_pointer != nullptr) c = normal_scale(c * fabsf(*args.k_scale_pointer));
    const bool capped = args.log2_softcap > 0.0f;
    scale = capped ? normal_scale(args.log2_softcap) : c;
    inner = capped ? 2.0f * kLog2E * (c / args.log2_softcap) : 0.0f;
  }

  // tanh(x) = 1 - 2 / (exp(2 x) + 1), to about 2e-7 absolute; the approximation instruction's
  // 5e-4 would be 2 % of a weight under a softcap of 50.
  __device__ __forceinline__ float cap(float dot) const {
    const float x = dot * inner;  // compared so that NaN stays NaN
    return 1.0f - __fdividef(2.0f, exp2_approx(x > 126.0f ? 126.0f : x) + 1.0f);
  }

  template <int kMt, int kNt>
  __device__ __forceinline__ void apply_softcap(float (&s)[kMt][kNt][4]) const {
    if (inner == 0.0f) return;
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int nt = 0; nt < kNt; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[mt][nt][i] = cap(s[mt][nt][i]);
      }
    }
  }
};

// How a row's accumulated output becomes its result.
struct RowEnd {
  float factor;  // of the un-normalised output; 0 if the row saw no key
  float lse;
};

// `max` and `sum` are the row's softmax state under `scale` (softmax.cuh). `sink` null = none. A
// caller writes 0 instead of output * factor if factor is 0: the output may hold NaN then.
__device__ __forceinline__ RowEnd end_of_row(float max, float sum, float scale, float v_scale,
                                             const float* sink) {
  if (sink == nullptr) {
    return {sum == 0.0f ? 0.0f : v_scale / sum, row_lse(max, sum, scale)};
  }
  const float sink_base = *sink * kLog2E;
  if (sum == 0.0f) return {0.0f, *sink};
  const float base = row_base(max, scale);
  const float top = fmaxf(base, sink_base);
  const float own = exp2_approx(base - top);
  const float total = fmaf(sum, own, exp2_approx(sink_base - top));
  return {own * v_scale / total, (top + log2f(total)) * kLn2};
}

__device__ __forceinline__ float value_scale(const ScoreArgs& args) {
  return args.v_scale_pointer == nullptr ? args.v_scale : args.v_scale * *args.v_scale_pointer;
}

__device__ __forceinline__ const float* sink_of(const ScoreArgs& args, int head) {
  return args.sinks == nullptr ? nullptr : args.sinks + head;
}

#endif  // __CUDACC__

}  // namespace astrai::attention
