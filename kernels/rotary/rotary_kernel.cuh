// The rotary kernel: memory bound, so it is all about moving each element once in wide accesses.
//
// Needs sm_80 for its bf16 conversion only. Thread layout and access width: see RotaryPlan.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/vec.cuh"
#include "kernels/rotary/plan.h"

namespace astrai::rotary {

template <int kPairs>
struct Angles {
  float cos[kPairs], sin[kPairs];
};

// Reads kCount consecutive floats through the read-only path; with `wide`, `address` is aligned to
// min(16, 4 * kCount) bytes.
template <int kCount>
__device__ __forceinline__ void load_floats(const float* address, bool wide,
                                            float (&values)[kCount]) {
  if (kCount % 4 == 0 && wide) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float4 v = __ldg(reinterpret_cast<const float4*>(address) + i);
      values[4 * i] = v.x;
      values[4 * i + 1] = v.y;
      values[4 * i + 2] = v.z;
      values[4 * i + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = __ldg(address + i);
  }
}

// A position as it lies in memory. An int32 is widened only where it is used: at its load, the
// loads that follow would wait for it.
struct Position {
  int low, high;
};

__device__ __forceinline__ Position load_position(const void* positions, bool are_int64,
                                                  int64_t token) {
  const int* words = static_cast<const int*>(positions);
  if (are_int64) {
    const int2 both = __ldg(reinterpret_cast<const int2*>(words) + token);
    return {both.x, both.y};
  }
  return {__ldg(words + token), 0};
}

__device__ __forceinline__ int64_t wide_position(Position position, bool are_int64) {
  const int high = are_int64 ? position.high : position.low >> 31;
  return int64_t{high} << 32 | static_cast<uint32_t>(position.low);
}

// Angles of pairs first_pair .. first_pair + kPairs - 1 of the table's row for a position. Params:
// RotaryParams or RopeAppendParams.
template <int kPairs, typename Params>
__device__ __forceinline__ Angles<kPairs> load_table_angles(const Params& p, bool wide,
                                                            Position position, int first_pair) {
  Angles<kPairs> angles;
  const int64_t row = wide_position(position, p.positions_are_int64);
  if (static_cast<uint64_t>(row) < static_cast<uint64_t>(p.max_pos)) {
    const float* cosines = p.angles + row * p.rotary_dim + first_pair;
    load_floats(cosines, wide, angles.cos);
    load_floats(cosines + p.rotary_dim / 2, wide, angles.sin);
  } else {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) angles.cos[i] = angles.sin[i] = __int_as_float(0x7fc00000);
  }
  return angles;
}

// The same pairs of a token that has its own row of angles.
template <int kPairs>
__device__ __forceinline__ Angles<kPairs> load_token_angles(const RotaryParams& p, bool wide,
                                                            int64_t token, int first_pair) {
  Angles<kPairs> angles;
  float both[2 * kPairs];
  load_floats(p.angles + token * p.rotary_dim + 2 * first_pair, wide, both);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    angles.cos[i] = both[2 * i];
    angles.sin[i] = both[2 * i + 1];
  }
  return angles;
}

__device__ __forceinline__ void rotate_pair(float& x1, float& x2, float cos, float sin) {
  const float y1 = x1 * cos - x2 * sin;
  x2 = x1 * sin + x2 * cos;
  x1 = y1;
}

// What one thread holds of one head: a column (see RotaryPlan).
template <typename T, int kWidth, bool kSplitPairs>
struct Column {
  static constexpr int kAccesses = kSplitPairs ? 2 : 1;
  static constexpr int kPairs = kSplitPairs ? kWidth : kWidth / 2;
  Vec<T, kWidth> part[kAccesses];

  __device__ __forceinline__ void rotate(const Angles<kPairs>& angles) {
    float x[kAccesses][kWidth];
    rotate(angles, x);
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) part[a] = pack<T>(x[a]);
  }

  // The rotated elements before they are rounded.
  __device__ __forceinline__ void rotate(const Angles<kPairs>& angles,
                                         float (&x)[kAccesses][kWidth]) const {
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) unpack(part[a], x[a]);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if constexpr (kSplitPairs) {
        rotate_pair(x[0][i], x[1][i], angles.cos[i], angles.sin[i]);
      } else {
        rotate_pair(x[0][2 * i], x[0][2 * i + 1], angles.cos[i], angles.sin[i]);
      }
    }
  }
};

// One head's column in memory.
template <typename T>
struct HeadPlace {
  const T* in;
  T* out;
};

// Finds the heads of one token, numbered through q and then k.
template <typename T>
struct TokenPlace {
  HeadPlace<T> q, k;

  __device__ __forceinline__ TokenPlace(const RotaryParams& p, int batch, int64_t token, int at)
      : q(start(p.q, batch, token, at)), k(start(p.k, batch, token, at)) {}

  __device__ __forceinline__ HeadPlace<T> head(const RotaryParams& p, int number) const {
    const bool is_q = number < p.q.heads;
    const int local = is_q ? number : number - p.q.heads;
    const HeadPlace<T>& first = is_q ? q : k;
    return {first.in + local * (is_q ? p.q.in_head_stride : p.k.in_head_stride),
            first.out + local * (is_q ? p.q.out_head_stride : p.k.out_head_stride)};
  }

 private:
  static __device__ __forceinline__ HeadPlace<T> start(const RotaryOperand& x, int batch,
                                                       int64_t token, int at) {
    return {
        static_cast<const T*>(x.in) + batch * x.in_batch_stride + token * x.in_token_stride + at,
        static_cast<T*>(x.out) + batch * x.out_batch_stride + token * x.out_token_stride + at};
  }
};

// One thread: one column of every head that its lane owns, of one token. `kHeads` heads are loaded
// before anything waits for the first of them.
template <typename T, int kWidth, bool kSplitPairs, int kHeads>
__device__ __forceinline__ void rotate_column(const RotaryParams& p, const RotaryPlan& plan,
                                              int batch, int64_t token, int lane, int column) {
  using Column = Column<T, kWidth, kSplitPairs>;
  const int64_t row = batch * p.tokens + token;
  Position position = {};
  if (p.source == AngleSource::kTable)
    position = load_position(p.positions, p.positions_are_int64, row);
  const ColumnPlace place = place_column(p, plan, kWidth, kSplitPairs, column);
  const int second = place.second - place.first;
  const TokenPlace<T> places(p, batch, token, place.first);
  const int heads = p.q.heads + p.k.heads;
  Column held[kHeads];

  auto load_heads = [&](int first) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first + i * plan.lanes;
      if (head >= heads) break;
      const T* in = places.head(p, head).in;
      held[i].part[0] = load_vec<T, kWidth>(in);
      if (kSplitPairs && place.has_second) {
        held[i].part[Column::kAccesses - 1] = load_vec<T, kWidth>(in + second);
      }
    }
  };

  // The first loads stand before the angles, which with a table wait for the position.
  load_heads(lane);
  Angles<Column::kPairs> angles = {};
  if (place.rotated) {
    const int pair = column * Column::kPairs;
    angles = p.source == AngleSource::kTable
                 ? load_table_angles<Column::kPairs>(p, plan.wide_angles, position, pair)
                 : load_token_angles<Column::kPairs>(p, plan.wide_angles, row, pair);
  }
  for (int first = lane;;) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first + i * plan.lanes;
      if (head >= heads) break;
      if (place.rotated) held[i].rotate(angles);
      T* out = places.head(p, head).out;
      store_vec(out, held[i].part[0]);
      if (kSplitPairs && place.has_second) {
        store_vec(out + second, held[i].part[Column::kAccesses - 1]);
      }
    }
    first += kHeads * plan.lanes;
    if (first >= heads) break;
    load_heads(first);
  }
}

// A thread keeps four loads in flight; seven blocks per SM leave it the 72 registers that they
// need.
template <typename T, int kWidth, bool kSplitPairs>
__global__ void __launch_bounds__(plan_detail::kMaxThreads, 7)
    rotary_kernel(const __grid_constant__ RotaryParams p, const __grid_constant__ RotaryPlan plan) {
  constexpr int kHeads = 4 / Column<T, kWidth, kSplitPairs>::kAccesses;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t token = int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
  const int lane = blockIdx.y * blockDim.y + threadIdx.y;
  if (token >= p.tokens || lane >= plan.lanes) return;
  // Both loops run once but for a batch above the grid's limit or a head wider than a block.
  for (int batch = blockIdx.z; batch < p.batch; batch += gridDim.z) {
    for (int column = threadIdx.x; column < plan.columns; column += blockDim.x) {
      rotate_column<T, kWidth, kSplitPairs, kHeads>(p, plan, batch, token, lane, column);
    }
  }
}

// For RotaryPlan::single: no loop, no tail, one batch element, 16-byte angle accesses. The time of
// a few tokens is latency: this has a quarter of the instructions of rotary_kernel.
template <typename T, int kWidth, bool kSplitPairs, AngleSource kSource>
__global__ void __launch_bounds__(plan_detail::kMaxThreads)
    rotary_single_kernel(const __grid_constant__ RotaryParams p,
                         const __grid_constant__ RotaryPlan plan) {
  using Column = Column<T, kWidth, kSplitPairs>;
  constexpr bool kFromTable = kSource == AngleSource::kTable;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t token = int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
  const int number = blockIdx.y * blockDim.y + threadIdx.y;  // of the head, through q and then k
  if (token >= p.tokens || number >= plan.lanes) return;

  Position position = {};
  if (kFromTable) position = load_position(p.positions, p.positions_are_int64, token);
  const bool is_q = number < p.q.heads;
  const RotaryOperand& x = is_q ? p.q : p.k;
  const int head = is_q ? number : number - p.q.heads;
  const int column = threadIdx.x;
  const int at = column * kWidth;
  const int second = p.rotary_dim / 2;
  const T* in =
      static_cast<const T*>(x.in) + token * x.in_token_stride + head * x.in_head_stride + at;
  T* out = static_cast<T*>(x.out) + token * x.out_token_stride + head * x.out_head_stride + at;

  Column held;
  held.part[0] = load_vec<T, kWidth>(in);
  if (kSplitPairs) held.part[Column::kAccesses - 1] = load_vec<T, kWidth>(in + second);
  const int pair = column * Column::kPairs;
  held.rotate(kFromTable ? load_table_angles<Column::kPairs>(p, true, position, pair)
                         : load_token_angles<Column::kPairs>(p, true, token, pair));
  store_vec(out, held.part[0]);
  if (kSplitPairs) store_vec(out + second, held.part[Column::kAccesses - 1]);
}

}  // namespace astrai::rotary
