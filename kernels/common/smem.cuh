// Shared memory of a block.
#pragma once

#include <cstdint>

#ifdef ASTRAI_EMULATE
#include "tests/kernels/emulator/ptx.h"
#endif

#ifdef __CUDACC__

namespace astrai {

// The dynamic part: as many bytes as the launch asked for, aligned to 128 bytes. (An array and not
// a function that returns it: nvcc then folds its address into the offsets.)
#ifdef ASTRAI_EMULATE
using emulator::dynamic_smem;
#else
extern __shared__ __align__(128) uint8_t dynamic_smem[];
#endif

// Address of shared memory as the instructions that know only that space take it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace astrai

#endif  // __CUDACC__
