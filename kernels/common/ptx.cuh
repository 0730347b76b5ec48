// PTX instructions that C++ has no name for, each wrapped once.
//
// The functions are named for their instruction and do nothing else; the headers beside this one
// give them types and a meaning. Kernels do not call them, and no other file of the project holds
// inline assembly: tests/kernels/emulator replaces this header by functions that a CPU can run.
#pragma once

#ifdef ASTRAI_EMULATE
#include "tests/kernels/emulator/ptx.h"
#elif defined(__CUDACC__)

#include <cstdint>

namespace astrai::ptx {

// threadIdx.x, read where this stands: what follows from it is not computed ahead of a loop that
// needs all registers.
__device__ __forceinline__ int tid_x_here() {
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  return tid;
}

// ---- Arithmetic ---------------------------------------------------------------------------------

// Byte i of the result is the byte of b:a that nibble i of the selector numbers, or eight copies of
// that byte's upper bit if the nibble is 8 or more (which __byte_perm cannot do).
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// 2^x to about 2 ulp; denormal inputs and results count as 0, and -inf gives 0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two fp32 to two 16-bit floats in one register, round to nearest even. sm_80.
__device__ __forceinline__ uint32_t cvt_bf16x2(float high, float low) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

__device__ __forceinline__ uint32_t cvt_f16x2(float high, float low) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// a * b + c on two bf16 each, one rounding. sm_80.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// a * b on two fp16 each; denormals are kept.
__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

#if __CUDA_ARCH__ >= 890

// Two e4m3 to two fp16, exact. sm_89.
__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2(uint16_t codes) {
  uint32_t bits;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(bits) : "h"(codes));
  return bits;
}

// Two fp32 to two e4m3, round to nearest even; beyond +-448 it saturates, NaN stays NaN. sm_89.
__device__ __forceinline__ uint16_t cvt_e4m3x2_satfinite(float high, float low) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

#endif  // sm_89

// ---- Tensor cores: see mma.cuh for the fragments. All 32 lanes take part. sm_80 -----------------

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Shared memory: 32-bit addresses of the shared window ---------------------------------------

// Four 8x8 matrices of 16-bit elements; lanes 8 i .. 8 i + 7 give the 16-byte rows of matrix i, and
// all 32 lanes take part.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// ---- Asynchronous copies: see cp_async.cuh. sm_80 -----------------------------------------------

__device__ __forceinline__ uint64_t createpolicy_evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Of the 16 bytes written, `bytes` (0 to 16) are read and the rest is zero. Both 16-byte aligned.
__device__ __forceinline__ void cp_async_cg_16(uint32_t shared, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(source),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_cg_16(uint32_t shared, const void* source, int bytes,
                                               uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared),
               "l"(source), "r"(bytes), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kNewestLeft>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewestLeft) : "memory");
}

// ---- Global memory ------------------------------------------------------------------------------
//
// The statements are volatile and name memory, so they keep their order: a kernel that works in
// place relies on its loads standing before its stores. Aligned to their own size.

__device__ __forceinline__ void ld_global(uint32_t (&v)[4], const void* address) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "l"(address)
               : "memory");
}

__device__ __forceinline__ void ld_global(uint32_t (&v)[2], const void* address) {
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(v[0]), "=r"(v[1])
               : "l"(address)
               : "memory");
}

__device__ __forceinline__ void ld_global(uint32_t (&v)[1], const void* address) {
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v[0]) : "l"(address) : "memory");
}

__device__ __forceinline__ void ld_global(uint16_t (&v)[1], const void* address) {
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v[0]) : "l"(address) : "memory");
}

__device__ __forceinline__ void st_global(void* address, const uint32_t (&v)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
}

__device__ __forceinline__ void st_global(void* address, const uint32_t (&v)[2]) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(v[0]), "r"(v[1]) : "memory");
}

__device__ __forceinline__ void st_global(void* address, const uint32_t (&v)[1]) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(v[0]) : "memory");
}

__device__ __forceinline__ void st_global(void* address, const uint16_t (&v)[1]) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"(v[0]) : "memory");
}

// Acquire and release among all threads of the GPU (scope .gpu). sm_70.
__device__ __forceinline__ uint32_t ld_acquire_gpu(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t ld_acquire_gpu(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void st_release_gpu(uint32_t* address, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_release_gpu(uint64_t* address, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// ---- Programmatic dependent launch: see dependent_launch.cuh. sm_90 -----------------------------

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Clusters: see cluster.cuh. sm_90 -----------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_nctarank() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

__device__ __forceinline__ void barrier_cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait_acquire() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address, in the cluster's shared window, of what lies at `address` in block `rank`.
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

__device__ __forceinline__ float ld_shared_cluster_f32(uint32_t address) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t ld_shared_cluster_u32(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ float2 ld_shared_cluster_v2_f32(uint32_t address) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(v.x), "=f"(v.y)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ float4 ld_shared_cluster_v4_f32(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void st_shared_cluster_f32(uint32_t address, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void st_shared_cluster_u32(uint32_t address, uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_shared_cluster_v4_f32(uint32_t address, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

#endif  // sm_90

}  // namespace astrai::ptx

#endif
