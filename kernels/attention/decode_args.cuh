// Arguments of the decode kernels, MMA and scalar, and the launcher of the former.
#pragma once

#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/attention/decode_plan.h"
#include "kernels/attention/kv_append.cuh"
#include "kernels/attention/kv_source.cuh"
#include "kernels/attention/score.cuh"
#include "kernels/attention/split_merge.cuh"
#include "kernels/common/launch.h"

namespace astrai::attention {

struct DecodeRequest {
  int q_len;
  int kv_len;
  KeyRange seen;  // by any of its queries

  __host__ __device__ int visible() const { return seen.end - seen.first; }
  // Units that the request counts for each kv head.
  __host__ __device__ uint32_t units(int unit_keys) const {
    if (q_len == 0) return 0;
    return visible() <= unit_keys ? 1 : (visible() - 1) / unit_keys + 1;
  }
};

__host__ __device__ inline DecodeRequest decode_request(const ScoreArgs& score, int q_len,
                                                        int kv_len) {
  return {q_len, kv_len, keys_in_window(score, 0, q_len - 1, kv_len - q_len, kv_len)};
}

// In the order in which the kernel needs them: each line of parameters that it touches first costs
// a miss of the constant cache.
template <typename KvSource>
struct DecodeArgs {
  // How the work is cut: see DecodePlan. Not looked at by the scalar kernel.
  int pieces_each;  // workers that a pair has room for, numbered; 0 = WorkSplit says who has what
  bool deterministic;  // how many of them a pair uses follows from its keys; else all it has units
                       // for
  bool equal_lengths;  // all requests are like `equal`
  DecodeRequest equal;
  uint32_t equal_units;
  int batch;
  int kv_heads;
  int group;  // query heads per kv head
  int cluster_blocks;
  int workers;
  int unit_keys;
  int head_dim;
  int v_head_dim;
  QueryRows queries;
  Operand q;
  KvSource kv;
  ScoreArgs score;
  void* out;
  int64_t out_batch_stride;
  int64_t out_seq_stride;
  int64_t out_head_stride;
  float* lse;  // nullable
  AppendArgs append;
  SplitWorkspace workspace;
};

// The MMA kernel for Q of type T, head dims up to kQkDim and kVDim, and keys and values of
// KvSource. Each is instantiated in one of the files decode_d*.cu, so that no compiler run is long.
template <typename T, int kQkDim, int kVDim, typename KvSource>
struct DecodeKernel {
  static constexpr DecodeTile kTile =
      decode_tile(kQkDim, kVDim, static_cast<int>(sizeof(typename KvSource::Element)));

  // Clusters of each size that the current device holds.
  static cudaError_t residency(Residency* residency);
  static cudaError_t launch(const DecodeArgs<KvSource>& args, int64_t blocks, cudaStream_t stream);
};

}  // namespace astrai::attention
