// Estimates of kernel time by which plan.cc compares launches of the same problem: how often the
// keys of a decode are split, how many rows a prefill tile has.
//
// The constants were fitted to times measured on one H200 (132 SMs, driver 580.159, CUDA 13.0) on
// 2026-11-30 by //tools/bench:attention_plans: forced splits and rows, bf16, graph replay (the
// figures are in README.md). They only need to rank alternatives. Other GPUs differ in absolute
// speed, but the ratios that matter here (bandwidth of one SM to that of all, launch to streaming)
// are of the same size.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/attention/plan.h"
#include "kernels/common/device.h"

namespace astrai::attention {

inline constexpr int kReservedSmem = 1024;  // bytes of shared memory the system takes per block

// ---- Decode: microseconds, without what all splits have in common ------------------------------

struct DecodeCost {
  static constexpr double kMemoryBytes = 4.65e6;   // per microsecond, of the whole GPU
  static constexpr double kSmBytes = 0.06e6;       // per microsecond, what one SM can take in
  static constexpr double kWave = 0.4;             // start of a block, filling its rings, its merge
  static constexpr double kCombine = 1.8;          // second launch
  static constexpr double kPartialsBytes = 1.4e6;  // per microsecond, written and read back
  static constexpr double kCombineBytes = 0.033e6;  // per microsecond, of the block of one row

  // A warp's turn (16 keys of K and of V) if nothing else slows it down.
  static constexpr double turn(int head_dim) {
    return head_dim == 64 ? 0.28 : head_dim == 128 ? 0.55 : 0.95;
  }

  int head_dim;
  int tiles;        // of DecodeTile::keys() keys, of one request
  int64_t unsplit;  // blocks if splits == 1
  int64_t rows;     // batch * q_heads
  int sm_count;
  int blocks_per_sm;

  // Bytes of partial results of one split of one row.
  double partial_bytes() const { return (head_dim + 2) * 4.0; }

  // Merging the splits: grows with `splits`.
  double combine(int splits) const {
    if (splits == 1) return 0.0;
    const double row_bytes = splits * partial_bytes();
    return kCombine + rows * row_bytes / kPartialsBytes + row_bytes / kCombineBytes;
  }

  // Reading the keys: bound by memory if the load is even, by the SM with most blocks, or by the
  // latency of a block's turns. Near each other the bounds add up, hence the root of squares.
  double stream(int splits) const {
    const int tiles_per_block = (tiles + splits - 1) / splits;
    const double tile_bytes = decode_tile(head_dim).keys() * head_dim * 4.0;
    const int64_t blocks = unsplit * splits;
    const int64_t slots = static_cast<int64_t>(sm_count) * blocks_per_sm;
    const int64_t waves = (blocks + slots - 1) / slots;
    // Blocks go where others end, so the last wave may fill some SMs and leave others idle.
    const int64_t busiest = waves > 1 ? waves * blocks_per_sm : (blocks + sm_count - 1) / sm_count;
    const double memory = unsplit * tiles * tile_bytes / kMemoryBytes;
    const double sm = std::max(waves * tiles_per_block * turn(head_dim),
                               busiest * tiles_per_block * tile_bytes / kSmBytes);
    return std::sqrt(memory * memory + sm * sm) + waves * kWave;
  }
};

// ---- Prefill: time in units of one row against all keys at the full rate of an SM ---------------

// Blocks of a tile that an SM holds at a time.
inline int resident_blocks(const PrefillTile& tile, const DeviceInfo& device) {
  return std::clamp(device.smem_per_sm / (tile.all_smem_bytes() + kReservedSmem), 1,
                    tile.blocks_per_sm);
}

// `seen` = keys that a row sees on average, relative to all: 1 if not causal, 1/2 if square and
// causal.
inline double prefill_cost(const PrefillTile& tile, const DeviceInfo& device, int64_t blocks,
                           double seen) {
  constexpr double kSmallRate = 0.94;  // throughput with 64 rows, relative to 128
  constexpr double kPartWave = 0.87;   // time of a wave that leaves room on the SMs

  const int per_sm = resident_blocks(tile, device);
  const int64_t slots = static_cast<int64_t>(device.sm_count) * per_sm;
  const double wave = per_sm * tile.rows / (tile.rows == kPrefillSmallRows ? kSmallRate : 1.0);
  const auto part = [&](int64_t count) {
    if (count == 0) return 0.0;
    return count > slots - device.sm_count || per_sm == 1 ? 1.0 : kPartWave;
  };
  // Blocks of equal length run in whole waves. Under the causal mask the longest run first and the
  // short ones fill the gaps: what counts is the sum, or the longest block.
  const double equal = static_cast<double>(blocks / slots) + part(blocks % slots);
  const double longest = per_sm == 1 ? 1.0 : kPartWave;
  const double graded = std::max(longest, seen * static_cast<double>(blocks) / slots);
  const double share = std::clamp(2.0 * seen - 1.0, 0.0, 1.0);
  return wave * (share * equal + (1.0 - share) * graded);
}

}  // namespace astrai::attention
