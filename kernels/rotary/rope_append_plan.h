// Host-side choices of a rope_append launch. Plain functions of the params, tested without a GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/rotary/plan.h"
#include "kernels/rotary/rope_append.h"

namespace astrai::rotary {

namespace plan_detail {

inline bool is_power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

inline int log2_of(int64_t power) {
  int log2 = 0;
  while (int64_t{1} << log2 < power) ++log2;
  return log2;
}

// Whether slots lie one behind the other, whatever page they belong to.
inline bool pages_are_rows(const RopeAppendParams& p, const AppendedOperand& x) {
  const bool one_page = p.slot_count <= p.page_size;
  return p.page_size == 1 || one_page || x.page_stride == p.page_size * x.row_stride;
}

// As pages of one row, where memory allows it.
inline RopeAppendParams collapse_pages(RopeAppendParams p) {
  if (p.page_size == 1 || !pages_are_rows(p, p.k) || !pages_are_rows(p, p.v)) return p;
  p.k.page_stride = p.k.row_stride;
  p.v.page_stride = p.v.row_stride;
  p.page_size = 1;
  return p;
}

inline bool appended_ok(const RopeAppendParams& p, const AppendedOperand& x) {
  if (x.in == nullptr || (x.cache == nullptr && p.slot_count > 0)) return false;
  if (!is_aligned(x.in, size_of(p.dtype))) return false;
  if (!is_aligned(x.cache, size_of(p.cache_dtype))) return false;
  if (!is_aligned(x.scale_pointer, sizeof(float))) return false;
  return std::isfinite(x.scale) && x.scale > 0.0f;
}

// Whether accesses of `width` elements fit what `x` reads and writes.
inline bool width_fits(const RopeAppendParams& p, const AppendedOperand& x, int dim, int width) {
  const auto steps = [width](int64_t stride, int64_t size) {
    return size <= 1 || stride % width == 0;
  };
  return dim % width == 0 && is_aligned(x.in, width * size_of(p.dtype)) &&
         is_aligned(x.cache, width * size_of(p.cache_dtype)) && steps(x.token_stride, p.tokens) &&
         steps(x.head_stride, p.kv_heads) && steps(x.cache_head_stride, p.kv_heads) &&
         steps(x.row_stride, p.page_size) && steps(x.page_stride, p.slot_count);
}

inline bool width_fits(const RopeAppendParams& p, const RotaryOperand& x, int width) {
  const auto steps = [width](int64_t stride, int64_t size) {
    return size <= 1 || stride % width == 0;
  };
  if (x.heads == 0) return true;
  return is_aligned(x.in, width * size_of(p.dtype)) &&
         is_aligned(x.out, width * size_of(p.dtype)) && steps(x.in_token_stride, p.tokens) &&
         steps(x.out_token_stride, p.tokens) && steps(x.in_head_stride, x.heads) &&
         steps(x.out_head_stride, x.heads);
}

}  // namespace plan_detail

inline bool is_empty(const RopeAppendParams& p) {
  return p.tokens == 0 || (p.q.heads == 0 && p.kv_heads == 0);
}

// Whether launch_rope_append takes these params; what it cannot take is listed in rope_append.h.
inline bool can_implement(const RopeAppendParams& p) {
  using namespace plan_detail;
  if (p.dtype != DType::kBF16 && p.dtype != DType::kFP16) return false;
  if (p.cache_dtype != p.dtype && p.cache_dtype != DType::kE4M3) return false;
  if (p.pairing != Pairing::kInterleaved && p.pairing != Pairing::kHalfSplit) return false;
  if (p.tokens < 0 || p.tokens > kMaxGridX || p.q.heads < 0 || p.kv_heads < 0) return false;
  if (int64_t{p.q.heads} + 2 * int64_t{p.kv_heads} > INT32_MAX / 2) return false;
  if (p.head_dim < 0 || p.v_head_dim < 0 || p.slot_count < 0 || p.page_size < 1) return false;
  if (p.rotary_dim < 0 || p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim) return false;
  if (is_empty(p)) return true;

  if (p.rotary_dim > 0) {
    const size_t position_bytes = p.positions_are_int64 ? sizeof(int64_t) : sizeof(int32_t);
    if (p.angles == nullptr || !is_aligned(p.angles, sizeof(float))) return false;
    if (p.positions == nullptr || !is_aligned(p.positions, position_bytes)) return false;
    if (p.max_pos < 0) return false;
  }
  if (p.q.heads > 0) {
    RotaryParams q;  // its operand_ok looks at these
    q.dtype = p.dtype;
    q.batch = 1;
    q.tokens = p.tokens;
    if (!operand_ok(q, p.q)) return false;
  }
  if (p.kv_heads == 0) return true;
  const size_t slot_bytes = p.slots_are_int64 ? sizeof(int64_t) : sizeof(int32_t);
  if (p.slots == nullptr || !is_aligned(p.slots, slot_bytes)) return false;
  if (!appended_ok(p, p.k) || !appended_ok(p, p.v)) return false;
  return is_power_of_two(p.page_size) || collapse_pages(p).page_size == 1;
}

// What the kernel needs beside RotaryPlan, whose lanes are numbered through the heads of q, k and
// v.
struct RopeAppendPlan {
  RotaryPlan rotary;
  int page_shift = 0;  // log2(page_size)
};

// The launch of non-empty params that can_implement accepts and collapse_pages has seen.
inline RopeAppendPlan make_plan(const RopeAppendParams& p, int sm_count) {
  using namespace plan_detail;
  RopeAppendPlan plan;
  RotaryPlan& r = plan.rotary;

  // A vector never straddles the two halves, the start of the tail or the end of the head.
  const int group = p.pairing == Pairing::kHalfSplit ? p.rotary_dim / 2 : p.rotary_dim;
  for (const int width : {8, 2, 1}) {
    r.width = width;
    const bool kv_fit = p.kv_heads == 0 || (width_fits(p, p.k, p.head_dim, width) &&
                                            width_fits(p, p.v, p.v_head_dim, width));
    if (group % width == 0 && p.head_dim % width == 0 && width_fits(p, p.q, width) && kv_fit) break;
  }
  r.split_pairs = p.pairing == Pairing::kHalfSplit || r.width == 1;
  r.wide_angles = is_aligned(p.angles, 16);

  const auto columns_of = [&](int elements) {
    const int column_elements = r.split_pairs ? 2 * r.width : r.width;
    return (elements + column_elements - 1) / column_elements;
  };
  r.rotated_columns = columns_of(p.rotary_dim);
  r.columns = r.rotated_columns + columns_of(p.head_dim - p.rotary_dim);
  if (p.kv_heads > 0) r.columns = std::max(r.columns, columns_of(p.v_head_dim));
  r.columns = std::max(r.columns, 1);

  spread_heads(&r, p.tokens, int64_t{p.q.heads} + 2 * int64_t{p.kv_heads}, sm_count);
  fill_blocks(&r, p.tokens);
  r.grid_z = 1;
  plan.page_shift = log2_of(p.page_size);
  return plan;
}

// Where the accesses of a column lie in a head, in elements.
struct AppendPlace {
  int at[2];
  bool present[2];
  bool rotated;
};

// Of q and k: rotated columns as in place_column, then those of the tail.
ASTRAI_HOST_DEVICE inline AppendPlace place_rotated(const RopeAppendParams& p,
                                                    const RotaryPlan& plan, int width,
                                                    bool split_pairs, int column) {
  AppendPlace place;
  place.rotated = column < plan.rotated_columns;
  if (place.rotated) {
    const bool neighbours = width == 1 && p.pairing == Pairing::kInterleaved;
    place.at[0] = neighbours ? 2 * column : column * width;
    place.at[1] = neighbours ? 2 * column + 1 : column * width + p.rotary_dim / 2;
    place.present[0] = true;
    place.present[1] = split_pairs;
  } else {
    const int tail_columns = plan.columns - plan.rotated_columns;
    place.at[0] = p.rotary_dim + (column - plan.rotated_columns) * width;
    place.at[1] = place.at[0] + tail_columns * width;
    place.present[0] = place.at[0] < p.head_dim;
    place.present[1] = split_pairs && place.at[1] < p.head_dim;
  }
  return place;
}

// Of v: all columns are copied.
ASTRAI_HOST_DEVICE inline AppendPlace place_copied(const RopeAppendParams& p,
                                                   const RotaryPlan& plan, int width,
                                                   bool split_pairs, int column) {
  AppendPlace place;
  place.rotated = false;
  place.at[0] = column * width;
  place.at[1] = place.at[0] + plan.columns * width;
  place.present[0] = place.at[0] < p.v_head_dim;
  place.present[1] = split_pairs && place.at[1] < p.v_head_dim;
  return place;
}

}  // namespace astrai::rotary
