// Programmatic dependent launch (sm_90): a kernel whose blocks start while the kernel before it on
// the stream still runs, so that what comes before its first access to memory costs no time.
//
// A kernel that is launched with LaunchConfig::overlaps_previous calls wait_for_previous_kernel()
// in every block, and before it touches global memory: its inputs may be what the kernel before is
// about to write, and its outputs what that one still reads. A block that left without waiting
// would let the kernel after next start too early, since each waits only for the one before it.
//
// Only code compiled for sm_90 has the instructions, so launch() asks for the overlap only where
// the device runs such code; elsewhere the functions do nothing.
#pragma once

#include "kernels/common/ptx.cuh"

#ifdef __CUDACC__

namespace astrai {

#if defined(ASTRAI_EMULATE) || __CUDA_ARCH__ >= 900

// Returns when all kernels before this one have ended and what they wrote is visible. At once if
// they have, and in a kernel that was launched without overlap.
__device__ __forceinline__ void wait_for_previous_kernel() { ptx::griddepcontrol_wait(); }

// Lets the next kernel's blocks start once every block of this one has called it or ended: where
// they find room beside this kernel's.
__device__ __forceinline__ void let_next_kernel_start() { ptx::griddepcontrol_launch_dependents(); }

#else

__device__ __forceinline__ void wait_for_previous_kernel() {}
__device__ __forceinline__ void let_next_kernel_start() {}

#endif

}  // namespace astrai

#endif  // __CUDACC__
