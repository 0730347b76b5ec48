// Asynchronous 16-byte copies from global to shared memory (sm_80 and newer), and their groups.
//
// Copies of one thread are collected in groups by commit; wait<N> returns when all but the newest N
// groups of this thread have landed. Other threads see them after a barrier that follows the wait.
#pragma once

#include <cstdint>

#include "kernels/common/ptx.cuh"

namespace astrai {

// A cache policy under which lines are the first to be evicted: for data that is read once.
__device__ __forceinline__ uint64_t evict_first_policy() { return ptx::createpolicy_evict_first(); }

// Copies 16 bytes, or writes zeros without reading `source` if not `valid`. Both addresses 16-byte
// aligned.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* source, bool valid) {
  ptx::cp_async_cg_16(shared, source, valid ? 16 : 0);
}

// The same with an L2 cache policy.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* source, bool valid,
                                            uint64_t policy) {
  ptx::cp_async_cg_16(shared, source, valid ? 16 : 0, policy);
}

__device__ __forceinline__ void cp_async_commit() { ptx::cp_async_commit_group(); }

template <int kNewestLeft>
__device__ __forceinline__ void cp_async_wait() {
  ptx::cp_async_wait_group<kNewestLeft>();
}

}  // namespace astrai
