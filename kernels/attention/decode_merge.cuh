// Merging un-normalised results over disjoint keys, in three steps: of the warps of a block (shared
// memory), the blocks of a cluster (distributed shared memory), the pieces of a pair (global
// memory). Each part is an output and its softmax state (max, sum); parts without keys have sum 0
// and an output that is not looked at.
#pragma once

#include <cstdint>

#include "kernels/attention/softmax.cuh"
#include "kernels/attention/split_merge.cuh"
#include "kernels/attention/variant.h"
#include "kernels/attention/work_split.cuh"
#include "kernels/common/cluster.cuh"
#include "kernels/common/mma.cuh"
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

  // Leaves this warp's accumulators in its area.
  template <typename Fragments>
  static __device__ __forceinline__ void put_warp(uint8_t* smem, State& state,
                                                  const float (&o)[kVDim / 8][4],
                                                  const SoftmaxRows<1>& softmax) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const MatrixCoord at = mma_c_coord(lane, 2 * half);
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

  // Merges `count` parts at one row and four columns, and hands the result on.
  template <typename StateOf, typename OutOf, typename Store>
  static __device__ __forceinline__ void merge_quad(int count, float scale, int row, int column,
                                                    StateOf state_of, OutOf out_of, Store store) {
    float max = neg_inf();
#pragma unroll
    for (int i = 0; i < count; ++i) max = fmaxf(max, state_of(i).x);
    const float base = row_base(max, scale);
    float sum = 0.0f;
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float2 part = state_of(i);
      if (part.y == 0.0f) continue;
      const float weight = part_weight(part.x, scale, base);
      sum = fmaf(weight, part.y, sum);
      add_weighted(o, weight, out_of(i));
    }
    store(row, column, max, sum, o);
  }

  // Merges the warps of the block; the areas were filled before a barrier.
  template <typename Store>
  static __device__ __forceinline__ void merge_warps(uint8_t* smem, const State& state, int rows,
                                                     float scale, Store store) {
    for (int item = threadIdx.x; item < rows * kQuads; item += kThreads) {
      const int row = item / kQuads;
      const int column = item % kQuads * 4;
      merge_quad(
          kWarps, scale, row, column, [&](int warp) { return state.max_sum[warp][row]; },
          [&](int warp) {
            return *reinterpret_cast<const float4*>(area(smem, warp) + row * kStride + column);
          },
          store);
    }
  }

  // Merges the warps of all blocks of the cluster, of which each stores its share. Stores to global
  // memory can be seen by the whole cluster afterwards.
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
    const int share = (rows * kQuads + blocks - 1) / blocks;
    const int end = min((rank + 1) * share, rows * kQuads);
    for (int item = rank * share + threadIdx.x; item < end; item += kThreads) {
      const int row = item / kQuads;
      const int column = item % kQuads * 4;
      const uint32_t out = shared_address(own + row * kStride + column);
      const uint32_t max_sum = shared_address(own_state + row);
      merge_quad(
          blocks, scale, row, column,
          [&](int block) {
            const uint32_t address = cluster_address(max_sum, block);
            return make_float2(cluster_load_float(address), cluster_load_float(address + 4));
          },
          [&](int block) { return cluster_load_float4(cluster_address(out, block)); }, store);
    }
    cluster_sync();  // no block changes what another one reads
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

  // Merges the pieces of a pair, in the order of their keys, as publish_and_check allows.
  template <typename Store>
  static __device__ __forceinline__ void merge_partials(uint8_t* smem, State& state,
                                                        const SplitWorkspace& workspace,
                                                        const Piece& piece, int rows, float scale,
                                                        Store store) {
    const int count = piece.group_size;
    // First the weights, a row a warp, then the outputs: their loads wait for nothing.
    float* weights = reinterpret_cast<float*>(smem);  // [count][kMmaRows]
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < rows; row += kWarps) {
      const auto state_of = [&](int i) {
        const int64_t at = static_cast<int64_t>(piece.slot(i)) * kMmaRows + row;
        return __ldcg(reinterpret_cast<const float2*>(workspace.max_sum + at * 2));
      };
      float max = neg_inf();
      for (int i = lane; i < count; i += 32) max = fmaxf(max, state_of(i).x);
      max = lanes_max<32>(max);
      const float base = row_base(max, scale);
      float sum = 0.0f;
      for (int i = lane; i < count; i += 32) {
        const float2 part = state_of(i);
        const float weight = part.y == 0.0f ? 0.0f : part_weight(part.x, scale, base);
        sum = fmaf(weight, part.y, sum);
        weights[i * kMmaRows + row] = weight;
      }
      sum = lanes_sum<32>(sum);
      if (lane == 0) state.max_sum[kWarps][row] = make_float2(max, sum);
    }
    __syncthreads();
    for (int item = threadIdx.x; item < rows * kQuads; item += kThreads) {
      const int row = item / kQuads;
      const int column = item % kQuads * 4;
      float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        const int64_t at = static_cast<int64_t>(piece.slot(i)) * kMmaRows + row;
        const float weight = weights[i * kMmaRows + row];
        if (weight == 0.0f) continue;
        add_weighted(o, weight,
                     __ldcg(reinterpret_cast<const float4*>(workspace.out + at * kVDim + column)));
      }
      const float2 total = state.max_sum[kWarps][row];
      store(row, column, total.x, total.y, o);
    }
  }
};

}  // namespace astrai::attention
