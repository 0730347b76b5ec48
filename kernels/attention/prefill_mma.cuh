// Prefill attention on tensor cores, for sm_80 and newer (FlashAttention-2: Dao 2023).
//
// A block owns PrefillTile::rows packed query rows (position x head of the group) of one kv head
// and walks over the keys once. Each warp owns 16 or 32 of the rows for everything: scores,
// softmax, output.
//
//   smem:  Q [rows][D] | ring of `slots` tiles [keys][D], filled in the order K0 V0 K1 V1 ...
//
// One step = one tile of the ring. A step waits for its tile, passes the block's barrier (after
// which the slot of the step before is free), starts the copy of the tile slots - 1 steps ahead,
// and computes: a K step S = Q K^T and the softmax, a V step O += P V. P stays in registers: the
// accumulator layout of S is the A operand layout of the second product.
#pragma once

#include <cstdint>

#include "kernels/attention/mask.cuh"
#include "kernels/attention/plan.h"
#include "kernels/attention/prefill_args.cuh"
#include "kernels/attention/softmax.cuh"
#include "kernels/common/cp_async.cuh"
#include "kernels/common/ldmatrix.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/smem.cuh"
#include "kernels/common/vec.cuh"

namespace astrai::attention {

template <typename T, int kHeadDim, int kRows>
struct PrefillBlock {
  static constexpr PrefillTile kTile = prefill_tile(kHeadDim, kRows);
  static constexpr int kKeys = kTile.keys;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kSlots = kTile.slots;
  static constexpr int kSlotBytes = kTile.slot_bytes();
  static constexpr int kQBytes = kTile.q_bytes();
  static constexpr int kWarpRows = kTile.warp_rows();
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kChunks = kRowBytes / 16;  // 16-byte chunks per row
  static constexpr int kMt = kWarpRows / 16;      // m blocks per warp
  static constexpr int kKeyBlocks = kKeys / 16;
  static constexpr int kDimBlocks = kHeadDim / 16;
  static constexpr int kRowsPerPass = kThreads / kChunks;
  static_assert(kKeys % kRowsPerPass == 0 && kRows % kRowsPerPass == 0, "whole passes");
  static_assert(kTile.smem_bytes() + kThreads * sizeof(void*) == kTile.all_smem_bytes(),
                "mask rows are counted");
  static_assert(kMt * 16 * kTile.warps == kRows && kKeys % 32 == 0, "whole blocks");

  // The share of a tile that this thread copies: one chunk of every kRowsPerPass-th row.
  static __device__ __forceinline__ int copy_row() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ int copy_chunk() { return threadIdx.x % kChunks; }

  // Starts the copy of a tile into a slot. `walk` goes down this thread's rows, tile after tile;
  // only `keys_left` of the tile's rows exist, the others become zeros, so that a probability of 0
  // meets no NaN.
  template <typename Walk>
  static __device__ __forceinline__ void copy_tile(uint32_t slot, Walk& walk, int keys_left) {
#pragma unroll
    for (int pass = 0; pass < kKeys / kRowsPerPass; ++pass) {
      const int r = copy_row() + pass * kRowsPerPass;
      cp_async_16(slot + swizzled_offset<kRowBytes>(r, copy_chunk()), walk.next(),
                  pass * kRowsPerPass < keys_left - copy_row());
    }
  }

  // S = Q K^T for the warp's rows and the keys of one slot. `q_rows`: shared memory address of the
  // warp's first row of Q, whose fragments are read again for every tile because registers are
  // scarce.
  static __device__ __forceinline__ void multiply_qk(float (&s)[kMt][2 * kKeyBlocks][4],
                                                     uint32_t q_rows,
                                                     const LdmatrixWalk<kRowBytes>& q_walk,
                                                     uint32_t slot,
                                                     const LdmatrixWalk<kRowBytes>& k_walk) {
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int nt = 0; nt < 2 * kKeyBlocks; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[mt][nt][i] = 0.0f;
      }
    }
#pragma unroll
    for (int db = 0; db < kDimBlocks; ++db) {
      uint32_t a[kMt][4];
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt) ldmatrix_x4(a[mt], q_rows + q_walk.at(mt * 16, db));
#pragma unroll
      for (int kb = 0; kb < kKeyBlocks; ++kb) {
        uint32_t b[4];
        ldmatrix_x4(b, slot + k_walk.at(kb * 16, db));
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt) {
          mma_m16n8k16<T>(s[mt][2 * kb], a[mt], b[0], b[1]);
          mma_m16n8k16<T>(s[mt][2 * kb + 1], a[mt], b[2], b[3]);
        }
      }
    }
  }

  // O += P V for the keys of one slot.
  static __device__ __forceinline__ void multiply_pv(float (&o)[kMt][2 * kDimBlocks][4],
                                                     const uint32_t (&p)[kMt][kKeyBlocks][4],
                                                     uint32_t slot,
                                                     const LdmatrixWalk<kRowBytes>& v_walk) {
#pragma unroll
    for (int kb = 0; kb < kKeyBlocks; ++kb) {
#pragma unroll
      for (int db = 0; db < kDimBlocks; ++db) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, slot + v_walk.at(kb * 16, db));
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt) {
          mma_m16n8k16<T>(o[mt][2 * db], p[mt][kb], b[0], b[1]);
          mma_m16n8k16<T>(o[mt][2 * db + 1], p[mt][kb], b[2], b[3]);
        }
      }
    }
  }

  // Sets scores of keys beyond each row's last visible one to -inf. `diagonal` is what is added to
  // a row's position to get its last key.
  static __device__ __forceinline__ void apply_limits(float (&s)[kMt][2 * kKeyBlocks][4],
                                                      const PackedRows& rows, int first_row,
                                                      int first_key, int kv_len, bool causal,
                                                      int diagonal) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int last = kv_len - 1;
        if (causal) {
          last = min(last, rows.position(first_row + mt * 16 + half * 8 + lane / 4) + diagonal);
        }
        // Column of the lane's first score, relative to the last visible key.
        const int column = first_key + (lane % 4) * 2 - last;
#pragma unroll
        for (int nt = 0; nt < 2 * kKeyBlocks; ++nt) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (column + nt * 8 + i > 0) s[mt][nt][2 * half + i] = neg_inf();
          }
        }
      }
    }
  }

  // A tile of the mask, as bits. A lane reads one row of the warp (kWarpRows of 16: two lanes a
  // row) and hands its words to the lanes that hold the scores.
  static constexpr int kMaskWords = kKeys / 32;  // per row
  static constexpr int kMaskRowLanes = 32 / kWarpRows;
  static constexpr int kMaskTurns = kMaskWords / kMaskRowLanes > 0 ? kMaskWords / kMaskRowLanes : 1;

  // The mask row that this lane reads. Rows that do not exist take the last one's: nothing of them
  // is stored.
  static __device__ __forceinline__ const uint8_t* lane_mask_row(const MaskView& mask,
                                                                 const PackedRows& rows, int batch,
                                                                 int first_head, int first_row) {
    const int row = min(first_row + static_cast<int>(threadIdx.x) % kWarpRows, rows.total - 1);
    const int position = rows.position(row);
    return mask_row(mask, batch, first_head + rows.head(row, position), position);
  }

  static __device__ __forceinline__ void load_mask(uint32_t (&words)[kMaskTurns],
                                                   const uint8_t* row, int first_key, int kv_len) {
    const int first_word = threadIdx.x % 32 / kWarpRows % kMaskWords;
#pragma unroll
    for (int turn = 0; turn < kMaskTurns; ++turn) {
      words[turn] = mask_bits_32(row, first_key + (first_word + turn * kMaskRowLanes) * 32, kv_len);
    }
  }

  // Sets scores where the mask is false to -inf.
  static __device__ __forceinline__ void apply_mask(float (&s)[kMt][2 * kKeyBlocks][4],
                                                    const uint32_t (&words)[kMaskTurns]) {
    const int lane = threadIdx.x % 32;
    uint32_t all = words[0];
#pragma unroll
    for (int turn = 1; turn < kMaskTurns; ++turn) all &= words[turn];
    if (__all_sync(0xffffffffu, all == 0xffffffffu)) return;
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int word = 0; word < kMaskWords; ++word) {
          const int source = word % kMaskRowLanes * kWarpRows + mt * 16 + half * 8 + lane / 4;
          const uint32_t bits =
              __shfl_sync(0xffffffffu, words[word / kMaskRowLanes], source) >> (lane % 4 * 2);
#pragma unroll
          for (int nt = 0; nt < 4; ++nt) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if ((bits >> (nt * 8 + i) & 1u) == 0) {
                s[mt][word * 4 + nt][2 * half + i] = neg_inf();
              }
            }
          }
        }
      }
    }
  }
};

template <typename T, int kHeadDim, int kRows, typename QSchedule, typename KvSource>
__global__ __launch_bounds__(
    prefill_tile(kHeadDim, kRows).threads(),
    prefill_tile(kHeadDim, kRows)
        .blocks_per_sm) void prefill_mma_kernel(const __grid_constant__
                                                    PrefillArgs<QSchedule, KvSource>
                                                        args) {
  using Block = PrefillBlock<T, kHeadDim, kRows>;
  constexpr int kKeys = Block::kKeys;
  constexpr int kMt = Block::kMt;
  constexpr int kRowBytes = Block::kRowBytes;
  constexpr int kChunks = Block::kChunks;
  constexpr int kRingBytes = Block::kSlots * Block::kSlotBytes;

  uint8_t* const smem = dynamic_smem;
  const uint32_t q_smem = shared_address(smem);
  const uint32_t ring = q_smem + Block::kQBytes;
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * Block::kWarpRows;  // of the block's rows

  const QWork work = args.schedule.at(blockIdx.x);
  const PackedRows rows = {args.group, work.q_len * args.group};
  const int first_head = work.kv_head * args.group;
  const int kv_len = args.kv.length(work.batch);
  const auto kv_rows = args.kv.rows(work.batch, work.kv_head);

  // Keys that any row of the block sees, and the first tile in which some row does not see every
  // key.
  const int last_row = min(work.first_row + kRows, rows.total) - 1;
  const int diagonal = kv_len - work.q_len;
  int key_end = kv_len;
  int seen_by_all = kv_len;
  if (args.causal) {
    key_end = max(0, rows.position(last_row) + diagonal + 1);
    seen_by_all = max(0, rows.position(work.first_row) + diagonal + 1);
  }
  const int tiles = (key_end + kKeys - 1) / kKeys;
  const int first_partial_tile = seen_by_all / kKeys;

  // ---- Copies in flight: Q with the first K tile, then the ring's first slots - 1 tiles ----
  const T* q = static_cast<const T*>(args.q) + work.q_offset + first_head * args.q_head_stride;
#pragma unroll 4
  for (int r = Block::copy_row(); r < kRows; r += Block::kRowsPerPass) {
    const int row = work.first_row + r;
    const bool valid = row < rows.total;
    const int position = rows.position(valid ? row : 0);
    const int head = rows.head(valid ? row : 0, position);
    const T* source = q + position * args.q_seq_stride + head * args.q_head_stride;
    cp_async_16(q_smem + swizzled_offset<kRowBytes>(r, Block::copy_chunk()),
                source + Block::copy_chunk() * 8, valid);
  }
  auto k_copies = kv_rows.walk_k(Block::copy_row(), Block::kRowsPerPass, Block::copy_chunk() * 8);
  auto v_copies = kv_rows.walk_v(Block::copy_row(), Block::kRowsPerPass, Block::copy_chunk() * 8);
  // Tiles are copied in order, each once.
  const auto copy_k = [&](uint32_t slot, int tile) {
    Block::copy_tile(slot, k_copies, kv_len - tile * kKeys);
  };
  const auto copy_v = [&](uint32_t slot, int tile) {
    Block::copy_tile(slot, v_copies, kv_len - tile * kKeys);
  };
#pragma unroll
  for (int step = 0; step < Block::kSlots - 1; ++step) {
    if (step / 2 < tiles) {
      const uint32_t slot = ring + step * Block::kSlotBytes;
      if (step % 2 == 0) {
        copy_k(slot, step / 2);
      } else {
        copy_v(slot, step / 2);
      }
    }
    cp_async_commit();
  }
  uint32_t read_slot = ring;
  uint32_t write_slot = ring + (Block::kSlots - 1) * Block::kSlotBytes;
  const auto next_slot = [ring](uint32_t slot) {
    slot += Block::kSlotBytes;
    return slot == ring + kRingBytes ? ring : slot;
  };
  // Begins a step: its tile has landed for every thread, and every thread is done with the step
  // before.
  const auto begin_step = [] {
    cp_async_wait<Block::kSlots - 2>();
    __syncthreads();
  };

  if (args.negate_q) {
    cp_async_wait<0>();
    __syncthreads();
    uint32_t* pairs = reinterpret_cast<uint32_t*>(smem);
    for (int i = threadIdx.x; i < Block::kQBytes / 4; i += Block::kThreads) {
      pairs[i] ^= 0x80008000u;
    }
  }

  const LdmatrixWalk<kRowBytes> k_walk(ldmatrix_cols_first(lane));
  const LdmatrixWalk<kRowBytes> v_walk(ldmatrix_rows_first(lane));
  const LdmatrixWalk<kRowBytes> q_walk(ldmatrix_rows_first(lane));
  const uint32_t q_rows = q_smem + warp_row * kRowBytes;
  const int first_warp_row = work.first_row + warp_row;

  SoftmaxRows<kMt> softmax;
  float o[kMt][2 * Block::kDimBlocks][4] = {};

  const bool masked = args.mask.data != nullptr;
  // The row of the mask that a thread reads, in shared memory because registers are scarce.
  __shared__ const uint8_t* mask_rows[Block::kThreads];
  if (masked && tiles > 0) {
    mask_rows[threadIdx.x] =
        Block::lane_mask_row(args.mask, rows, work.batch, first_head, first_warp_row);
  }

  // Tiles of the ring that a step starts to copy: a K step copies what stands kSlots - 1 steps
  // ahead.
  constexpr int kAhead = Block::kSlots - 1;
  for (int tile = 0; tile < tiles; ++tile) {
    // ---- K step ----
    uint32_t mask_words[Block::kMaskTurns];
    if (masked) Block::load_mask(mask_words, mask_rows[threadIdx.x], tile * kKeys, kv_len);
    begin_step();
    if (tile + kAhead / 2 < tiles) {
      if constexpr (kAhead % 2 == 0) {
        copy_k(write_slot, tile + kAhead / 2);
      } else {
        copy_v(write_slot, tile + kAhead / 2);
      }
    }
    cp_async_commit();
    write_slot = next_slot(write_slot);

    float s[kMt][2 * Block::kKeyBlocks][4];
    Block::multiply_qk(s, q_rows, q_walk, read_slot, k_walk);
    read_slot = next_slot(read_slot);
    if (tile >= first_partial_tile) {
      Block::apply_limits(s, rows, first_warp_row, tile * kKeys, kv_len, args.causal, diagonal);
    }
    if (masked) {
      Block::apply_mask(s, mask_words);
    }
    float factor[kMt][2];
    const bool changed = softmax.update(s, args.log2_scale, factor);
    rescale(o, factor, changed);
    uint32_t p[kMt][Block::kKeyBlocks][4];
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int kb = 0; kb < Block::kKeyBlocks; ++kb) {
        p[mt][kb][0] = pack2<T>(s[mt][2 * kb][0], s[mt][2 * kb][1]);
        p[mt][kb][1] = pack2<T>(s[mt][2 * kb][2], s[mt][2 * kb][3]);
        p[mt][kb][2] = pack2<T>(s[mt][2 * kb + 1][0], s[mt][2 * kb + 1][1]);
        p[mt][kb][3] = pack2<T>(s[mt][2 * kb + 1][2], s[mt][2 * kb + 1][3]);
      }
    }

    // ---- V step ----
    begin_step();
    if (tile + (kAhead + 1) / 2 < tiles) {
      if constexpr (kAhead % 2 == 0) {
        copy_v(write_slot, tile + (kAhead + 1) / 2);
      } else {
        copy_k(write_slot, tile + (kAhead + 1) / 2);
      }
    }
    cp_async_commit();
    write_slot = next_slot(write_slot);
    Block::multiply_pv(o, p, read_slot, v_walk);
    read_slot = next_slot(read_slot);
  }

  // ---- Normalise and store ----
  softmax.finish();
  // Q has landed even if there was no tile, and nobody reads it any more: its rows take the output.
  cp_async_wait<0>();
  __syncthreads();
  uint8_t* staged = smem + warp_row * kRowBytes;
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = mt * 16 + half * 8 + lane / 4;
      const float sum = softmax.sum[mt][half];
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      const int row = first_warp_row + r;
      if (args.lse != nullptr && lane % 4 == 0 && row < rows.total) {
        const int position = rows.position(row);
        args.lse[(work.lse_row + position) * args.q_heads + first_head + rows.head(row, position)] =
            row_lse(softmax.max[mt][half], sum, args.log2_scale);
      }
#pragma unroll
      for (int nt = 0; nt < 2 * Block::kDimBlocks; ++nt) {
        // A row without keys is 0 even if V holds NaN.
        const float low = sum == 0.0f ? 0.0f : o[mt][nt][2 * half] * inverse;
        const float high = sum == 0.0f ? 0.0f : o[mt][nt][2 * half + 1] * inverse;
        *reinterpret_cast<uint32_t*>(staged + swizzled_offset<kRowBytes>(r, nt) + lane % 4 * 4) =
            pack2<T>(low, high);
      }
    }
  }
  __syncwarp();
  T* out = static_cast<T*>(args.out) + work.out_offset + first_head * args.out_head_stride;
#pragma unroll 2
  for (int i = lane; i < kMt * 16 * kChunks; i += 32) {
    const int r = i / kChunks;
    const int chunk = i % kChunks;
    const int row = first_warp_row + r;
    if (row < rows.total) {
      const int position = rows.position(row);
      T* target = out + position * args.out_seq_stride +
                  rows.head(row, position) * args.out_head_stride + chunk * 8;
      *reinterpret_cast<uint4*>(target) =
          *reinterpret_cast<const uint4*>(staged + swizzled_offset<kRowBytes>(r, chunk));
    }
  }
}

}  // namespace astrai::attention
