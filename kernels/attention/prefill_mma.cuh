// Prefill attention on tensor cores, for sm_80 and newer (FlashAttention-2: Dao 2023).
//
// A block owns PrefillTile::rows packed query rows (position x head of the group) of one kv head
// and walks over the keys that any of them sees, or over its share of these if the row tile is
// split. Each warp owns 16 or 32 of the rows for everything: scores, softmax, output.
//
//   smem:  Q [rows][qk dim] | ring of `slots` tiles [keys][dim], filled in the order K0 V0 K1 V1
//   ...
//
// One step = one tile of the ring. A step waits for its tile, passes the block's barrier (after
// which the slot of the step before is free), starts the copy of the tile slots - 1 steps ahead,
// and computes: a K step S = Q K^T and the softmax, a V step O += P V. P stays in registers: the
// accumulator layout of S is the A operand layout of the second product.
#pragma once

#include <cstdint>

#include "kernels/attention/kv_append.cuh"
#include "kernels/attention/prefill_args.cuh"
#include "kernels/attention/prefill_block.cuh"
#include "kernels/attention/prefill_merge.cuh"
#include "kernels/attention/prefill_work.cuh"
#include "kernels/attention/score.cuh"
#include "kernels/attention/softmax.cuh"
#include "kernels/attention/split_merge.cuh"
#include "kernels/common/cp_async.cuh"
#include "kernels/common/ldmatrix.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/smem.cuh"
#include "kernels/common/vec.cuh"

namespace astrai::attention {

template <typename T, int kQkDim, int kVDim, int kRows, typename QSchedule, typename KvSource>
__global__ __launch_bounds__(
    PrefillBlock<T, kQkDim, kVDim, kRows, KvSource>::kThreads,
    PrefillBlock<T, kQkDim, kVDim, kRows, KvSource>::kTile
        .blocks_per_sm) void prefill_mma_kernel(const __grid_constant__
                                                    PrefillArgs<QSchedule, KvSource>
                                                        args) {
  using Block = PrefillBlock<T, kQkDim, kVDim, kRows, KvSource>;
  using Copy = typename Block::Copy;
  using Merge = PrefillMerge<T, kVDim, kRows, Block::kThreads>;
  constexpr int kKeys = Block::kKeys;
  constexpr int kMt = Block::kMt;
  constexpr int kRingBytes = Block::kSlots * Block::kSlotBytes;
  static_assert(Merge::kSmemBytes <= Block::kSmemBytes, "tiles take the merge");

  uint8_t* const smem = dynamic_smem;
  __shared__ typename Block::Shared shared;
  const PrefillWork& block = shared.block;
  const uint32_t q_smem = shared_address(smem);
  const uint32_t ring = q_smem + Block::kQBytes;
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * Block::kWarpRows;  // of the block's rows

  if (threadIdx.x == 0) shared.block.begin(args, kKeys);
  __syncthreads();
  if (block.work.batch < 0) return;
  const int first_tile = block.tiles.first;
  const int end_tile = block.tiles.end;

  if constexpr (KvSource::kPaged) {
    if (args.append.k.data != nullptr) {
      // Also tokens that no row sees: their rows of V are multiplied by 0. Blocks of other row
      // tiles put the same bytes there.
      append_tokens<T, 8, KvSource>(
          args.append, args.schedule.queries, args.kv.rows(block.work.batch, block.work.kv_head),
          block.work.batch, block.work.kv_head, block.work.q_len, block.kv_len, args.head_dim,
          args.v_head_dim, first_tile * kKeys, min(end_tile * kKeys, block.kv_len),
          [](int) { return true; });
      __syncthreads();
    }
  }

  // ---- Copies in flight: Q with the first K tile, then the ring's first slots - 1 tiles ----
  Block::copy_q(q_smem, args, block.work);
  Copy copy(&shared.copy, args, block);
#pragma unroll
  for (int step = 0; step < Block::kSlots - 1; ++step) {
    if (step > 0) Copy::barrier();
    if (first_tile + step / 2 < end_tile) {
      const uint32_t slot = ring + step * Block::kSlotBytes;
      if (step % 2 == 0) {
        copy.copy_k(slot, first_tile + step / 2);
      } else {
        copy.copy_v(slot, first_tile + step / 2);
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

  if (Block::KFragments::kIsFp8 || args.score.negate_q) {
    cp_async_wait<0>();
    __syncthreads();
    Block::prepare_q(smem, args.score.negate_q);
  }
  const bool masked = args.score.mask.data != nullptr;
  if (masked) {
    const PackedRows rows = {args.group, block.work.row_end};
    shared.mask_positions[threadIdx.x] = rows.position(Block::lane_mask_row(block.work, warp_row));
  }

  const typename Block::KFragments k_fragments(lane);
  const typename Block::VFragments v_fragments(lane);
  const typename Block::QWalk q_walk(ldmatrix_rows_first(lane));
  const uint32_t q_rows = q_smem + warp_row * Block::QRows::kStride;
  SoftmaxRows<kMt> softmax;
  float o[kMt][2 * Block::kVBlocks][4] = {};

  // Tiles of the ring that a step starts to copy: a K step copies what stands kSlots - 1 steps
  // ahead.
  constexpr int kAhead = Block::kSlots - 1;
  for (int tile = first_tile; tile < end_tile; ++tile) {
    // ---- K step ----
    uint32_t mask_words[Block::kMaskTurns];
    if (masked) {
      Block::load_mask(mask_words, args.score.mask, shared, args.group, warp_row, tile * kKeys);
    }
    begin_step();
    if (tile + kAhead / 2 < end_tile) {
      if constexpr (kAhead % 2 == 0) {
        copy.copy_k(write_slot, tile + kAhead / 2);
      } else {
        copy.copy_v(write_slot, tile + kAhead / 2);
      }
    }
    cp_async_commit();
    write_slot = next_slot(write_slot);

    float s[kMt][2 * Block::kKeyBlocks][4];
    Block::multiply_qk(s, q_rows, q_walk, read_slot, k_fragments);
    read_slot = next_slot(read_slot);
    block.rule.apply_softcap(s);
    if (tile < block.whole.first || tile >= block.whole.end) {
      Block::apply_limits(s, args, block, warp_row, tile * kKeys);
    }
    if constexpr (KvSource::kPaged) Block::apply_missing(s, shared.copy.missing[tile % 4]);
    if (masked) Block::apply_mask(s, mask_words);
    float factor[kMt][2];
    const bool changed = softmax.update(s, block.rule.scale, factor);
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
    if (tile + (kAhead + 1) / 2 < end_tile) {
      if constexpr (kAhead % 2 == 0) {
        copy.copy_v(write_slot, tile + (kAhead + 1) / 2);
      } else {
        copy.copy_k(write_slot, tile + (kAhead + 1) / 2);
      }
    }
    cp_async_commit();
    write_slot = next_slot(write_slot);
    Block::multiply_pv(o, p, read_slot, v_fragments);
    read_slot = next_slot(read_slot);
  }

  softmax.finish();
  // Q has landed even if there was no tile, and nobody reads tiles any more: their memory takes
  // what is stored.
  cp_async_wait<0>();
  __syncthreads();
  if (block.parts == 1) {
    Block::store(smem, args, block.work, warp_row, softmax, o, block.rule.scale);
    return;
  }
  const int own_slot = static_cast<int>(blockIdx.x);
  const int first_slot = own_slot - block.split;
  const auto slot_of = [first_slot](int i) { return first_slot + i; };
  Block::store_partial(args, block.work, warp_row, own_slot, softmax, o);
  if (publish_and_check(args.workspace.flags, own_slot, block.parts, slot_of)) {
    Merge::merge(smem, args, block.work, first_slot, block.parts, block.rule.scale);
    clear_flags(args.workspace.flags, block.parts, slot_of);
  }
}

}  // namespace astrai::attention
