// Which attention kernel runs, on which tiles, and how the work is cut: plain host code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/common/device.h"

namespace astrai::attention {

enum class Variant {
  kMma,     // tensor cores; rows of q, k, v and out are 16-byte aligned
  kScalar,  // any alignment; the only variant in builds with -DASTRAI_NO_MMA
};

// ---- Tiles of the MMA kernels ------------------------------------------------------------------

inline constexpr int kMmaRows = 16;  // query heads (decode) or rows of one m block (prefill)

// Decode: each warp streams slices of 16 keys through rings of its own.
struct DecodeTile {
  int warps;
  int slots;  // slices that each of a warp's two rings (K and V) holds
  int head_dim;

  static constexpr int kSliceKeys = 16;
  constexpr int keys() const { return warps * kSliceKeys; }  // of one step of the whole block
  constexpr int slice_bytes() const { return kSliceKeys * head_dim * 2; }
  constexpr int smem_bytes() const { return warps * 2 * slots * slice_bytes(); }
};

// 96 KB of rings whatever the head dim: two blocks on an SM of 228 KB, one where 99 KB is the
// limit.
constexpr DecodeTile decode_tile(int head_dim) {
  if (head_dim == 64) return {4, 6, 64};
  if (head_dim == 128) return {4, 3, 128};
  return {2, 3, 256};
}

// Prefill: a block owns `rows` packed query rows and walks over the keys, `keys` at a time, through
// one ring of slots that K and V tiles take in turn.
struct PrefillTile {
  int rows;
  int keys;
  int warps;
  int slots;
  int blocks_per_sm;  // that registers must allow
  int head_dim;

  constexpr int threads() const { return warps * 32; }
  constexpr int warp_rows() const { return rows / warps; }
  constexpr int q_bytes() const { return rows * head_dim * 2; }
  constexpr int slot_bytes() const { return keys * head_dim * 2; }
  constexpr int smem_bytes() const { return q_bytes() + slots * slot_bytes(); }  // dynamic
  // With the static part, each thread's pointer into the mask.
  constexpr int all_smem_bytes() const { return smem_bytes() + threads() * 8; }
};

inline constexpr int kPrefillLargeRows = 128;
inline constexpr int kPrefillSmallRows = 64;

// 32 rows per warp where the accumulators allow it: each K or V fragment read from shared memory
// then feeds two MMAs, without which shared-memory bandwidth is the limit.
constexpr PrefillTile prefill_tile(int head_dim, int rows) {
  const bool large = rows == kPrefillLargeRows;
  if (head_dim == 64) return {rows, large ? 96 : 64, 4, 3, large ? 2 : 3, 64};
  if (head_dim == 128) return {rows, 64, 4, 3, large ? 2 : 3, 128};
  if (large) return {rows, 64, 8, 3, 1, 256};
  return {rows, 32, 4, 4, 2, 256};
}

// Scalar prefill: one warp per packed query row.
inline constexpr int kScalarPrefillRows = 4;

// ---- Plans --------------------------------------------------------------------------------------

struct DecodePlan {
  Variant variant = Variant::kScalar;
  int passes = 1;      // blocks over which the query heads of one kv head are spread, 16 heads each
  int splits = 1;      // blocks over which the keys are spread
  int split_keys = 0;  // keys per split; the last one takes what is left, later ones are empty
  int64_t blocks = 0;
  size_t workspace_bytes = 0;  // partial outputs and (max, sum) pairs; 0 if splits == 1
};

struct PrefillPlan {
  Variant variant = Variant::kScalar;
  int tile_rows = 0;
  int64_t row_tiles = 0;  // blocks per (batch, kv head)
  int64_t section =
      0;               // (batch, kv head) pairs whose blocks run side by side, sharing the L2 cache
  int64_t blocks = 0;  // row_tiles * batch * kv_heads
};

// The alignment that the MMA kernels need: 16 bytes for every row of q, k, v and out.
bool rows_are_aligned(const DenseParams& params);

// Plans for arguments that why_not_implemented accepts, with none of batch and q_len 0.
// At most `workspace_limit` bytes are planned for. `forced_splits` > 0 (for tests) is taken as it
// is.
DecodePlan plan_decode(const DenseParams& params, const DeviceInfo& device, size_t workspace_limit,
                       int forced_splits = 0);

// `forced_rows` (for tests and measurements): kPrefillLargeRows or kPrefillSmallRows.
PrefillPlan plan_prefill(const DenseParams& params, const DeviceInfo& device, int forced_rows = 0);

// Bytes of workspace for `rows` query rows (batch * q_heads) and `splits` splits.
constexpr size_t decode_partials_bytes(int64_t rows, int splits, int head_dim) {
  return splits == 1 ? 0 : static_cast<size_t>(rows) * splits * (head_dim + 2) * sizeof(float);
}

// Launches with a plan made above. launch_decode needs plan.workspace_bytes of workspace.
cudaError_t launch_decode(const DenseParams& params, const DecodePlan& plan, void* workspace,
                          cudaStream_t stream);
cudaError_t launch_prefill(const DenseParams& params, const PrefillPlan& plan, cudaStream_t stream);

}  // namespace astrai::attention
