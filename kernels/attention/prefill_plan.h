// How launch_prefill cuts its work: row tiles, splits of the keys, workspace. Plain host code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/attention/variant.h"
#include "kernels/common/device.h"

namespace astrai::attention {

// A block owns `rows` packed query rows and walks over the keys, `keys` at a time, through one ring
// of slots that K and V tiles take in turn.
struct PrefillTile {
  int rows;
  int keys;
  int warps;
  int slots;
  int blocks_per_sm;  // that registers must allow
  HeadDims dims;
  int element_bytes;  // of K and V

  constexpr int threads() const { return warps * 32; }
  constexpr int warp_rows() const { return rows / warps; }
  constexpr int q_bytes() const { return rows * tile_row_bytes(dims.qk, 2); }
  // K rows are at least as long as V rows.
  constexpr int slot_bytes() const { return keys * tile_row_bytes(dims.qk, element_bytes); }
  constexpr int smem_bytes() const { return q_bytes() + slots * slot_bytes(); }  // dynamic
  // With the static part: what the block works on, where each thread's row of the mask is, and for
  // paged keys the addresses of a tile's rows of K and V.
  constexpr int all_smem_bytes(bool paged) const {
    return smem_bytes() + 256 + threads() * 4 + (paged ? keys * 16 + 128 : 0);
  }
};

inline constexpr int kPrefillLargeRows = 128;
inline constexpr int kPrefillSmallRows = 64;

// 32 rows per warp where the accumulators allow it: each K or V fragment read from shared memory
// then feeds two MMAs, without which shared-memory bandwidth is the limit.
constexpr PrefillTile prefill_tile(HeadDims dims, int rows, int element_bytes) {
  const auto tile = [=](int keys, int warps, int slots, int blocks_per_sm) {
    return PrefillTile{rows, keys, warps, slots, blocks_per_sm, dims, element_bytes};
  };
  if (rows == kPrefillLargeRows) {
    if (dims.qk == 64) return tile(96, 4, 3, 2);
    return dims.qk <= 128 ? tile(64, 4, 3, 2) : tile(64, 8, 3, 1);
  }
  // Tiles of e4m3 take half the memory: as many bytes in flight with one slot more.
  if (dims.qk <= 128) return tile(64, 4, element_bytes == 1 ? 4 : 3, 3);
  return tile(32, 4, 4, 2);
}

// Whether there are kernels with kPrefillLargeRows: not for e4m3, nor for the rarer head dims, each
// of which would cost every build half a minute.
constexpr bool has_large_prefill_tile(HeadDims dims, int element_bytes) {
  return element_bytes == 2 && (dims.qk == 64 || dims.qk == 128 || dims.qk == 256);
}

// Scalar prefill: one warp per packed query row.
inline constexpr int kScalarPrefillRows = 4;

// Most blocks that share the keys of a row tile.
inline constexpr int kMostPrefillSplits = 48;
// Fewer keys are not worth a split of their own.
inline constexpr int kLeastPrefillSplitKeys = 256;

struct PrefillPlan {
  Variant variant = Variant::kScalar;
  HeadDims dims = {0, 0};
  int tile_rows = 0;
  // Dense queries over contiguous keys.
  int row_tiles = 0;  // blocks per (request, kv head)
  int section = 0;    // pairs of these whose blocks run side by side, sharing the L2 cache
  // All others: see PackedQSchedule.
  bool use_map = false;
  int tiles_per_request = 0;
  int entries = 0;
  int blocks_per_entry = 0;
  // Blocks that share the keys of a row tile. How many of them really do follows from the length
  // when the kernel runs; with fixed_splits from it alone, and there are enough blocks for that.
  int splits = 1;
  bool fixed_splits = false;
  int slot_rows = 0;  // rows that a block may leave a partial result of
  int64_t blocks = 0;
  size_t workspace_bytes = 0;
};

// What tests and measurements force.
struct PrefillChoice {
  int tile_rows = 0;  // kPrefillLargeRows or kPrefillSmallRows
  int splits = 0;     // taken whatever the limit of the workspace
};

// The plan for arguments that why_not_implemented accepts, with none of batch and q_len 0.
// `map_size` is that of the work map, 0 = none. At most `workspace_limit` bytes are planned for,
// except for deterministic launches with as few queries as decode has, which take what they need.
PrefillPlan plan_prefill(const AttentionParams& params, int map_size, const DeviceInfo& device,
                         size_t workspace_limit, const PrefillChoice& choice = {});

// Launches with a plan made above, on plan.workspace_bytes of workspace.
cudaError_t launch_prefill(const AttentionParams& params, const QWorkMap& map,
                           const PrefillPlan& plan, void* workspace, cudaStream_t stream);

}  // namespace astrai::attention
