// Asynchronous 16-byte copies from global to shared memory (sm_80 and newer), and their groups.
//
// Copies of one thread are collected in groups by commit; wait<N> returns when all but the newest N
// groups of this thread have landed. Other threads see them after a barrier that follows the wait.
#pragma once

#include <cstdint>

namespace astrai {

// A cache policy under which lines are the first to be evicted: for data that is read once.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies 16 bytes, or writes zeros without reading `source` if not `valid`. Both addresses 16-byte
// aligned.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(source),
               "r"(bytes)
               : "memory");
}

// The same with an L2 cache policy.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* source, bool valid,
                                            uint64_t policy) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared),
               "l"(source), "r"(bytes), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kNewestLeft>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewestLeft) : "memory");
}

}  // namespace astrai
