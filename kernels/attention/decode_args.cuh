// Arguments of the decode kernels, MMA and scalar.
#pragma once

#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/attention/kv_source.cuh"

namespace astrai::attention {

// Partial results. Row = (batch * q_heads + head) * splits + split.
struct DecodePartials {
  float* out;      // [rows][head_dim], un-normalised; undefined where sum is 0
  float* max_sum;  // [rows][2]: largest raw score (see softmax.cuh) and sum
};

template <typename KvSource>
struct DecodeArgs {
  KvSource kv;
  const void* q;
  int64_t q_batch_stride;
  int64_t q_head_stride;
  void* out;
  int64_t out_batch_stride;
  int64_t out_head_stride;
  float* lse;  // nullable, [batch][q_heads]
  int kv_heads;
  int q_heads;
  int head_dim;
  int passes;
  int splits;
  int split_keys;
  DecodePartials partials;  // used if splits > 1
  float log2_scale;
  bool negate_q;
  MaskView mask;
};

}  // namespace astrai::attention
