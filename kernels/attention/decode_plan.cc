#include "kernels/attention/decode_plan.h"

#include <algorithm>
#include <limits>

#include "kernels/attention/split_merge.cuh"
#include "kernels/attention/work_split.cuh"

namespace astrai::attention {
namespace {

template <typename T>
constexpr T div_up(T a, T b) {
  return a / b + (a % b != 0);
}

// A unit that no pair has more than one of: pairs are not cut.
constexpr int kWholePair = std::numeric_limits<int32_t>::max();

// Parts that one block merges at the end without taking longer than it saves: a part is up to 16
// rows of fp32, which a block reads at about 60 bytes per nanosecond.
constexpr int kMostPieces = 64;

// Units of a cluster that are worth a second merge, of clusters, after the one within a cluster: a
// unit is 64 keys for each block, about 0.5 us.
constexpr int kLeastClusterUnits = 4;

DecodeTile tile_of(const AttentionParams& p) {
  const HeadDims dims = kernel_dims(p.head_dim, p.v_head_dim);
  return decode_tile(dims.qk, dims.v, static_cast<int>(size_of(p.kv_dtype)));
}

int64_t pairs_of(const AttentionParams& p) { return static_cast<int64_t>(p.batch) * p.kv_heads; }

// Units of all pairs if every request has all its keys.
int64_t most_units(const AttentionParams& p, int unit_keys) {
  return pairs_of(p) * std::max(1, div_up(p.kv_len, unit_keys));
}

// The largest cluster with which every pair has one of its own on the device at the same time:
// then few pairs have many SMs each, and merging within the cluster costs least. Not larger than
// what the keys of a pair fill.
int choose_cluster(const AttentionParams& p, const DecodeTile& tile, const Residency& residency) {
  for (int log2 = 3; log2 > 0; --log2) {
    const int blocks = 1 << log2;
    if (pairs_of(p) <= residency.clusters[log2] && (blocks / 2) * tile.keys() < p.kv_len) {
      return log2;
    }
  }
  return 0;
}

// Units are 32-bit numbers below 2^31.
int fitting_unit(const AttentionParams& p, int unit_keys) {
  while (most_units(p, unit_keys) > std::numeric_limits<int32_t>::max()) unit_keys *= 2;
  return unit_keys;
}

DecodePlan plan_deterministic(const AttentionParams& p, DecodePlan plan) {
  plan.fixed_splits = most_fixed_splits(p.kv_len);
  plan.unit_keys = kWholePair;
  const int64_t workers = pairs_of(p) * plan.fixed_splits;
  plan.blocks = workers;
  if (plan.fixed_splits > 1) {
    plan.workspace_bytes = split_workspace_bytes(workers, kMmaRows, plan.dims.v);
  }
  return plan;
}

}  // namespace

int resident_decode_blocks(const DecodeTile& tile, const DeviceInfo& device) {
  const int block = tile.smem_bytes() + kDecodeStaticSmem + kReservedSmem;
  return device.sm_count * std::clamp(device.smem_per_sm / block, 1, kDecodeBlocksPerSm);
}

DecodePlan plan_decode(const AttentionParams& p, const Residency& residency, size_t workspace_limit,
                       int forced_workers) {
  DecodePlan plan;
  plan.variant = choose_variant(p);
  plan.dims = kernel_dims(p.head_dim, p.v_head_dim);
  if (plan.variant == Variant::kScalar) {
    plan.blocks = static_cast<int64_t>(p.batch) * p.q_len * p.q_heads;
    return plan;
  }
  if (p.deterministic) return plan_deterministic(p, plan);

  const DecodeTile tile = tile_of(p);
  const int64_t pairs = pairs_of(p);
  const int log2 = choose_cluster(p, tile, residency);
  plan.cluster_blocks = 1 << log2;
  plan.unit_keys = fitting_unit(p, plan.cluster_blocks * tile.keys());
  plan.least_units = log2 > 0 ? kLeastClusterUnits : 1;

  const int64_t units = most_units(p, plan.unit_keys);
  int64_t workers = std::min(
      {int64_t{residency.clusters[log2]}, pairs * kMostPieces, units, int64_t{kMostWorkers}});
  if (forced_workers > 0) {
    workers = std::min(forced_workers, kMostWorkers);
    plan.least_units = 1;
  } else {
    workers = used_workers(static_cast<uint32_t>(units), static_cast<uint32_t>(workers),
                           static_cast<uint32_t>(pairs), static_cast<uint32_t>(plan.least_units));
  }
  const size_t worker_bytes = split_workspace_bytes(2, kMmaRows, plan.dims.v);
  const int64_t paid = static_cast<int64_t>(workspace_limit / worker_bytes);
  if (units == pairs || (paid < workers && paid <= pairs)) {
    // Nothing to cut, or too little room to cut with.
    plan.unit_keys = kWholePair;
    plan.least_units = 1;
    workers = pairs;
  } else {
    workers = std::min(workers, paid);
    plan.workspace_bytes = static_cast<size_t>(workers) * worker_bytes;
  }
  plan.workers = static_cast<int>(std::min(workers, int64_t{65535}));
  plan.blocks = int64_t{plan.workers} * plan.cluster_blocks;
  return plan;
}

size_t decode_workspace_bytes(const AttentionParams& p, int sm_count) {
  if (p.batch <= 0 || p.kv_heads <= 0 || p.q_heads <= 0 || p.kv_len <= 0 ||
      !supports_head_dims(p.head_dim, p.v_head_dim)) {
    return 0;
  }
  if (!fits_decode(p)) return prefill_workspace_bytes(p, sm_count);
  // As many workers as any way to place them: the launch sees which one the device has.
  Residency residency;
  residency.clusters[0] = sm_count * kDecodeBlocksPerSm;
  return plan_decode(p, residency, std::numeric_limits<size_t>::max()).workspace_bytes;
}

}  // namespace astrai::attention
