// The B operands of both products of attention, from tiles of K and V in shared memory. K and V
// have the type of Q, or are e4m3 and converted on the way.
//
// For 16-bit elements ldmatrix gives the operands as they are. For e4m3, ldmatrix moves pairs of
// bytes as if they were 16-bit elements, which leaves the dimensions in another order:
//
//   K: a lane gets 4 neighbouring bytes of its key, dims 4 q .. 4 q + 3 with q = lane % 4. They
//      stand for the indices 2 q, 2 q + 1, 8 + 2 q and 9 + 2 q of the product, whose order of
//      summation is free. Q must be loaded under the same permutation: index k of a block of 16
//      holds dim k_dim(k).
//   V: with transpose a lane gets two neighbouring dims of two keys. Put together by key, they are
//      operands of two n blocks: the even and the odd dims of a block of 16. So column n of block
//      `parity` of the accumulator is dim v_dim(parity, n), and a lane holds 4 neighbouring dims.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/common/fp8.cuh"
#include "kernels/common/ldmatrix.cuh"

namespace astrai::attention {

// T: type of Q. E: type of K and V. kRowBytes: bytes of a row of the tile, without padding.
template <typename T, typename E, int kRowBytes>
struct KvFragments {
  static constexpr bool kIsFp8 = sizeof(E) == 1;
  static constexpr int kDims = 16 / sizeof(E) * 2;  // that one load covers
  static constexpr int kBlocks = kDims / 16;        // blocks of 16 dims in them
  static_assert(kIsFp8 || sizeof(E) == sizeof(T), "K and V are like Q, or e4m3");

  // Dim within a block of 16 that index k of the first product stands for.
  static __host__ __device__ constexpr int k_dim(int k) {
    return kIsFp8 ? k % 8 / 2 * 4 + k / 8 * 2 + k % 2 : k;
  }
  // Dim within a block of 16 that column n of the second product's n block `half` (0 or 1) is.
  static __host__ __device__ constexpr int v_dim(int half, int n) {
    return kIsFp8 ? 2 * n + half : 8 * half + n;
  }

  LdmatrixWalk<kRowBytes> k_walk;
  LdmatrixWalk<kRowBytes> v_walk;

  __host__ __device__ explicit constexpr KvFragments(int lane)
      : k_walk(ldmatrix_cols_first(lane)), v_walk(ldmatrix_rows_first(lane)) {}

#ifdef __CUDACC__

  // Operands of S = Q K^T for the keys key .. key + 15 of the tile at shared memory address `tile`
  // and dims kDims * step ...: of block i, b[i][0] and b[i][1] are the n block of the first 8 keys,
  // b[i][2] and b[i][3] that of the others.
  __device__ __forceinline__ void load_k(uint32_t (&b)[kBlocks][4], uint32_t tile, int key,
                                         int step) const {
    if constexpr (kIsFp8) {
      uint32_t
          bytes[4];  // (keys 0..7, dims 0..15), (0..7, 16..31), (8..15, 0..15), (8..15, 16..31)
      ldmatrix_x4(bytes, tile + k_walk.at(key, step));
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) {
        from_e4m3x4<T>(bytes[reg], b[reg % 2][reg / 2 * 2], b[reg % 2][reg / 2 * 2 + 1]);
      }
    } else {
      ldmatrix_x4(b[0], tile + k_walk.at(key, step));
    }
  }

  // Operands of O += P V for the same keys and dims: of block i, b[i][0] and b[i][1] are n block 0
  // (see v_dim), b[i][2] and b[i][3] n block 1.
  __device__ __forceinline__ void load_v(uint32_t (&b)[kBlocks][4], uint32_t tile, int key,
                                         int step) const {
    if constexpr (kIsFp8) {
      uint32_t
          bytes[4];  // (keys 0..7, dims 0..15), (8..15, 0..15), (0..7, 16..31), (8..15, 16..31)
      ldmatrix_x4_trans(bytes, tile + v_walk.at(key, step));
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) {
        // [key 0: dims 0, 1][key 1: dims 0, 1] -> [dim 0: keys 0, 1][dim 1: keys 0, 1]
        from_e4m3x4<T>(__byte_perm(bytes[reg], 0, 0x3120), b[reg / 2][reg % 2],
                       b[reg / 2][2 + reg % 2]);
      }
    } else {
      ldmatrix_x4_trans(b[0], tile + v_walk.at(key, step));
    }
  }

#endif  // __CUDACC__
};

}  // namespace astrai::attention
