// Host-side choices of a quantisation: what it can take, tiles, and width of accesses.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/fp8/formats.h"
#include "kernels/fp8/quantize.h"

namespace astrai::fp8 {

constexpr int kTileColumns = 128;
constexpr int kQuantizeThreads = 256;
constexpr int kThreadColumns = 16;  // of a thread: one 16-byte store
constexpr int kRowThreads = kQuantizeThreads * kThreadColumns / kTileColumns;  // threads over rows

// A tile is kRowThreads * thread_rows rows of one batch element and 128 columns.
struct QuantizePlan {
  int thread_rows = 4;    // 4, or 1 for more blocks where the tile need not be square
  bool wide_in = false;   // 16-byte loads of whole groups of 16 columns
  bool wide_out = false;  // 16-byte stores
  bool wide_transposed = false;
  int64_t row_tiles = 0;  // of a batch element
  int64_t column_tiles = 0;
  int64_t tiles = 0;             // blocks
  int64_t last_row_columns = 0;  // columns of the last row; fewer only where a flat x was cut up
};

// Word of the tile that holds 4 rows (number `quad`) of a column. A warp that writes (8 groups of
// 16 columns, 4 quads) and 8 lanes that read 16 bytes each both meet every bank once.
ASTRAI_FP8_HOST_DEVICE constexpr int transposed_word(int column, int quad) {
  return column * (kTileColumns / 4) + (quad ^ ((column / kThreadColumns) << 2));
}

namespace plan_detail {

constexpr int64_t kMaxGridX = 2147483647;
constexpr int64_t kTilesPerSm = 4;  // fewer tiles of 128 rows than this for an SM: tiles of 32

inline bool is_aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}
inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

inline bool is_dense(const QuantizeParams& p) {
  return (p.columns == 1 || p.column_stride == 1) && (p.rows == 1 || p.row_stride == p.columns) &&
         (p.batch == 1 || p.batch_stride == p.rows * p.columns);
}

inline bool one_scale(const QuantizeParams& p) {
  return p.scaling == Scaling::kMultiplier || p.scaling == Scaling::kStep ||
         p.scaling == Scaling::kDynamic;
}

// x as rows of 128 columns where nothing depends on its shape, so that narrow tensors fill tiles.
inline QuantizeParams flatten(QuantizeParams p, int64_t* last_row_columns) {
  *last_row_columns = p.columns;
  if (!one_scale(p) || p.out_transposed != nullptr || !is_dense(p)) return p;
  const int64_t elements = p.batch * p.rows * p.columns;
  p.batch = 1;
  p.rows = ceil_div(elements, kTileColumns);
  p.columns = p.row_stride = kTileColumns;
  p.column_stride = 1;
  p.batch_stride = 0;
  *last_row_columns = elements - (p.rows - 1) * kTileColumns;
  return p;
}

inline bool multiplies(int64_t a, int64_t b, int64_t* product) {
  return !__builtin_mul_overflow(a, b, product);
}

}  // namespace plan_detail

inline bool is_empty(const QuantizeParams& p) {
  return p.batch == 0 || p.rows == 0 || p.columns == 0;
}

inline bool can_implement(const QuantizeParams& p) {
  using namespace plan_detail;
  if (p.in_type != DType::kBF16 && p.in_type != DType::kFP16 && p.in_type != DType::kFP32) {
    return false;
  }
  if (!is_fp8(p.out_type) || p.batch < 0 || p.rows < 0 || p.columns < 0) return false;
  int64_t all_rows = 0, elements = 0, tiles = 0;
  if (!multiplies(p.batch, p.rows, &all_rows) || !multiplies(all_rows, p.columns, &elements)) {
    return false;
  }
  if (is_empty(p)) return true;
  if (p.x == nullptr || !is_aligned(p.x, size_of(p.in_type))) return false;
  if (!multiplies(p.batch * ceil_div(p.rows, kRowThreads), ceil_div(p.columns, kTileColumns),
                  &tiles) ||
      tiles > kMaxGridX || all_rows > kMaxGridX) {
    return false;
  }
  const bool casts = p.out != nullptr || p.out_transposed != nullptr;
  const bool given = p.scaling == Scaling::kMultiplier || p.scaling == Scaling::kStep;
  if (given && casts && p.scale == nullptr) return false;
  if (!given && p.step == nullptr) return false;
  if (p.scaling == Scaling::kDynamic && p.finite_amax == nullptr) return false;
  if (p.ring.state != nullptr) {
    const RingFold& r = p.ring;
    if (!given || r.history < 1 || r.index < 0 || r.index >= r.history) return false;
    if (!(r.fp8_max > 0.0f) || !(r.margin > 0.0f)) return false;
  }
  return casts || p.amax != nullptr || p.ring.state != nullptr || !given;
}

// The launch of non-empty params that can_implement accepts. *params becomes what the kernel takes.
inline QuantizePlan make_quantize_plan(QuantizeParams* params, int sm_count) {
  using namespace plan_detail;
  QuantizePlan plan;
  *params = flatten(*params, &plan.last_row_columns);
  const QuantizeParams& p = *params;
  const bool square = p.out_transposed != nullptr || p.scaling == Scaling::kBlock128x128;
  auto set_tiles = [&] {
    plan.row_tiles = ceil_div(p.rows, int64_t{kRowThreads} * plan.thread_rows);
    plan.column_tiles = ceil_div(p.columns, kTileColumns);
    plan.tiles = p.batch * plan.row_tiles * plan.column_tiles;
  };
  set_tiles();
  if (!square && plan.tiles < kTilesPerSm * sm_count) {
    plan.thread_rows = 1;
    set_tiles();
  }
  const int64_t vector = 16 / static_cast<int64_t>(size_of(p.in_type));
  plan.wide_in = (p.column_stride == 1 || p.columns == 1) && is_aligned(p.x, 16) &&
                 (p.rows == 1 || p.row_stride % vector == 0) &&
                 (p.batch == 1 || p.batch_stride % vector == 0);
  plan.wide_out = is_aligned(p.out, 16) && (p.columns % 16 == 0 || p.batch * p.rows == 1);
  plan.wide_transposed = is_aligned(p.out_transposed, 16) && p.batch * p.rows % 16 == 0 &&
                         (p.batch == 1 || p.rows % 16 == 0);
  return plan;
}

}  // namespace astrai::fp8
