// Merging un-normalised results over disjoint keys, in three steps: of the warps of a block (shared
// memory), the blocks of a cluster (distributed shared memory), the pieces of a pair (global
// memory). Each part is an output and its softmax state (max, sum); parts without keys have sum 0
// and an output that is not looked at.
#pragma once

#include <cstdint>

#include "kernels/attention/decode_plan.h"
#include "kernels/attention/softmax.cuh"
#include "kernels/attention/split_merge.cuh"
#include "kernels/attention/variant.h"
#include "kernels/attention/work_split.cuh"
#include "kernels/common/cluster.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/common/reduce.cuh"
#include "kernels/common/smem.cuh"

namespace astrai::attention {

__device__ __forceinline__ void add_weighted(float4& o, float weight, const float4& part) {
  o.x = fmaf(weight, part.x, o.x);
  o.y = fmaf(weight, part.y, o.y);
  o.z = fmaf(weight, part.z, o.z);
  o.w = fmaf(weight, part.w, o.w);
}

// What a part with maximum `part_max` counts in a sum whose largest maximum has this base.
__device__ __forceinline__ float part_weight(float part_max, float scale, float base) {
  return exp2_approx(__fmul_rn(part_max, scale) - base);
}

// In `smem`: an area of kMmaRows rows of fp32 for each warp and one for the block, padded against
// bank conflicts.
template <int kWarps, int kVDim>
struct DecodeMerge {
  static constexpr int kStride = kVDim + 8;
  static constexpr int kQuads = kVDim / 4;  // of columns, in a row
  static constexpr int kAreaFloats = kMmaRows * kStride;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSmemBytes = (kWarps + 1) * kAreaFloats * static_cast<int>(sizeof(float));

  // (max, sum) of each part's rows; the last part is the block, or the merged pair.
  struct State {
    float2 max_sum[kWarps + 1][kMmaRows];
  };

  static __device__ __forceinline__ float* area(uint8_t* smem, int part) {
    return reinterpret_cast<float*>(smem) + part * kAreaFloats;
  }

  // Leaves this warp's accumulators of the first `rows` rows in its area.
  template <typename Fragments>
  static __device__ __forceinline__ void put_warp(uint8_t* smem, State& state,
                                                  const float (&o)[kVDim / 8][4],
                                                  const SoftmaxRows<1>& softmax, int rows) {
    const int thread = ptx::tid_x_here();
    const int lane = thread % 32;
    const int warp = thread / 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const MatrixCoord at = mma_c_coord(lane, 2 * half);
      if (at.row >= rows) continue;
      float* row = area(smem, warp) + at.row * kStride;
#pragma unroll
      for (int db = 0; db < kVDim / 16; ++db) {
        const float* first = o[2 * db] + 2 * half;
        const float* second = o[2 * db + 1] + 2 * half;
        if constexpr (Fragments::kIsFp8) {
          // The n blocks hold the even and the odd dims.
          *reinterpret_cast<float4*>(row + db * 16 + Fragments::v_dim(0, at.col)) =
              make_float4(first[0], second[0], first[1], second[1]);
        } else {
          *reinterpret_cast<float2*>(row + db * 16 + at.col) = make_float2(first[0], first[1]);
          *reinterpret_cast<float2*>(row + db * 16 + 8 + at.col) =
              make_float2(second[0], second[1]);
        }
      }
      if (lane % 4 == 0) {
        state.max_sum[warp][at.row] = make_float2(softmax.max[0][half], softmax.sum[0][half]);
      }
    }
  }

  // Merges up to kMost parts, `count` of them, at one row and four columns, and hands the result
  // on. Loads come first, as many as registers take: each of them takes long, and none waits for
  // another.
  template <int kMost, typename StateOf, typename OutOf, typename Store>
  static __device__ __forceinline__ void merge_quad(int count, float scale, int row, int column,
                                                    StateOf state_of, OutOf out_of, Store store) {
    constexpr int kBatch = kMost < 8 ? kMost : 8;
    static_assert(kMost % kBatch == 0, "whole batches");
    float2 states[kMost];
    float4 parts[kBatch];
    const auto load_parts = [&](int first) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i < count) parts[i] = out_of(first + i);
      }
    };
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      states[i] = i < count ? state_of(i) : make_float2(neg_inf(), 0.0f);
    }
    load_parts(0);
    float max = neg_inf();
#pragma unroll
    for (int i = 0; i < kMost; ++i) max = fmaxf(max, states[i].x);
    const float base = row_base(max, scale);
    float sum = 0.0f;
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int first = 0; first < kMost; first += kBatch) {
      if (first >= count) break;
      if (first > 0) load_parts(first);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float2 state = states[first + i];
        if (state.y == 0.0f) continue;
        const float weight = part_weight(state.x, scale, base);
        sum = fmaf(weight, state.y, sum);
        add_weighted(o, weight, parts[i]);
      }
    }
    store(row, column, max, sum, o);
  }

  // Merges the warps of the block; the areas were filled before a barrier.
  template <typename Store>
  static __device__ __forceinline__ void merge_warps(uint8_t* smem, const State& state, int rows,
                                                     float scale, Store store) {
    for (int item = ptx::tid_x_here(); item < rows * kQuads; item += kThreads) {
      const int row = item / kQuads;
      const int column = item % kQuads * 4;
      merge_quad<kWarps>(
          kWarps, scale, row, column, [&](int warp) { return state.max_sum[warp][row]; },
          [&](int warp) {
            return *reinterpret_cast<const float4*>(area(smem, warp) + row * kStride + column);
          },
          store);
    }
  }

  // Merges the warps of all blocks of the cluster, of which each stores its share.
  template <typename Store>
  static __device__ __forceinline__ void merge_cluster(uint8_t* smem, State& state, int rows,
                                                       float scale, int rank, int blocks,
                                                       Store store) {
    float* own = area(smem, kWarps);
    float2* own_state = state.max_sum[kWarps];
    merge_warps(smem, state, rows, scale, [&](int row, int column, float max, float sum, float4 o) {
      *reinterpret_cast<float4*>(own + row * kStride + column) = o;
      if (column == 0) own_state[row] = make_float2(max, sum);
    });
    cluster_sync();
    const int thread = ptx::tid_x_here();
    const int share = (rows * kQuads + blocks - 1) / blocks;
    const int end = min((rank + 1) * share, rows * kQuads);
    // All threads go through the loop equally often, as all of them arrive at the barrier.
    for (int first = rank * share, left = share; left > 0; first += kThreads, left -= kThreads) {
      const int item = first + thread;
      const int row = item / kQuads;
      const int column = item % kQuads * 4;
      float max, sum;
      float4 merged;
      if (item < end) {
        const uint32_t out = shared_address(own + row * kStride + column);
        const uint32_t max_sum = shared_address(own_state + row);
        merge_quad<kMostClusterBlocks>(
            blocks, scale, row, column,
            [&](int block) { return cluster_load_float2(cluster_address(max_sum, block)); },
            [&](int block) { return cluster_load_float4(cluster_address(out, block)); },
            [&](int, int, float m, float s, float4 o) {
              max = m;
              sum = s;
              merged = o;
            });
      }
      // Before the last stores, which the barrier would wait for: it only says that this block has
      // read what it needs.
      __syncwarp();
      if (left <= kThreads) cluster_arrive();
      if (item < end) store(row, column, max, sum, merged);
    }
    cluster_wait();
  }

  static __device__ __forceinline__ void put_partial(const SplitWorkspace& workspace, int slot,
                                                     int row, int column, float max, float sum,
                                                     const float4& o) {
    const int64_t at = static_cast<int64_t>(slot) * kMmaRows + row;
    *reinterpret_cast<float4*>(workspace.out + at * kVDim + column) = o;
    if (column == 0) {
      *reinterpret_cast<float2*>(workspace.max_sum + at * 2) = make_float2(max, sum);
    }
  }

  // What merge_partials keeps in shared memory: a float2 for each piece and row.
  static constexpr int kPartialsSmemBytes =
      kMostWorkers * kMmaRows * static_cast<int>(sizeof(float2));

  // Merges the pieces of a pair, in the order of their keys, as publish_and_check allows.
  template <typename Store>
  static __device__ __forceinline__ void merge_partials(uint8_t* smem, State& state,
                                                        const SplitWorkspace& workspace,
                                                        const Piece& piece, int rows, float scale,
                                                        Store store) {
    const int count = piece.group_size;
    const auto place = [&](int i, int row) {
      return static_cast<int64_t>(piece.slot(i)) * kMmaRows + row;
    };
    // kBatch loads of outputs are in flight at a time, the first ones already while the weights are
    // made. A piece too many is read where the last one lies, with a weight of 0.
    constexpr int kBatch = 8;
    const int items = rows * kQuads;
    const int thread = ptx::tid_x_here();
    int item = thread;
    float4 parts[kBatch];
    const auto load = [&](int first) {
      const float* column = workspace.out + item % kQuads * 4;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        parts[i] = __ldcg(reinterpret_cast<const float4*>(
            column + place(min(first + i, count - 1), item / kQuads) * kVDim));
      }
    };
    if (item < items) load(0);

    // (max, sum) of every piece and row; then its weight takes the place of the maximum.
    float2* states = reinterpret_cast<float2*>(smem);  // [count][rows]
    for (int i = thread; i < count * rows; i += kThreads) {
      states[i] = __ldcg(
          reinterpret_cast<const float2*>(workspace.max_sum + place(i / rows, i % rows) * 2));
    }
    __syncthreads();
    const int lane = thread % 32;
    for (int row = thread / 32; row < rows; row += kWarps) {
      float max = neg_inf();
      for (int i = lane; i < count; i += 32) max = fmaxf(max, states[i * rows + row].x);
      max = lanes_max<32>(max);
      const float base = row_base(max, scale);
      float sum = 0.0f;
      for (int i = lane; i < count; i += 32) {
        float2& part = states[i * rows + row];
        part.x = part.y == 0.0f ? 0.0f : part_weight(part.x, scale, base);
        sum = fmaf(part.x, part.y, sum);
      }
      sum = lanes_sum<32>(sum);
      if (lane == 0) state.max_sum[kWarps][row] = make_float2(max, sum);
    }
    __syncthreads();
    for (bool loaded = true; item < items; item += kThreads) {
      const int row = item / kQuads;
      float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int first = 0; first < count; first += kBatch) {
        if (!loaded) load(first);
        loaded = false;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const float weight = first + i < count ? states[(first + i) * rows + row].x : 0.0f;
          if (weight != 0.0f) add_weighted(o, weight, parts[i]);
        }
      }
      const float2 total = state.max_sum[kWarps][row];
      store(row, item % kQuads * 4, total.x, total.y, o);
    }
  }
};

}  // namespace astrai::attention
