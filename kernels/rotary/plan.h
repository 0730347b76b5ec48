// Host-side choices of a rotary launch: what the kernel can take, access width, block and grid.
//
// Plain functions of the params, tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rotary/rotary.h"

// Functions marked so are also called by the kernel.
#ifdef __CUDACC__
#define ASTRAI_HOST_DEVICE __host__ __device__
#else
#define ASTRAI_HOST_DEVICE
#endif

namespace astrai::rotary {

// How the work is laid over threads.
//
// A thread owns one column of the heads of one lane, so the angles it reads serve all these heads.
// Heads are numbered through q and then k; lane l holds heads l, l + lanes, ... Columns are, in
// order, the rotated ones and those of the tail that is only copied.
//   - whole pairs: a column is one access of `width` elements that holds width / 2 pairs
//     (interleaved, width >= 2);
//   - split pairs: a column is two accesses of `width` elements; the first member of each pair is
//     in the first, the second in the second (half split; interleaved with width 1).
struct RotaryPlan {
  int width = 0;             // elements per memory access: 8, 4, 2 or 1
  bool split_pairs = false;  // see above
  bool wide_angles = false;  // angles may be read in 16-byte accesses
  bool single = false;       // for rotary_single_kernel: one column of one head per thread
  int rotated_columns = 0;
  int columns = 0;         // rotated_columns plus those of the tail
  int lanes = 0;           // heads that are worked on side by side
  int heads_per_lane = 0;  // some lanes may have one less
  int block_x = 0;         // columns
  int block_y = 0;         // lanes
  int block_z = 0;         // tokens
  int64_t grid_x = 0;      // tiles of block_z tokens
  int grid_y = 0;          // tiles of block_y lanes
  int grid_z = 0;          // batch elements
};

namespace plan_detail {

// What make_plan aims at; measured, see README.md.
constexpr int kMaxThreads = 128;       // per block: the kernels' launch bound
constexpr int kAccessesPerThread = 8;  // loads of a thread, over all its heads
constexpr int kThreadsPerSm = 512;     // fewer than these: heads go to more threads instead
constexpr int kSingleSplitWidth = 4;   // of `single` plans with split pairs

// Limits of the hardware.
constexpr int64_t kMaxGridX = 2147483647;
constexpr int kMaxGridYZ = 65535;
constexpr int kMaxBlockZ = 64;

inline bool is_aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Calls f(size, in_stride, out_stride) for the three outer dimensions of an operand.
template <typename F>
void for_each_dim(const RotaryParams& p, const RotaryOperand& x, F f) {
  f(int64_t{p.batch}, x.in_batch_stride, x.out_batch_stride);
  f(p.tokens, x.in_token_stride, x.out_token_stride);
  f(int64_t{x.heads}, x.in_head_stride, x.out_head_stride);
}

inline bool in_place(const RotaryOperand& x) { return x.in == x.out; }

inline bool operand_ok(const RotaryParams& p, const RotaryOperand& x) {
  if (x.heads == 0) return true;
  if (x.heads < 0 || x.in == nullptr || x.out == nullptr) return false;
  if (!is_aligned(x.in, size_of(p.dtype)) || !is_aligned(x.out, size_of(p.dtype))) return false;
  bool ok = true;
  for_each_dim(p, x, [&](int64_t size, int64_t in_stride, int64_t out_stride) {
    if (size <= 1) return;
    // A result that repeats in memory would be written by several threads at once.
    if (out_stride == 0) ok = false;
    // Elements that move in memory while others still wait to be read cannot be in place.
    if (in_place(x) && in_stride != out_stride) ok = false;
  });
  return ok;
}

// The widest access of `limit` or fewer elements that fits one operand.
inline int operand_width(const RotaryParams& p, const RotaryOperand& x, int limit) {
  if (x.heads == 0) return limit;
  int width = limit;
  auto narrow_to = [&](auto fits) {
    while (width > 1 && !fits(width)) width /= 2;
  };
  narrow_to([&](int w) { return is_aligned(x.in, w * size_of(p.dtype)); });
  narrow_to([&](int w) { return is_aligned(x.out, w * size_of(p.dtype)); });
  for_each_dim(p, x, [&](int64_t size, int64_t in_stride, int64_t out_stride) {
    if (size <= 1) return;
    narrow_to([&](int w) { return in_stride % w == 0 && out_stride % w == 0; });
  });
  return width;
}

// Merges the batch into the tokens where memory allows it, so that one dimension remains.
inline RotaryParams collapse_batch(RotaryParams p) {
  auto merged = [&](const RotaryOperand& x, bool take_batch_stride) {
    if (x.heads == 0 || take_batch_stride) return true;
    return x.in_batch_stride == p.tokens * x.in_token_stride &&
           x.out_batch_stride == p.tokens * x.out_token_stride;
  };
  if (p.batch == 1) return p;
  const bool one_token = p.tokens == 1;
  if (!merged(p.q, one_token) || !merged(p.k, one_token)) return p;
  if (one_token) {
    for (RotaryOperand* x : {&p.q, &p.k}) {
      x->in_token_stride = x->in_batch_stride;
      x->out_token_stride = x->out_batch_stride;
    }
  }
  p.tokens *= p.batch;
  p.batch = 1;
  return p;
}

// Heads per thread: many, so that angles and addresses are worked out once for all of them, unless
// too few threads were left to fill the GPU.
inline void spread_heads(RotaryPlan* plan, int64_t tokens, int64_t heads, int sm_count) {
  int64_t heads_per_lane = kAccessesPerThread / (plan->split_pairs ? 2 : 1);
  const int64_t threads_wanted = int64_t{sm_count} * kThreadsPerSm;
  while (heads_per_lane > 1 && tokens * heads * plan->columns < threads_wanted * heads_per_lane) {
    heads_per_lane /= 2;
  }
  heads_per_lane = std::max(heads_per_lane, (heads + kMaxGridYZ - 1) / kMaxGridYZ);
  plan->lanes = static_cast<int>((heads + heads_per_lane - 1) / heads_per_lane);
  // Rounded down again where lanes were rounded up: 9 heads in lanes of 4 are 3 lanes of 3.
  plan->heads_per_lane = static_cast<int>((heads + plan->lanes - 1) / plan->lanes);
}

// Blocks of columns, lanes and tokens, and how many of them.
inline void fill_blocks(RotaryPlan* plan, int64_t tokens) {
  plan->block_x = std::min(plan->columns, kMaxThreads);
  const int rows = kMaxThreads / plan->block_x;  // (lane, token) pairs per block

  // Lanes are spread evenly over blocks: 9 lanes in blocks of at most 8 are 5 and 4.
  plan->grid_y = (plan->lanes + rows - 1) / rows;
  plan->block_y = (plan->lanes + plan->grid_y - 1) / plan->grid_y;
  plan->block_z =
      static_cast<int>(std::min<int64_t>(std::min(rows / plan->block_y, kMaxBlockZ), tokens));
  plan->grid_x = (tokens + plan->block_z - 1) / plan->block_z;
}

}  // namespace plan_detail

// True if there is nothing to rotate.
inline bool is_empty(const RotaryParams& p) {
  return p.batch == 0 || p.tokens == 0 || (p.q.heads == 0 && p.k.heads == 0);
}

// Whether launch_rotary takes these params; what it cannot take is listed in rotary.h.
inline bool can_implement(const RotaryParams& p) {
  using namespace plan_detail;
  if (p.dtype != DType::kBF16 && p.dtype != DType::kFP16) return false;
  if (p.pairing != Pairing::kInterleaved && p.pairing != Pairing::kHalfSplit) return false;
  if (p.batch < 0 || p.tokens < 0 || p.q.heads < 0 || p.k.heads < 0) return false;
  if (p.batch > 0 && p.tokens > kMaxGridX / p.batch) return false;
  if (p.rotary_dim < 2 || p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim) return false;
  if (p.source != AngleSource::kPerToken && p.source != AngleSource::kTable) return false;
  if (is_empty(p)) return true;
  if (int64_t{p.q.heads} + p.k.heads > INT32_MAX / 2) return false;
  if (p.angles == nullptr || !is_aligned(p.angles, sizeof(float))) return false;
  if (p.source == AngleSource::kTable) {
    const size_t position_bytes = p.positions_are_int64 ? sizeof(int64_t) : sizeof(int32_t);
    if (p.positions == nullptr || !is_aligned(p.positions, position_bytes)) return false;
    if (p.max_pos < 0) return false;
  }
  return operand_ok(p, p.q) && operand_ok(p, p.k);
}

// The launch of non-empty params that can_implement accepts and collapse_batch has seen, on a GPU
// with sm_count SMs.
inline RotaryPlan make_plan(const RotaryParams& p, int sm_count) {
  using namespace plan_detail;
  RotaryPlan plan;
  const bool tail_copied = p.rotary_dim < p.head_dim &&
                           ((p.q.heads > 0 && !in_place(p.q)) || (p.k.heads > 0 && !in_place(p.k)));

  // A vector never straddles the two halves, the start of the tail or the end of the head.
  const int group = p.pairing == Pairing::kHalfSplit ? p.rotary_dim / 2 : p.rotary_dim;
  int width = 8;
  while (group % width != 0 || (tail_copied && p.head_dim % width != 0)) width /= 2;
  width = operand_width(p, p.q, width);
  width = operand_width(p, p.k, width);
  plan.width = width;
  plan.split_pairs = p.pairing == Pairing::kHalfSplit || width == 1;
  plan.wide_angles = is_aligned(p.angles, 16);

  const int64_t heads = int64_t{p.q.heads} + p.k.heads;
  const int64_t tokens = p.batch * p.tokens;
  const int tail = tail_copied ? p.head_dim - p.rotary_dim : 0;
  auto set_columns = [&] {
    const int column_elements = plan.split_pairs ? 2 * plan.width : plan.width;
    plan.rotated_columns = p.rotary_dim / column_elements;
    plan.columns = plan.rotated_columns + (tail + column_elements - 1) / column_elements;
  };
  set_columns();

  spread_heads(&plan, tokens, heads, sm_count);

  plan.single =
      plan.heads_per_lane == 1 && plan.width == 8 && plan.wide_angles && tail == 0 && p.batch == 1;
  if (plan.single && plan.split_pairs) {
    plan.width = kSingleSplitWidth;
    set_columns();
  }
  plan.single = plan.single && plan.columns <= kMaxThreads;
  fill_blocks(&plan, p.tokens);
  plan.grid_z = std::min(p.batch, kMaxGridYZ);
  return plan;
}

// Where the accesses of a column lie in a head, in elements. Split pairs only have a second one.
struct ColumnPlace {
  int first, second;
  bool has_second;  // false: the tail has an odd number of accesses and ends with this column
  bool rotated;     // false: part of the tail
};

// `width` and `split_pairs` are those of the plan, passed apart because the kernel knows them at
// compile time.
ASTRAI_HOST_DEVICE inline ColumnPlace place_column(const RotaryParams& p, const RotaryPlan& plan,
                                                   int width, bool split_pairs, int column) {
  ColumnPlace place;
  place.rotated = column < plan.rotated_columns;
  if (place.rotated) {
    place.first = column * width;
    place.second = place.first + p.rotary_dim / 2;
    if (split_pairs && width == 1 && p.pairing == Pairing::kInterleaved) {
      place.first = 2 * column;
      place.second = place.first + 1;
    }
    place.has_second = split_pairs;
  } else {
    place.first = p.rotary_dim + (column - plan.rotated_columns) * width;
    place.second = place.first + (plan.columns - plan.rotated_columns) * width;
    place.has_second = split_pairs && place.second < p.head_dim;
  }
  return place;
}

}  // namespace astrai::rotary
