// Thread block clusters (sm_90): blocks that run at the same time, meet at a barrier and reach each
// other's shared memory.
//
// Code for older devices sees a cluster of one block, so that kernels compile for every level.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/ptx.cuh"
#include "kernels/common/smem.cuh"

#ifdef __CUDACC__

namespace astrai {

#if defined(ASTRAI_EMULATE) || __CUDA_ARCH__ >= 900

// Whether a cluster can have more than one block.
__device__ __forceinline__ constexpr bool has_clusters() { return true; }

// Number of this block in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() { return ptx::cluster_ctarank(); }

// Number of blocks in the cluster.
__device__ __forceinline__ uint32_t cluster_size() { return ptx::cluster_nctarank(); }

// The barrier of all threads of the cluster, in two halves: what a thread wrote before its arrival,
// all of them see after their wait. A thread arrives and waits in turn, and all lanes of a warp
// together.
__device__ __forceinline__ void cluster_arrive() { ptx::barrier_cluster_arrive_release(); }
__device__ __forceinline__ void cluster_wait() { ptx::barrier_cluster_wait_acquire(); }

// Where, in block `rank`, the memory lies that has `address` in this one. Usable from when that
// block is known to run (after a cluster barrier) until it exits (so a barrier comes last, too).
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  return ptx::mapa(address, rank);
}

// Memory at a cluster_address, aligned to the size of the access.
__device__ __forceinline__ float cluster_load_float(uint32_t address) {
  return ptx::ld_shared_cluster_f32(address);
}
__device__ __forceinline__ uint32_t cluster_load_uint(uint32_t address) {
  return ptx::ld_shared_cluster_u32(address);
}
__device__ __forceinline__ float2 cluster_load_float2(uint32_t address) {
  return ptx::ld_shared_cluster_v2_f32(address);
}
__device__ __forceinline__ float4 cluster_load_float4(uint32_t address) {
  return ptx::ld_shared_cluster_v4_f32(address);
}
__device__ __forceinline__ void cluster_store(uint32_t address, float value) {
  ptx::st_shared_cluster_f32(address, value);
}
__device__ __forceinline__ void cluster_store(uint32_t address, uint32_t value) {
  ptx::st_shared_cluster_u32(address, value);
}
__device__ __forceinline__ void cluster_store(uint32_t address, float4 value) {
  ptx::st_shared_cluster_v4_f32(address, value);
}

#else

__device__ __forceinline__ constexpr bool has_clusters() { return false; }

__device__ __forceinline__ uint32_t cluster_rank() { return 0; }
__device__ __forceinline__ uint32_t cluster_size() { return 1; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() { __syncthreads(); }

__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t /*rank*/) {
  return address;
}

template <typename T>
__device__ __forceinline__ T& cluster_memory(uint32_t address) {
  return *static_cast<T*>(__cvta_shared_to_generic(address));
}
__device__ __forceinline__ float cluster_load_float(uint32_t address) {
  return cluster_memory<float>(address);
}
__device__ __forceinline__ uint32_t cluster_load_uint(uint32_t address) {
  return cluster_memory<uint32_t>(address);
}
__device__ __forceinline__ float2 cluster_load_float2(uint32_t address) {
  return cluster_memory<float2>(address);
}
__device__ __forceinline__ float4 cluster_load_float4(uint32_t address) {
  return cluster_memory<float4>(address);
}
template <typename T>
__device__ __forceinline__ void cluster_store(uint32_t address, T value) {
  cluster_memory<T>(address) = value;
}

#endif

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

}  // namespace astrai

#endif  // __CUDACC__
