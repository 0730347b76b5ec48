// How thread blocks that share the rows of a result, each for another part of the keys, find out
// which of them merges: partial results and flags in global memory, with no initialisation.
//
// Every block of a group writes its partial result, then its flag, and then looks at the flags of
// the whole group. A flag that is set holds a 64-bit constant which differs from slot to slot, so
// that whatever the memory held before is taken for "not set". Between its own flag and the look at
// the others stands a fence.sc: of all blocks of a group, the one whose fence comes last in the
// order of such fences sees every flag set and merges. It can happen that two blocks see all flags;
// both then write the same values. Who merges clears the flags, so the next launch on the stream
// finds them not set: memory can be used again and again, and by launches of other shapes.
#pragma once

#include <cstdint>

namespace astrai::attention {

// One slot of partial results per (block, part that it may leave); see the kernels for how a group
// lists its slots.
struct SplitWorkspace {
  float* out;       // [slots][rows][v_dim], un-normalised; undefined where sum is 0
  float* max_sum;   // [slots][rows][2]: softmax state (softmax.cuh)
  uint64_t* flags;  // [slots]
};

// Bytes of `slots` slots of `rows` rows; v_dim is the kernel's, a multiple of 4.
constexpr size_t split_workspace_bytes(int64_t slots, int rows, int v_dim) {
  return static_cast<size_t>(slots) * (rows * (v_dim + 2) * sizeof(float) + sizeof(uint64_t));
}

// Lays a workspace of split_workspace_bytes out; `memory` is 16-byte aligned, rows even.
inline SplitWorkspace split_workspace(void* memory, int64_t slots, int rows, int v_dim) {
  float* out = static_cast<float*>(memory);
  float* max_sum = out + slots * rows * v_dim;
  return {out, max_sum, reinterpret_cast<uint64_t*>(max_sum + slots * rows * 2)};
}

#ifdef __CUDACC__

__device__ __forceinline__ uint64_t set_flag(int slot) {
  return 0x9e3779b97f4a7c15ull ^ (static_cast<uint64_t>(slot) << 32 | 0x51ed270bull);
}

// Called by every thread of a block after its stores of the slot `own`. `slot_of(i)` lists the
// group's `count` slots. Returns, to every thread, whether this block merges; the partial results
// of the group may then be read, and clear_flags must follow. A block barrier on entry and exit.
template <typename SlotOf>
__device__ __forceinline__ bool publish_and_check(uint64_t* flags, int own, int count,
                                                  SlotOf slot_of) {
  // The barrier orders the block's stores before thread 0's fence, which makes them visible first.
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    *reinterpret_cast<volatile uint64_t*>(flags + own) = set_flag(own);
    __threadfence();
  }
  __syncthreads();
  int missing = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int slot = slot_of(i);
    missing |= *reinterpret_cast<const volatile uint64_t*>(flags + slot) != set_flag(slot);
  }
  const bool all = __syncthreads_or(missing) == 0;
  if (all) __threadfence();  // the reads of partial results come after those of the flags
  return all;
}

template <typename SlotOf>
__device__ __forceinline__ void clear_flags(uint64_t* flags, int count, SlotOf slot_of) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) flags[slot_of(i)] = 0;
}

#endif  // __CUDACC__

}  // namespace astrai::attention
