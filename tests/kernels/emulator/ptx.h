// What kernels/common/ptx.cuh offers, for the CPU. See there for the instructions.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/kernels/emulator/device.h"
#include "tests/kernels/emulator/float_bits.h"

namespace astrai::ptx {

inline int tid_x_here() { return static_cast<int>(threadIdx.x); }

// ---- Arithmetic ---------------------------------------------------------------------------------

inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t copies = 0;  // 0xff in the bytes that are eight copies of a bit
  for (int i = 0; i < 4; ++i) copies |= (selector >> (4 * i) & 8u) == 0 ? 0u : 0xffu << (8 * i);
  const uint32_t bytes = __byte_perm(a, b, selector);
  const uint32_t upper_bits = (bytes >> 7 & 0x01010101u) * 0xffu;
  return (bytes & ~copies) | (upper_bits & copies);
}

inline float flush_denormal(float x) { return std::fabs(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
inline float ex2_approx_ftz(float x) { return flush_denormal(exp2f(flush_denormal(x))); }

inline uint32_t pack_halves(uint16_t high, uint16_t low) { return uint32_t{high} << 16 | low; }
inline uint32_t cvt_bf16x2(float high, float low) {
  return pack_halves(emulator::float_to_bf16(high), emulator::float_to_bf16(low));
}
inline uint32_t cvt_f16x2(float high, float low) {
  return pack_halves(emulator::float_to_fp16(high), emulator::float_to_fp16(low));
}
uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c);
uint32_t mul_f16x2(uint32_t a, uint32_t b);

uint32_t cvt_f16x2_e4m3x2(uint16_t codes);
uint16_t cvt_e4m3x2_satfinite(float high, float low);

// ---- Tensor cores, ldmatrix ---------------------------------------------------------------------

void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void ldmatrix_x4(uint32_t (&r)[4], uint32_t address);
void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address);

// ---- Asynchronous copies ------------------------------------------------------------------------

inline uint64_t createpolicy_evict_first() { return 0; }
void cp_async_cg_16(uint32_t shared, const void* source, int bytes);
inline void cp_async_cg_16(uint32_t shared, const void* source, int bytes, uint64_t /*policy*/) {
  cp_async_cg_16(shared, source, bytes);
}
inline void cp_async_commit_group() { emulator::async_commit(); }
template <int kNewestLeft>
void cp_async_wait_group() {
  emulator::async_wait(kNewestLeft);
}

// ---- Global memory ------------------------------------------------------------------------------

// What holds for every access: it is aligned, and comes after griddepcontrol.wait.
inline void check_access(const void* address, size_t bytes, const char* instruction) {
  emulator::require_wait(instruction);
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
    emulator::fail("%s: address %p is not aligned to %zu bytes", instruction, address, bytes);
  }
}
template <typename T, int kCount>
void ld_global(T (&v)[kCount], const void* address) {
  check_access(address, sizeof(v), "ld.global");
  std::memcpy(v, address, sizeof(v));
}
template <typename T, int kCount>
void st_global(void* address, const T (&v)[kCount]) {
  check_access(address, sizeof(v), "st.global");
  std::memcpy(address, v, sizeof(v));
}
template <typename T>
T ld_acquire_gpu(const T* address) {
  check_access(address, sizeof(T), "ld.acquire");
  emulator::yield_in_loop();
  return *address;
}
template <typename T>
void st_release_gpu(T* address, T value) {
  check_access(address, sizeof(T), "st.release");
  emulator::yield();
  *address = value;
  emulator::yield();
}

// ---- Programmatic dependent launch --------------------------------------------------------------

inline void griddepcontrol_wait() { emulator::wait_for_previous_grid(); }
inline void griddepcontrol_launch_dependents() {}

// ---- Clusters -----------------------------------------------------------------------------------

inline uint32_t cluster_ctarank() { return emulator::cluster_rank(); }
inline uint32_t cluster_nctarank() { return emulator::cluster_size(); }
inline void barrier_cluster_arrive_release() { emulator::cluster_arrive(); }
inline void barrier_cluster_wait_acquire(emulator::Place place = emulator::Place::here()) {
  emulator::cluster_wait(place);
}
inline uint32_t mapa(uint32_t address, uint32_t rank) {
  return emulator::map_shared_address(address, rank);
}

template <typename T>
T ld_shared_cluster(uint32_t address) {
  T value;
  std::memcpy(&value,
              emulator::resolve_shared(address, sizeof(T), sizeof(T), "ld.shared::cluster",
                                       emulator::Window::kCluster),
              sizeof(T));
  return value;
}
template <typename T>
void st_shared_cluster(uint32_t address, T value) {
  std::memcpy(emulator::resolve_shared(address, sizeof(T), sizeof(T), "st.shared::cluster",
                                       emulator::Window::kCluster),
              &value, sizeof(T));
}
inline float ld_shared_cluster_f32(uint32_t address) { return ld_shared_cluster<float>(address); }
inline uint32_t ld_shared_cluster_u32(uint32_t address) {
  return ld_shared_cluster<uint32_t>(address);
}
inline float2 ld_shared_cluster_v2_f32(uint32_t address) {
  return ld_shared_cluster<float2>(address);
}
inline float4 ld_shared_cluster_v4_f32(uint32_t address) {
  return ld_shared_cluster<float4>(address);
}
inline void st_shared_cluster_f32(uint32_t address, float value) {
  st_shared_cluster(address, value);
}
inline void st_shared_cluster_u32(uint32_t address, uint32_t value) {
  st_shared_cluster(address, value);
}
inline void st_shared_cluster_v4_f32(uint32_t address, float4 value) {
  st_shared_cluster(address, value);
}

}  // namespace astrai::ptx
