#include "kernels/attention/decode_plan.h"

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

// A unit that no pair has more than one of: pairs are not cut.
constexpr int kWholePair = std::numeric_limits<int32_t>::max();

// The kernel counts workers in 16 bits; beyond, they have several pairs each.
constexpr int kMostWholePairs = 65535;

// Pieces of a pair, each of which one block reads at the end.
constexpr int kMostPieces = 64;

DecodeTile tile_of(const AttentionParams& p) {
  const HeadDims dims = kernel_dims(p.head_dim, p.v_head_dim);
  return decode_tile(dims.qk, dims.v, static_cast<int>(size_of(p.kv_dtype)));
}

int64_t pairs_of(const AttentionParams& p) { return static_cast<int64_t>(p.batch) * p.kv_heads; }

// Units of all pairs if every request has all its keys.
int64_t most_units(const AttentionParams& p, int unit_keys) {
  return pairs_of(p) * std::max(1, div_up(p.kv_len, unit_keys));
}

// Units are 32-bit numbers below 2^31.
int fitting_unit(const AttentionParams& p, int unit_keys) {
  while (most_units(p, unit_keys) > std::numeric_limits<int32_t>::max()) unit_keys *= 2;
  return unit_keys;
}

// ---- Time, by which ways to cut the same problem are compared -----------------------------------
//
// The constants, in microseconds, were fitted to the times of //tools/bench:attention_plans on one
// H200 (driver 580, CUDA 13.0) on 2026-12-01. They only need to rank alternatives.

constexpr double kStart = 4.2;           // launch, first keys, end
constexpr double kStepPerDim = 0.00335;  // one step of a block over its tile, beside kStep
constexpr double kStep = 0.2;
constexpr double kSecondBlock = 1.45;  // duration of a step beside another block on the SM
constexpr double kBytes = 4.6e6;       // per microsecond, from memory
constexpr double kCachedBytes = 9e6;   // the same from the L2 cache, for up to kCacheSize
constexpr double kCacheSize = 40e6;
constexpr double kUneven = 0.32;     // cost of SMs with more bytes than others
constexpr double kScattered = 1.22;  // the same for clusters above 2, which leave SMs out
constexpr double kWarpMerge = 0.3;   // for each float4 of the result that a thread has
constexpr double kClusterMerge = 0.8;
constexpr double kClusterLevel = 0.1;  // each doubling of the cluster
constexpr double kPublish = 2.3;       // flags, fences
constexpr double kLoads = 0.55;        // of up to 8 partial results for each float4
constexpr double kNextPiece = 5.0;     // a worker's second piece, and the wait for its group

struct Shares {
  int64_t workers;  // clusters or blocks
  int cluster_log2;
  double longest;  // keys of the worker with most of them
  double pieces;   // of a pair
  bool straddles;  // some workers have pieces of two pairs
};

double decode_cost(const AttentionParams& p, const DecodeTile& tile, const Residency& residency,
                   const Shares& shares) {
  const int cluster = 1 << shares.cluster_log2;
  const double sms = std::max(1.0, residency.clusters[0] / double{kDecodeBlocksPerSm});
  const double blocks = static_cast<double>(shares.workers) * cluster;
  const double scattered = cluster > 2 ? kScattered : 1.0;
  const double most_per_sm = std::ceil(std::min(blocks, 2 * sms) * scattered / sms);
  const double rows = static_cast<double>(p.q_len) * (p.q_heads / p.kv_heads);
  const double items = std::ceil(rows * tile.v_dim / 4 / tile.threads());

  const double step = kStep + kStepPerDim * (tile.qk_dim + tile.v_dim) / 2;
  const double steps = std::ceil(shares.longest / (cluster * tile.keys()));
  const double computing = steps * step * (most_per_sm > 1 ? kSecondBlock : 1.0);
  const double bytes = static_cast<double>(pairs_of(p)) * p.kv_len * (p.head_dim + p.v_head_dim) *
                       static_cast<double>(size_of(p.kv_dtype));
  const double excess = blocks > sms ? std::max(0.0, most_per_sm * sms / blocks - 1.0) : 0.0;
  const double idle = std::max(1.0, 0.95 * sms / blocks);  // SMs without a block
  const double rate = bytes <= kCacheSize ? kCachedBytes : kBytes;
  const double reading = bytes / rate * scattered * idle * (1.0 + kUneven * excess);

  double time = kStart + kWarpMerge * items + std::max(computing, reading);
  if (cluster > 1) time += kClusterMerge + kClusterLevel * shares.cluster_log2;
  if (shares.pieces > 1.0) time += kPublish + kLoads * items * std::ceil(shares.pieces / 8);
  if (shares.straddles) time += kNextPiece;
  return time;
}

// More pairs than fit the device at a time, each whole: blocks follow each other.
double waves_cost(const AttentionParams& p, const DecodeTile& tile, const Residency& residency) {
  const int64_t pairs = pairs_of(p), resident = std::max(1, residency.clusters[0]);
  AttentionParams wave = p;
  const auto cost = [&](int64_t count) {
    wave.batch = 1;
    wave.kv_heads = static_cast<int>(std::min<int64_t>(count, resident));
    wave.q_heads = wave.kv_heads * (p.q_heads / p.kv_heads);
    return decode_cost(wave, tile, residency, {count, 0, double(p.kv_len), 1.0, false});
  };
  const int64_t rest = pairs % resident;
  const double first = cost(resident);
  const double next = first - 0.75 * kStart;  // starts while the block before it ends
  return first + next * (pairs / resident - 1) + (rest > 0 ? cost(rest) - 0.75 * kStart : 0.0);
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
  const int block = tile.smem_bytes() + tile.static_smem_bytes() + kReservedSmem;
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
  const size_t worker_bytes = split_workspace_bytes(2, kMmaRows, plan.dims.v);
  const int64_t paid = static_cast<int64_t>(workspace_limit / worker_bytes);

  // Every pair whole, in a block of its own.
  plan.unit_keys = kWholePair;
  plan.workers = static_cast<int>(std::min<int64_t>(pairs, kMostWholePairs));
  plan.blocks = plan.workers;
  const int64_t resident = residency.clusters[0];
  double best = pairs > resident
                    ? waves_cost(p, tile, residency)
                    : decode_cost(p, tile, residency, {pairs, 0, double(p.kv_len), 1.0, false});
  if (forced_workers > 0) best = std::numeric_limits<double>::infinity();

  const auto consider = [&](int log2, int64_t workers) {
    const int unit_keys = fitting_unit(p, tile.keys() << log2);
    const int64_t units = most_units(p, unit_keys);
    const bool cut = workers != pairs;
    if (cut && (units == pairs || workers > units || workers > paid)) return;
    const double pieces = static_cast<double>(workers) / static_cast<double>(pairs);
    const bool even = workers % pairs == 0;
    const double cost = decode_cost(
        p, tile, residency,
        {workers, log2, p.kv_len / pieces, even ? pieces : std::max(2.0, pieces + 1.0), !even});
    if (cost >= best) return;
    best = cost;
    plan.cluster_blocks = 1 << log2;
    plan.unit_keys = cut ? unit_keys : kWholePair;
    plan.workers = static_cast<int>(workers);
    plan.blocks = workers << log2;
    plan.workspace_bytes = cut ? static_cast<size_t>(workers) * worker_bytes : 0;
  };
  for (int log2 = 0; log2 < kClusterSizes; ++log2) {
    const int64_t most = std::min(residency.clusters[log2], kMostWorkers);
    // A cluster is one worker's: its blocks need keys of their own.
    if (log2 > 0 && (most < pairs || (tile.keys() << (log2 - 1)) >= p.kv_len)) continue;
    if (forced_workers > 0) {
      const int64_t units = most_units(p, fitting_unit(p, tile.keys() << log2));
      if (most > 0) {
        best = std::numeric_limits<double>::infinity();
        consider(log2, std::min({int64_t{forced_workers}, int64_t{kMostWorkers}, units, paid}));
      }
      continue;
    }
    for (int64_t each = 1; each <= kMostPieces && each * pairs <= most; ++each) {
      consider(log2, each * pairs);
    }
    consider(log2, std::min(most, pairs * kMostPieces));
  }
  return plan;
}

size_t decode_workspace_bytes(const AttentionParams& p, int sm_count) {
  if (p.batch <= 0 || p.kv_heads <= 0 || p.q_heads <= 0 || p.kv_len <= 0 ||
      !supports_head_dims(p.head_dim, p.v_head_dim)) {
    return 0;
  }
  if (!fits_decode(p)) return prefill_workspace_bytes(p, sm_count);
  if (p.deterministic) return plan_decode(p, Residency(), 0).workspace_bytes;
  if (choose_variant(p) == Variant::kScalar) return 0;
  // As many workers as any plan has: the launch sees how many the device holds.
  const DecodeTile tile = tile_of(p);
  const int64_t units = most_units(p, fitting_unit(p, tile.keys()));
  if (units == pairs_of(p)) return 0;
  const int64_t workers = std::min({int64_t{sm_count} * kDecodeBlocksPerSm,
                                    pairs_of(p) * kMostPieces, units, int64_t{kMostWorkers}});
  return static_cast<size_t>(workers) * split_workspace_bytes(2, kMmaRows, tile.v_dim);
}

}  // namespace astrai::attention
