#include "kernels/attention/prefill_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/attention/split_merge.cuh"
#include "kernels/attention/work_split.cuh"

namespace astrai::attention {
namespace {

template <typename T>
constexpr T div_up(T a, T b) {
  return a / b + (a % b != 0);
}

int group_of(const AttentionParams& p) { return p.q_heads / p.kv_heads; }

bool is_packed(const AttentionParams& p) {
  return p.qo_indptr != nullptr || p.pages.entries != nullptr;
}

// ---- Time, by which tiles and splits of the same problem are compared ---------------------------
//
// The constants were fitted to times measured on one H200 (132 SMs, driver 580, CUDA 13.0) on
// 2026-12-01 by //tools/bench:attention_plans (figures in README.md). They only need to rank
// alternatives.

constexpr double kSmFlops = 2.57e6;  // per microsecond, of one SM
constexpr double kSmallRate = 0.94;  // throughput with small tiles, relative to large ones
constexpr double kLatency = 0.3;  // share of a wave's time that fewer blocks on an SM do not save
constexpr double kMerge = 3.6;    // microseconds, whatever is merged
constexpr double kLoads = 0.26;   // of up to 8 partial results for each float4 of a thread

// What time depends on beside the tile.
struct Load {
  const AttentionParams& p;
  const DeviceInfo& device;
  double seen;      // keys that a row sees on average, relative to kv_len
  int largest_row;  // rows of a request
};

// Blocks of a tile that an SM holds at a time.
int resident_blocks(const PrefillTile& tile, bool paged, const DeviceInfo& device) {
  return std::clamp(device.smem_per_sm / (tile.all_smem_bytes(paged) + kReservedSmem), 1,
                    tile.blocks_per_sm);
}

int64_t resident_slots(const PrefillTile& tile, const Load& load) {
  return int64_t{load.device.sm_count} *
         resident_blocks(tile, load.p.pages.entries != nullptr, load.device);
}

// Keys that a query row sees on average, relative to kv_len; a mask is not looked at.
double share_of_keys_seen(const AttentionParams& p) {
  if (p.kv_len == 0) return 1.0;
  const double q = p.q_len, kv = p.kv_len;
  double seen = 1.0;
  if (p.causal || p.window_right >= 0) {
    seen = kv >= q ? 1.0 - (q - 1.0) / (2.0 * kv) : (kv + 1.0) / (2.0 * q);
  }
  if (p.window_left >= 0) {
    const double right = p.causal ? 0.0 : p.window_right >= 0 ? p.window_right : kv;
    seen = std::min(seen, (p.window_left + 1.0 + right) / kv);
  }
  return seen;
}

// Time of `blocks` tiles over all the keys that they see, in units of one row against kv_len keys
// at the full rate of an SM.
double waves_cost(const PrefillTile& tile, const Load& load, int64_t blocks) {
  const int64_t slots = resident_slots(tile, load);
  const int per_sm = static_cast<int>(slots / load.device.sm_count);
  const double wave = per_sm * tile.rows / (tile.rows == kPrefillSmallRows ? kSmallRate : 1.0);
  const auto part = [&](int64_t count) {
    if (count == 0) return 0.0;
    if (per_sm == 1) return 1.0;
    const int64_t on_sm = div_up<int64_t>(count, load.device.sm_count);
    return kLatency + (1.0 - kLatency) * std::pow(static_cast<double>(on_sm) / per_sm, 1.4);
  };
  // Blocks of equal length run in whole waves. Under the causal mask the longest run first and the
  // short ones fill the gaps: what counts is the sum, or the longest block, which has the SM to
  // itself in the end.
  const double equal = static_cast<double>(blocks / slots) + part(blocks % slots);
  const double longest =
      0.5 * (part(std::min(blocks, slots)) + part(std::min<int64_t>(blocks, load.device.sm_count)));
  const double graded = std::max(longest, load.seen * static_cast<double>(blocks) / slots);
  const double share = std::clamp(2.0 * load.seen - 1.0, 0.0, 1.0);
  return wave * (share * equal + (1.0 - share) * graded);
}

// Microseconds.
double prefill_cost(const PrefillTile& tile, const Load& load, int64_t blocks, int splits) {
  const AttentionParams& p = load.p;
  const double unit = 2.0 * (tile.dims.qk + tile.dims.v) * std::max(1, p.kv_len) / kSmFlops;
  const double stream = unit * waves_cost(tile, load, blocks * splits) / splits;
  if (splits == 1) return stream;
  const double rows = std::min(tile.rows, load.largest_row);
  const double items = std::ceil(rows * tile.dims.v / 4 / tile.threads());
  return stream + kMerge + kLoads * items * div_up(splits, 8);
}

// ---- Plans --------------------------------------------------------------------------------------

// Lays out the row tiles: everything of the plan that follows from tile_rows.
PrefillPlan with_tiles(const AttentionParams& p, PrefillPlan plan, int map_size, int tile_rows) {
  plan.tile_rows = tile_rows;
  const int64_t rows = int64_t{p.q_len} * group_of(p);
  plan.slot_rows = static_cast<int>(std::min<int64_t>(tile_rows, div_up<int64_t>(rows, 2) * 2));
  if (!is_packed(p)) {
    const int64_t pairs = int64_t{p.batch} * p.kv_heads;
    plan.row_tiles = static_cast<int>(div_up<int64_t>(rows, tile_rows));
    plan.blocks = pairs * plan.row_tiles;
    // As many pairs side by side as keep their K and V in half of a 50 MB L2 cache.
    constexpr int64_t kSectionBytes = 24 << 20;
    const int64_t pair_bytes = std::max<int64_t>(
        1, int64_t{p.kv_len} * (p.head_dim + p.v_head_dim) * static_cast<int>(size_of(p.kv_dtype)));
    plan.section = static_cast<int>(std::clamp<int64_t>(kSectionBytes / pair_bytes, 1, pairs));
    return plan;
  }
  plan.use_map = map_size > 0 && p.q_len > kQMapRows;
  plan.tiles_per_request = div_up(p.q_len, kQMapRows);
  const int64_t entries = plan.use_map ? map_size : int64_t{p.batch} * plan.tiles_per_request;
  const int entry_rows = std::min(p.q_len, kQMapRows) * group_of(p);
  plan.blocks_per_entry = div_up(entry_rows, tile_rows);
  plan.blocks = entries * plan.blocks_per_entry * p.kv_heads;
  // Entries that do not fit 32 bits are more blocks than a launch may have.
  plan.entries = static_cast<int>(std::min<int64_t>(entries, std::numeric_limits<int32_t>::max()));
  return plan;
}

PrefillPlan with_splits(PrefillPlan plan, int splits) {
  plan.splits = splits;
  plan.blocks *= splits;
  if (splits > 1) {
    plan.workspace_bytes = split_workspace_bytes(plan.blocks, plan.slot_rows, plan.dims.v);
  }
  return plan;
}

// Splits that follow from a row's own length, and rows of a size that no other request changes.
PrefillPlan plan_deterministic(const AttentionParams& p, PrefillPlan plan, int map_size) {
  plan = with_tiles(p, plan, map_size, kPrefillSmallRows);
  if (p.q_len > kMaxDecodeQueries) return plan;
  const int keys =
      prefill_tile(plan.dims, kPrefillSmallRows, static_cast<int>(size_of(p.kv_dtype))).keys;
  plan.fixed_splits = true;
  return with_splits(plan, most_fixed_splits(div_up(p.kv_len, keys) * keys));
}

// Whether a launch without qo_indptr is planned for at its exact size: others may have any map.
int64_t planned_entries(const AttentionParams& p) {
  if (p.q_len <= kQMapRows || p.qo_indptr == nullptr) return 0;
  return std::max<int64_t>(1, p.total_q / kQMapRows);
}

}  // namespace

PrefillPlan plan_prefill(const AttentionParams& p, int map_size, const DeviceInfo& device,
                         size_t workspace_limit, const PrefillChoice& choice) {
  PrefillPlan plan;
  plan.variant = choose_variant(p);
  plan.dims = kernel_dims(p.head_dim, p.v_head_dim);
  if (plan.variant == Variant::kScalar) return with_tiles(p, plan, map_size, kScalarPrefillRows);
  if (p.deterministic) return plan_deterministic(p, plan, map_size);

  const int64_t rows = int64_t{p.q_len} * group_of(p);
  const Load load = {p, device, share_of_keys_seen(p),
                     static_cast<int>(std::min<int64_t>(rows, kPrefillLargeRows))};
  const int element_bytes = static_cast<int>(size_of(p.kv_dtype));
  const bool paged = p.pages.entries != nullptr;
  const int64_t most_by_keys =
      std::max<int64_t>(1, static_cast<int64_t>(p.kv_len * load.seen) / kLeastPrefillSplitKeys);
  double best = std::numeric_limits<double>::infinity();
  PrefillPlan chosen;
  for (const int tile_rows : {kPrefillLargeRows, kPrefillSmallRows}) {
    const PrefillTile tile = prefill_tile(plan.dims, tile_rows, element_bytes);
    if (tile_rows == kPrefillLargeRows) {
      // Large tiles read K and V half as often; small ones fill the GPU where large ones would
      // leave SMs with one block or none.
      if (!has_large_prefill_tile(plan.dims, element_bytes)) continue;
      if (tile.all_smem_bytes(paged) > device.smem_per_block) continue;
    }
    if (choice.tile_rows != 0 && choice.tile_rows != tile_rows) continue;
    const PrefillPlan whole = with_tiles(p, plan, map_size, tile_rows);
    if (choice.splits > 0) return with_splits(whole, choice.splits);
    // One wave of blocks: more would wait for others, and let the workspace grow.
    const int64_t most = std::min<int64_t>(
        {resident_slots(tile, load) / whole.blocks, most_by_keys, int64_t{kMostPrefillSplits}});
    for (int splits = 1; splits <= std::max<int64_t>(1, most); ++splits) {
      const PrefillPlan split = with_splits(whole, splits);
      if (split.workspace_bytes > workspace_limit) break;
      const double cost = prefill_cost(tile, load, whole.blocks, splits);
      if (cost < best) {
        best = cost;
        chosen = split;
      }
    }
  }
  return chosen;
}

size_t prefill_workspace_bytes(const AttentionParams& p, int sm_count) {
  if (p.batch <= 0 || p.q_len <= 0 || p.kv_heads <= 0 || p.q_heads < p.kv_heads || p.kv_len <= 0 ||
      !supports_head_dims(p.head_dim, p.v_head_dim)) {
    return 0;
  }
  // The launch sees how much shared memory an SM has, and how large the map is; here all is allowed
  // for.
  size_t bytes = 0;
  for (const int kilobytes : {100, 164, 228}) {
    const DeviceInfo device = {sm_count, (kilobytes - 1) << 10, kilobytes << 10};
    const PrefillPlan plan = plan_prefill(p, static_cast<int>(planned_entries(p)), device,
                                          std::numeric_limits<size_t>::max());
    bytes = std::max(bytes, plan.workspace_bytes);
  }
  return bytes;
}

}  // namespace astrai::attention
