// Warp-level matrix multiply m16n8k16 on 16-bit floats with fp32 accumulation (sm_80 and newer).
//
// PTX: mma.sync.aligned.m16n8k16.row.col. D[16][8] += A[16][16] * B[16][8], spread over 32 lanes:
//   A: 4 registers of 2 elements, B: 2 registers of 2 elements, C and D: 4 fp32 registers.
// Which element a lane holds is given by the maps below (PTX ISA, "Matrix fragments for
// mma.m16n8k16"). They are plain constexpr functions, so tests check them without a GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/common/ptx.cuh"

namespace astrai {

struct MatrixCoord {
  int row;
  int col;
};

// Element (m, k) of A in the low half (part 0) or high half (part 1) of register `reg`.
__host__ __device__ constexpr MatrixCoord mma_a_coord(int lane, int reg, int part) {
  return {lane / 4 + (reg & 1) * 8, (lane % 4) * 2 + (reg >> 1) * 8 + part};
}

// Element (k, n) of B in the low half (part 0) or high half (part 1) of register `reg`.
__host__ __device__ constexpr MatrixCoord mma_b_coord(int lane, int reg, int part) {
  return {(lane % 4) * 2 + reg * 8 + part, lane / 4};
}

// Element (m, n) of C or D in register `reg`. Registers 0 and 1 are one row, 2 and 3 the row 8
// below.
__host__ __device__ constexpr MatrixCoord mma_c_coord(int lane, int reg) {
  return {lane / 4 + (reg >> 1) * 8, (lane % 4) * 2 + (reg & 1)};
}

#ifdef __CUDACC__

// c += a * b
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                            uint32_t b0, uint32_t b1) {
  ptx::mma_m16n8k16_bf16(c, a, b0, b1);
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&c)[4], const uint32_t (&a)[4],
                                                     uint32_t b0, uint32_t b1) {
  ptx::mma_m16n8k16_f16(c, a, b0, b1);
}

#endif  // __CUDACC__

}  // namespace astrai
