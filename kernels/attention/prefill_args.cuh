// Arguments of the prefill kernels, MMA and scalar.
#pragma once

#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/attention/kv_source.cuh"
#include "kernels/attention/q_schedule.cuh"

namespace astrai::attention {

template <typename QSchedule, typename KvSource>
struct PrefillArgs {
  QSchedule schedule;
  KvSource kv;
  const void* q;
  int64_t q_seq_stride;
  int64_t q_head_stride;
  void* out;
  int64_t out_seq_stride;
  int64_t out_head_stride;
  float* lse;  // nullable
  int group;   // query heads per kv head
  int q_heads;
  int head_dim;
  float log2_scale;
  bool negate_q;
  bool causal;
  MaskView mask;
};

// The block's rows: where packed row r of the request lies and what it may see.
struct PackedRows {
  int group;
  int total;  // q_len * group

  __device__ __forceinline__ int position(int row) const {
    return static_cast<unsigned>(row) / static_cast<unsigned>(group);
  }
  __device__ __forceinline__ int head(int row, int position) const {
    return row - position * group;
  }
};

}  // namespace astrai::attention
