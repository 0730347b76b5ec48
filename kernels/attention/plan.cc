#include "kernels/attention/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/attention/cost_model.h"

namespace astrai::attention {
namespace {

#ifdef ASTRAI_NO_MMA
constexpr bool kHaveMma = false;
#else
constexpr bool kHaveMma = true;
#endif

constexpr int64_t kMaxGridX = std::numeric_limits<int32_t>::max();
constexpr int kMaxSplits = 256;

template <typename T>
constexpr T div_up(T a, T b) {
  return (a + b - 1) / b;
}

// True if every row of 16-bit elements starts at a multiple of 16 bytes. Dimensions of size 1 may
// have any stride: it is never multiplied by anything but 0.
bool is_aligned(const void* data, int64_t batch, int64_t seq, int64_t heads, int64_t batch_stride,
                int64_t seq_stride, int64_t head_stride) {
  constexpr int kElements = 8;
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
         (batch == 1 || batch_stride % kElements == 0) &&
         (seq == 1 || seq_stride % kElements == 0) && (heads == 1 || head_stride % kElements == 0);
}

Variant choose_variant(const DenseParams& p) {
  return kHaveMma && rows_are_aligned(p) ? Variant::kMma : Variant::kScalar;
}

// Keys that a query row sees on average, relative to kv_len; a mask is not looked at.
double share_of_keys_seen(const DenseParams& p) {
  if (!p.causal || p.kv_len == 0) return 1.0;
  const double q = p.q_len, kv = p.kv_len;
  return kv >= q ? 1.0 - (q - 1.0) / (2.0 * kv) : (kv + 1.0) / (2.0 * q);
}

// Everything but the pointers: null if the kernels can compute such a problem, else the reason.
const char* why_not_this_shape(const DenseParams& p) {
  if (p.dtype != DType::kBF16 && p.dtype != DType::kFP16) {
    return "dtype must be bfloat16 or float16";
  }
  if (!supports_head_dim(p.head_dim)) return "head_dim must be 64, 128 or 256";
  if (p.batch < 0 || p.q_len < 0 || p.kv_len < 0) return "sizes must not be negative";
  if (p.kv_heads <= 0 || p.q_heads <= 0) return "q_heads and kv_heads must be positive";
  if (p.q_heads % p.kv_heads != 0) return "q_heads must be a multiple of kv_heads";
  if (p.q_heads / p.kv_heads > kMaxGroup) return "q_heads / kv_heads must be at most 64";
  if (!std::isfinite(p.scale)) return "scale must be finite";
  // Positions and packed rows are held in 32 bits inside the kernels, block indices in 31.
  const int64_t rows = static_cast<int64_t>(p.q_len) * (p.q_heads / p.kv_heads);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1024;
  if (rows > kMost || p.kv_len > kMost) {
    return "q_len * q_heads / kv_heads and kv_len must be below 2^31 - 1024";
  }
  const double blocks = static_cast<double>(p.batch) * p.kv_heads * static_cast<double>(rows);
  if (blocks > static_cast<double>(kMaxGridX)) {
    return "batch * q_len * q_heads must be below 2^31";
  }
  return nullptr;
}

}  // namespace

bool supports_head_dim(int head_dim) {
  return head_dim == 64 || head_dim == 128 || head_dim == 256;
}

const char* why_not_implemented(const DenseParams& p) {
  const char* reason = why_not_this_shape(p);
  if (reason != nullptr || p.batch == 0 || p.q_len == 0) return reason;
  if (p.q.data == nullptr || p.out == nullptr) return "q and out must not be null";
  if (p.kv_len > 0 && (p.k.data == nullptr || p.v.data == nullptr)) {
    return "k and v must not be null";
  }
  return nullptr;
}

bool rows_are_aligned(const DenseParams& p) {
  const auto operand = [&p](const Operand& o, int seq, int heads) {
    return is_aligned(o.data, p.batch, seq, heads, o.batch_stride, o.seq_stride, o.head_stride);
  };
  return operand(p.q, p.q_len, p.q_heads) && operand(p.k, p.kv_len, p.kv_heads) &&
         operand(p.v, p.kv_len, p.kv_heads) &&
         is_aligned(p.out, p.batch, p.q_len, p.q_heads, p.out_batch_stride, p.out_seq_stride,
                    p.out_head_stride);
}

DecodePlan plan_decode(const DenseParams& p, const DeviceInfo& device, size_t workspace_limit,
                       int forced_splits) {
  DecodePlan plan;
  plan.variant = choose_variant(p);
  if (plan.variant == Variant::kScalar) {
    plan.split_keys = p.kv_len;
    plan.blocks = static_cast<int64_t>(p.batch) * p.q_heads;
    return plan;
  }
  const DecodeTile tile = decode_tile(p.head_dim);
  const int64_t rows = static_cast<int64_t>(p.batch) * p.q_heads;
  plan.passes = div_up(p.q_heads / p.kv_heads, kMmaRows);
  const int64_t unsplit = static_cast<int64_t>(p.batch) * p.kv_heads * plan.passes;
  const int tiles = std::max(1, div_up(p.kv_len, tile.keys()));

  if (forced_splits > 0) {
    plan.splits = forced_splits;
  } else {
    const int per_sm = std::max(1, device.smem_per_sm / (tile.smem_bytes() + kReservedSmem));
    const DecodeCost cost = {p.head_dim, tiles, unsplit, rows, device.sm_count, per_sm};
    // More than two waves never win, and would let the workspace grow.
    const int64_t most_blocks = int64_t{2} * device.sm_count * per_sm;
    const size_t bytes_per_split = decode_partials_bytes(rows, 2, p.head_dim) / 2;
    const int most =
        static_cast<int>(std::min({int64_t{tiles}, int64_t{kMaxSplits}, most_blocks / unsplit,
                                   static_cast<int64_t>(workspace_limit / bytes_per_split)}));
    double best = cost.stream(1);
    for (int splits = 2; splits <= most; ++splits) {
      const double combine = cost.combine(splits);
      if (combine >= best) break;
      // With as many tiles in the longest split, fewer splits might do.
      if (div_up(tiles, div_up(tiles, splits)) != splits) continue;
      const double total = cost.stream(splits) + combine;
      if (total < best) {
        best = total;
        plan.splits = splits;
      }
    }
  }
  plan.split_keys = div_up(tiles, plan.splits) * tile.keys();
  plan.blocks = unsplit * plan.splits;
  plan.workspace_bytes = decode_partials_bytes(rows, plan.splits, p.head_dim);
  return plan;
}

size_t decode_workspace_bytes(const DenseParams& p, int sm_count) {
  if (p.batch == 0 || p.kv_len == 0 || why_not_this_shape(p) != nullptr) return 0;
  // The launch sees how many blocks an SM holds; here both possibilities are allowed for.
  const int block = decode_tile(p.head_dim).smem_bytes() + kReservedSmem;
  size_t bytes = 0;
  for (int per_sm = 1; per_sm <= 2; ++per_sm) {
    const DeviceInfo device = {sm_count, block, per_sm * block};
    const DecodePlan plan = plan_decode(p, device, std::numeric_limits<size_t>::max());
    bytes = std::max(bytes, plan.workspace_bytes);
  }
  return bytes;
}

PrefillPlan plan_prefill(const DenseParams& p, const DeviceInfo& device, int forced_rows) {
  PrefillPlan plan;
  plan.variant = choose_variant(p);
  const int64_t pairs = static_cast<int64_t>(p.batch) * p.kv_heads;
  const int64_t rows = static_cast<int64_t>(p.q_len) * (p.q_heads / p.kv_heads);
  if (plan.variant == Variant::kScalar) {
    plan.tile_rows = kScalarPrefillRows;
  } else if (forced_rows > 0) {
    plan.tile_rows = forced_rows;
  } else {
    // Large tiles read K and V half as often; small ones fill the GPU where large ones would leave
    // SMs with one block or none.
    const PrefillTile large = prefill_tile(p.head_dim, kPrefillLargeRows);
    const auto cost = [&](const PrefillTile& tile) {
      return prefill_cost(tile, device, pairs * div_up<int64_t>(rows, tile.rows),
                          share_of_keys_seen(p));
    };
    const bool fits = large.all_smem_bytes() <= device.smem_per_block;
    plan.tile_rows = fits && cost(large) <= cost(prefill_tile(p.head_dim, kPrefillSmallRows))
                         ? kPrefillLargeRows
                         : kPrefillSmallRows;
  }
  plan.row_tiles = div_up<int64_t>(rows, plan.tile_rows);
  plan.blocks = pairs * plan.row_tiles;
  // As many (batch, kv head) pairs side by side as keep their K and V in half of a 50 MB L2 cache.
  constexpr int64_t kSectionBytes = 24 << 20;
  const int64_t pair_bytes =
      std::max<int64_t>(1, static_cast<int64_t>(p.kv_len) * p.head_dim * 2 * 2);
  plan.section = std::clamp<int64_t>(kSectionBytes / pair_bytes, 1, pairs);
  return plan;
}

}  // namespace astrai::attention
