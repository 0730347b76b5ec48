// The fold of delayed scaling's state; see RingFold in quantize.h.
#pragma once

#include "kernels/fp8/formats.h"
#include "kernels/fp8/quantize.h"

namespace astrai::fp8 {

// Non-negative floats order as their bits do, infinity and NaN above all: a maximum of bits keeps
// NaN, and needs no order among blocks.
__device__ __forceinline__ void atomic_max_bits(float* slot, uint32_t bits) {
  if (bits != 0) atomicMax(reinterpret_cast<unsigned*>(slot), bits);
}

// By one thread of each block, after its block's maximum went to the ring's amax.
__device__ __forceinline__ void fold_when_last(const RingFold& ring, float* amax) {
  float* slots = ring.state + ring.history;  // step, count, amax, done
  unsigned* done = reinterpret_cast<unsigned*>(slots + 3);
  __threadfence();
  if (atomicAdd(done, 1u) != gridDim.x - 1) return;
  __threadfence();
  const unsigned bits = atomicExch(reinterpret_cast<unsigned*>(slots + 2), 0u);
  const float total = __uint_as_float(bits);
  if (amax != nullptr) atomic_max_bits(amax, bits);
  if (is_finite(total)) {
    ring.state[ring.index] = total;
    float largest = 0.0f;
    for (int i = 0; i < ring.history; ++i) largest = fmaxf(largest, ring.state[i]);
    slots[0] = step_of(largest, ring.fp8_max, ring.margin);
  } else {
    slots[1] += 1.0f;
  }
  *done = 0;
}

}  // namespace astrai::fp8
