// Arguments of the prefill kernels, MMA and scalar, and the launcher of the former.
#pragma once

#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/attention/kv_append.cuh"
#include "kernels/attention/kv_source.cuh"
#include "kernels/attention/prefill_plan.h"
#include "kernels/attention/q_schedule.cuh"
#include "kernels/attention/score.cuh"
#include "kernels/attention/split_merge.cuh"

namespace astrai::attention {

template <typename QSchedule, typename KvSource>
struct PrefillArgs {
  QSchedule schedule;
  KvSource kv;
  ScoreArgs score;
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
  int v_head_dim;
  // What follows the scalar kernel does not look at.
  AppendArgs append;  // paged keys: what each block puts into the cache of the keys it reads
  int splits;         // blocks that share the keys of a row tile; see PrefillPlan
  bool fixed_splits;
  int slot_rows;
  SplitWorkspace workspace;
};

// The block's rows: where packed row r of the request lies.
struct PackedRows {
  int group;
  int end;  // rows from here on do not exist, or are another block's

  __device__ __forceinline__ int position(int row) const {
    return static_cast<unsigned>(row) / static_cast<unsigned>(group);
  }
  __device__ __forceinline__ int head(int row, int position) const {
    return row - position * group;
  }
};

// The MMA kernel for Q of type T, head dims up to kQkDim and kVDim, tiles of kRows packed rows, and
// keys and values of KvSource. Each is instantiated in one of the files prefill_d*.cu, so that no
// compiler run is long.
template <typename T, int kQkDim, int kVDim, int kRows, typename QSchedule, typename KvSource>
struct PrefillKernel {
  static constexpr PrefillTile kTile =
      prefill_tile({kQkDim, kVDim}, kRows, static_cast<int>(sizeof(typename KvSource::Element)));

  static cudaError_t launch(const PrefillArgs<QSchedule, KvSource>& args, int64_t blocks,
                            cudaStream_t stream);
};

}  // namespace astrai::attention
