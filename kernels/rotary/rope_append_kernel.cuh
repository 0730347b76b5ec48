// The kernel of rope_append.h: the thread layout of rotary_kernel.cuh over the heads of q, k and v.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/fp8.cuh"
#include "kernels/common/vec.cuh"
#include "kernels/rotary/rope_append_plan.h"
#include "kernels/rotary/rotary_kernel.cuh"

namespace astrai::rotary {

// Which tensor a head belongs to: heads are numbered through q, then k, then v.
enum class HeadOf { kQ, kK, kV };

struct NumberedHead {
  HeadOf tensor;
  int index;
};

__device__ __forceinline__ NumberedHead numbered_head(const RopeAppendParams& p, int number) {
  if (number < p.q.heads) return {HeadOf::kQ, number};
  number -= p.q.heads;
  if (number < p.kv_heads) return {HeadOf::kK, number};
  return {HeadOf::kV, number - p.kv_heads};
}

// One thread: one column of every head that its lane owns, of one token. T: type of q, k and v; E:
// of the cache.
template <typename T, typename E, int kWidth, bool kSplitPairs>
class AppendColumn {
 public:
  __device__ __forceinline__ AppendColumn(const RopeAppendParams& p, const RopeAppendPlan& plan,
                                          int64_t token, int column)
      : p_(p),
        plan_(plan),
        token_(token),
        rotated_(place_rotated(p, plan.rotary, kWidth, kSplitPairs, column)),
        copied_(place_copied(p, plan.rotary, kWidth, kSplitPairs, column)) {}

  // `kHeads` heads are loaded before anything waits for the first of them.
  __device__ __forceinline__ void run(int lane, int column) {
    const int heads = p_.q.heads + 2 * p_.kv_heads;
    const int lanes = plan_.rotary.lanes;
    // Neither waits for the other, nor do the heads' loads wait for them.
    Position position = {}, slot = {};
    if (rotated_.rotated) {
      position = load_position(p_.positions, p_.positions_are_int64, token_);
    }
    if (p_.kv_heads > 0) slot = load_position(p_.slots, p_.slots_are_int64, token_);
    load_heads(lane, heads);
    Angles<Column::kPairs> angles = {};
    if (rotated_.rotated) {
      angles = load_table_angles<Column::kPairs>(p_, plan_.rotary.wide_angles, position,
                                                 column * Column::kPairs);
    }
    find_rows(wide_position(slot, p_.slots_are_int64));
    for (int first = lane;;) {
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        const int number = first + i * lanes;
        if (number >= heads) break;
        store_head(numbered_head(p_, number), held_[i], angles);
      }
      first += kHeads * lanes;
      if (first >= heads) break;
      load_heads(first, heads);
    }
  }

 private:
  using Column = rotary::Column<T, kWidth, kSplitPairs>;
  static constexpr int kAccesses = Column::kAccesses;
  static constexpr int kHeads = 4 / kAccesses;

  // By value: a reference to one of the two would keep both out of registers.
  __device__ __forceinline__ AppendPlace place(HeadOf tensor) const {
    AppendPlace at;
    const bool is_v = tensor == HeadOf::kV;
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
      at.at[a] = is_v ? copied_.at[a] : rotated_.at[a];
      at.present[a] = is_v ? copied_.present[a] : rotated_.present[a];
    }
    at.rotated = !is_v && rotated_.rotated;
    return at;
  }

  __device__ __forceinline__ const T* source(NumberedHead head) const {
    if (head.tensor == HeadOf::kQ) {
      return static_cast<const T*>(p_.q.in) + token_ * p_.q.in_token_stride +
             head.index * p_.q.in_head_stride;
    }
    const AppendedOperand& x = head.tensor == HeadOf::kK ? p_.k : p_.v;
    return static_cast<const T*>(x.in) + token_ * x.token_stride + head.index * x.head_stride;
  }

  __device__ __forceinline__ void load_heads(int first, int heads) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int number = first + i * plan_.rotary.lanes;
      if (number >= heads) break;
      const NumberedHead head = numbered_head(p_, number);
      const AppendPlace at = place(head.tensor);
      const T* in = source(head);
#pragma unroll
      for (int a = 0; a < kAccesses; ++a) {
        if (at.present[a]) held_[i].part[a] = load_vec<T, kWidth>(in + at.at[a]);
      }
    }
  }

  // The token's rows of the caches; null if it has no slot.
  __device__ __forceinline__ void find_rows(int64_t slot) {
    if (static_cast<uint64_t>(slot) >= static_cast<uint64_t>(p_.slot_count)) return;
    const int64_t page = slot >> plan_.page_shift;
    const int64_t row = slot - (page << plan_.page_shift);
    k_row_ = static_cast<E*>(p_.k.cache) + page * p_.k.page_stride + row * p_.k.row_stride;
    v_row_ = static_cast<E*>(p_.v.cache) + page * p_.v.page_stride + row * p_.v.row_stride;
  }

  __device__ __forceinline__ void store_head(NumberedHead head, Column& held,
                                             const Angles<Column::kPairs>& angles) const {
    const AppendPlace at = place(head.tensor);
    if (head.tensor == HeadOf::kQ) {
      // In place, what is not rotated stays as it is.
      if (!at.rotated && p_.q.in == p_.q.out) return;
      T* out = static_cast<T*>(p_.q.out) + token_ * p_.q.out_token_stride +
               head.index * p_.q.out_head_stride;
      if (at.rotated) held.rotate(angles);
      store_parts(at, held, out);
      return;
    }
    const bool is_k = head.tensor == HeadOf::kK;
    E* row = is_k ? k_row_ : v_row_;
    if (row == nullptr) return;
    const AppendedOperand& x = is_k ? p_.k : p_.v;
    row += head.index * x.cache_head_stride;
    if constexpr (sizeof(E) == sizeof(T)) {
      if (at.rotated) held.rotate(angles);
      store_parts(at, held, row);
    } else {
      const float step = x.scale_pointer == nullptr ? x.scale : x.scale * __ldg(x.scale_pointer);
      float values[kAccesses][kWidth];
      if (at.rotated) {
        held.rotate(angles, values);
      } else {
#pragma unroll
        for (int a = 0; a < kAccesses; ++a) unpack(held.part[a], values[a]);
      }
#pragma unroll
      for (int a = 0; a < kAccesses; ++a) {
        if (!at.present[a]) continue;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values[a][i] /= step;
        store_e4m3(values[a], row + at.at[a]);
      }
    }
  }

  static __device__ __forceinline__ void store_parts(const AppendPlace& at, const Column& held,
                                                     T* out) {
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
      if (at.present[a]) store_vec(out + at.at[a], held.part[a]);
    }
  }

  const RopeAppendParams& p_;
  const RopeAppendPlan& plan_;
  const int64_t token_;
  const AppendPlace rotated_;  // of q and k
  const AppendPlace copied_;   // of v
  E* k_row_ = nullptr;
  E* v_row_ = nullptr;
  Column held_[kHeads] = {};
};

// Blocks per SM that leave a thread the registers it needs, as in rotary_kernel; the conversion to
// e4m3 takes more of them.
template <typename E>
inline constexpr int kAppendBlocksPerSm = sizeof(E) == 1 ? 5 : 7;

template <typename T, typename E, int kWidth, bool kSplitPairs>
__global__ void __launch_bounds__(plan_detail::kMaxThreads, kAppendBlocksPerSm<E>)
    rope_append_kernel(const __grid_constant__ RopeAppendParams p,
                       const __grid_constant__ RopeAppendPlan plan) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t token = int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
  const int lane = blockIdx.y * blockDim.y + threadIdx.y;
  if (token >= p.tokens || lane >= plan.rotary.lanes) return;
  // Runs once but for a head wider than a block.
  for (int column = threadIdx.x; column < plan.rotary.columns; column += blockDim.x) {
    AppendColumn<T, E, kWidth, kSplitPairs>(p, plan, token, column).run(lane, column);
  }
}

}  // namespace astrai::rotary
