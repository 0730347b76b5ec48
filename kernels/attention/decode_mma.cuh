// Decode attention (one query per request) on tensor cores, for sm_80 and newer: streams K and V
// once.
//
// A block takes up to 16 query heads that share a kv head as the 16 rows of an MMA, and one split
// of the keys. Its warps share nothing while they stream: each takes every kWarps-th slice of 16
// keys, through two rings of its own (K slices and V slices), with its own softmax state and
// output, so the loop has no block barrier.
//
//   smem of one warp:  K ring [slots][16][D] | V ring [slots][16][D]
//
// As soon as a slice has been used, the copy of the slice `slots` turns ahead goes into its place.
// The warps' results are merged at the end, through the same memory. With several splits per row,
// each block leaves an un-normalised fp32 output and its (max, sum) for decode_combine_kernel.
#pragma once

#include <cstdint>

#include "kernels/attention/decode_args.cuh"
#include "kernels/attention/mask.cuh"
#include "kernels/attention/plan.h"
#include "kernels/attention/softmax.cuh"
#include "kernels/common/cp_async.cuh"
#include "kernels/common/ldmatrix.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/vec.cuh"

namespace astrai::attention {

template <typename T, int kHeadDim>
struct DecodeWarp {
  static constexpr DecodeTile kTile = decode_tile(kHeadDim);
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSlots = kTile.slots;
  static constexpr int kSliceKeys = DecodeTile::kSliceKeys;
  static constexpr int kSliceBytes = kTile.slice_bytes();
  static constexpr int kSmemBytes = kTile.smem_bytes();
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kRowsPerPass = 32 / kChunks > 0 ? 32 / kChunks : 1;
  static constexpr int kDimBlocks = kHeadDim / 16;
  static_assert(kChunks <= 32, "a warp copies whole rows");

  // The A operand of the first product: rows 0 .. heads - 1 of the group, zeros below.
  static __device__ __forceinline__ void load_q(uint32_t (&a)[kDimBlocks][4], const T* q,
                                                int64_t head_stride, int heads, bool negate) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int reg = 0; reg < 4; ++reg) {
      const MatrixCoord at = mma_a_coord(lane, reg, 0);
      const T* row = q + at.row * head_stride + at.col;
#pragma unroll
      for (int db = 0; db < kDimBlocks; ++db) {
        a[db][reg] = 0;
        if (at.row < heads) a[db][reg] = *reinterpret_cast<const uint32_t*>(row + db * 16);
        if (negate) a[db][reg] ^= 0x80008000u;
      }
    }
  }

  // Starts the copy of 16 rows into a slot; of those, `valid` exist, the others become zeros.
  template <typename Walk>
  static __device__ __forceinline__ void copy_slice(uint32_t slot, int valid, Walk walk,
                                                    uint64_t policy) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int pass = 0; pass < kSliceKeys / kRowsPerPass; ++pass) {
      const int r = lane / kChunks + pass * kRowsPerPass;
      cp_async_16(slot + swizzled_offset<kRowBytes>(r, lane % kChunks), walk.next(), r < valid,
                  policy);
    }
  }

  // Sets scores of keys from kv_len on, or where the mask is false, to -inf.
  static __device__ __forceinline__ void apply_mask(float (&s)[2][4], int first_key, int kv_len,
                                                    const MaskView& mask, int batch, int first_head,
                                                    int heads) {
    const int lane = threadIdx.x % 32;
    if (first_key + kSliceKeys > kv_len) {
#pragma unroll
      for (int nt = 0; nt < 2; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (first_key + nt * 8 + mma_c_coord(lane, i).col >= kv_len) s[nt][i] = neg_inf();
        }
      }
    }
    if (mask.data != nullptr) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = mma_c_coord(lane, 2 * half).row;
        if (row >= heads) continue;
        const uint8_t* allowed = mask_row(mask, batch, first_head + row, 0);
#pragma unroll
        for (int nt = 0; nt < 2; ++nt) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = first_key + nt * 8 + mma_c_coord(lane, i).col;
            if (key < kv_len && allowed[key] == 0) s[nt][2 * half + i] = neg_inf();
          }
        }
      }
    }
  }
};

// Merges the warps' outputs and writes the block's rows. `merge` is kWarps * 16 rows of kHeadDim +
// 8 floats, the padding against bank conflicts.
template <typename T, int kHeadDim, typename KvSource>
__device__ __forceinline__ void decode_store(const DecodeArgs<KvSource>& args, const float* merge,
                                             const float (*max_sum)[kMmaRows][2], int batch,
                                             int first_head, int heads, int split) {
  constexpr int kWarps = DecodeWarp<T, kHeadDim>::kWarps;
  constexpr int kQuads = kHeadDim / 4;
  for (int item = threadIdx.x; item < heads * kQuads; item += kWarps * 32) {
    const int row = item / kQuads;
    const int column = item % kQuads * 4;
    float max = neg_inf();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) max = fmaxf(max, max_sum[warp][row][0]);
    const float base = row_base(max, args.log2_scale);
    float sum = 0.0f;
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float part_sum = max_sum[warp][row][1];
      if (part_sum == 0.0f) continue;  // no key: the weight is 0, whatever the output holds
      const float weight = exp2_approx(__fmul_rn(max_sum[warp][row][0], args.log2_scale) - base);
      sum = fmaf(weight, part_sum, sum);
      const float4 part = *reinterpret_cast<const float4*>(
          merge + (warp * kMmaRows + row) * (kHeadDim + 8) + column);
      o.x = fmaf(weight, part.x, o.x);
      o.y = fmaf(weight, part.y, o.y);
      o.z = fmaf(weight, part.z, o.z);
      o.w = fmaf(weight, part.w, o.w);
    }
    const int head = first_head + row;
    const int64_t lse_row = static_cast<int64_t>(batch) * args.q_heads + head;
    if (args.splits > 1) {
      const int64_t partial = lse_row * args.splits + split;
      *reinterpret_cast<float4*>(args.partials.out + partial * kHeadDim + column) = o;
      if (column == 0) {
        *reinterpret_cast<float2*>(args.partials.max_sum + partial * 2) = make_float2(max, sum);
      }
    } else {
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      T* out = static_cast<T*>(args.out) + batch * args.out_batch_stride +
               head * args.out_head_stride + column;
      *reinterpret_cast<uint2*>(out) = make_uint2(pack2<T>(o.x * inverse, o.y * inverse),
                                                  pack2<T>(o.z * inverse, o.w * inverse));
      if (args.lse != nullptr && column == 0) {
        args.lse[lse_row] = row_lse(max, sum, args.log2_scale);
      }
    }
  }
}

template <typename T, int kHeadDim, typename KvSource>
__global__ __launch_bounds__(decode_tile(kHeadDim).warps * 32) void decode_mma_kernel(
    const __grid_constant__ DecodeArgs<KvSource> args) {
  using Warp = DecodeWarp<T, kHeadDim>;
  constexpr int kSliceKeys = Warp::kSliceKeys;
  constexpr int kSlots = Warp::kSlots;
  constexpr int kTileKeys = kSliceKeys * Warp::kWarps;
  constexpr int kMergeStride = kHeadDim + 8;
  static_assert(Warp::kWarps * kMmaRows * kMergeStride * 4 <= Warp::kSmemBytes,
                "rings take the merge");

  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ float max_sum[Warp::kWarps][kMmaRows][2];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  // Blocks in order: batch, kv head, split, pass. Passes read the same keys, so they run side by
  // side.
  int index = blockIdx.x;
  const int pass = index % args.passes;
  index /= args.passes;
  const int split = index % args.splits;
  index /= args.splits;
  const int kv_head = index % args.kv_heads;
  const int batch = index / args.kv_heads;

  const int group = args.q_heads / args.kv_heads;
  const int heads = min(group - pass * kMmaRows, kMmaRows);
  const int first_head = kv_head * group + pass * kMmaRows;
  const int kv_len = args.kv.length(batch);
  const auto kv_rows = args.kv.rows(batch, kv_head);

  // Of the split's slices the warp takes `warp`, warp + kWarps, ...
  const int64_t first = static_cast<int64_t>(split) * args.split_keys;
  const int begin = static_cast<int>(min(first, static_cast<int64_t>(kv_len)));
  const int end = static_cast<int>(min(first + args.split_keys, static_cast<int64_t>(kv_len)));
  const int first_key = begin + warp * kSliceKeys;
  const int turns = max(0, (end - first_key + kTileKeys - 1) / kTileKeys);

  const uint32_t k_ring = shared_address(smem) + warp * 2 * kSlots * Warp::kSliceBytes;
  const uint32_t v_ring = k_ring + kSlots * Warp::kSliceBytes;
  const uint64_t policy = evict_first_policy();
  const auto copy_k = [&](int slot, int turn) {
    if (turn < turns) {
      const int key = first_key + turn * kTileKeys;
      Warp::copy_slice(
          k_ring + slot * Warp::kSliceBytes, end - key,
          kv_rows.walk_k(key + lane / Warp::kChunks, Warp::kRowsPerPass, lane % Warp::kChunks * 8),
          policy);
    }
    cp_async_commit();
  };
  const auto copy_v = [&](int slot, int turn) {
    if (turn < turns) {
      const int key = first_key + turn * kTileKeys;
      Warp::copy_slice(
          v_ring + slot * Warp::kSliceBytes, end - key,
          kv_rows.walk_v(key + lane / Warp::kChunks, Warp::kRowsPerPass, lane % Warp::kChunks * 8),
          policy);
    }
    cp_async_commit();
  };
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    copy_k(slot, slot);
    copy_v(slot, slot);
  }

  uint32_t q[Warp::kDimBlocks][4];
  Warp::load_q(
      q,
      static_cast<const T*>(args.q) + batch * args.q_batch_stride + first_head * args.q_head_stride,
      args.q_head_stride, heads, args.negate_q);

  const LdmatrixWalk<Warp::kRowBytes> k_walk(ldmatrix_cols_first(lane));
  const LdmatrixWalk<Warp::kRowBytes> v_walk(ldmatrix_rows_first(lane));
  SoftmaxRows<1> softmax;
  float o[1][2 * Warp::kDimBlocks][4] = {};
  int slot = 0;
  for (int turn = 0; turn < turns; ++turn) {
    // Of the 2 * kSlots groups in flight (K and V in turn) the oldest has landed.
    cp_async_wait<2 * kSlots - 1>();
    __syncwarp();
    float s[1][2][4] = {};
#pragma unroll
    for (int db = 0; db < Warp::kDimBlocks; ++db) {
      uint32_t b[4];
      ldmatrix_x4(b, k_ring + slot * Warp::kSliceBytes + k_walk.at(0, db));
      mma_m16n8k16<T>(s[0][0], q[db], b[0], b[1]);
      mma_m16n8k16<T>(s[0][1], q[db], b[2], b[3]);
    }
    __syncwarp();
    copy_k(slot, turn + kSlots);

    Warp::apply_mask(s[0], first_key + turn * kTileKeys, end, args.mask, batch, first_head, heads);
    float factor[1][2];
    const bool changed = softmax.update(s, args.log2_scale, factor);
    rescale(o, factor, changed);
    const uint32_t p[4] = {pack2<T>(s[0][0][0], s[0][0][1]), pack2<T>(s[0][0][2], s[0][0][3]),
                           pack2<T>(s[0][1][0], s[0][1][1]), pack2<T>(s[0][1][2], s[0][1][3])};

    cp_async_wait<2 * kSlots - 1>();
    __syncwarp();
#pragma unroll
    for (int db = 0; db < Warp::kDimBlocks; ++db) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, v_ring + slot * Warp::kSliceBytes + v_walk.at(0, db));
      mma_m16n8k16<T>(o[0][2 * db], p, b[0], b[1]);
      mma_m16n8k16<T>(o[0][2 * db + 1], p, b[2], b[3]);
    }
    __syncwarp();
    copy_v(slot, turn + kSlots);
    slot = slot + 1 == kSlots ? 0 : slot + 1;
  }
  softmax.finish();

  // ---- The rings become the merge area ----
  cp_async_wait<0>();
  __syncthreads();
  float* merge = reinterpret_cast<float*>(smem);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const MatrixCoord at = mma_c_coord(lane, 2 * half);
    if (at.row >= heads) continue;
    float* row = merge + (warp * kMmaRows + at.row) * kMergeStride + at.col;
#pragma unroll
    for (int nt = 0; nt < 2 * Warp::kDimBlocks; ++nt) {
      *reinterpret_cast<float2*>(row + nt * 8) =
          make_float2(o[0][nt][2 * half], o[0][nt][2 * half + 1]);
    }
    if (lane % 4 == 0) {
      max_sum[warp][at.row][0] = softmax.max[0][half];
      max_sum[warp][at.row][1] = softmax.sum[0][half];
    }
  }
  __syncthreads();
  decode_store<T, kHeadDim>(args, merge, max_sum, batch, first_head, heads, split);
}

}  // namespace astrai::attention
