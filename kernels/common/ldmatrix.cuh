// Shared-memory tiles of 16-bit floats that ldmatrix reads without bank conflicts, and ldmatrix
// itself.
//
// A tile is row-major with rows of 128 bytes or a multiple. Each row is cut in 16-byte chunks, and
// chunk c of row r is stored at position c ^ (r % 8): the 8 rows of an 8x8 matrix then lie in 8
// different groups of 4 banks, and so do the 16-byte cp.async writes of one row.
#pragma once

#include <cstdint>

namespace astrai {

// Byte offset of chunk `chunk` of row `row` in a swizzled tile.
template <int kRowBytes>
__host__ __device__ constexpr uint32_t swizzled_offset(int row, int chunk) {
  static_assert(kRowBytes % 128 == 0, "a row holds whole groups of 8 chunks");
  return static_cast<uint32_t>(row) * kRowBytes + (static_cast<uint32_t>(chunk ^ (row & 7)) << 4);
}

// Rows and chunks that one lane addresses in an ldmatrix.x4 (lanes 8 i .. 8 i + 7 give the rows of
// matrix i), relative to the corner of a 16 x 16 block, so that the four registers come out in the
// order mma wants.
struct LdmatrixLane {
  int row;
  int chunk;  // 0 or 1: columns 0..7 or 8..15
};

// Matrices in the order (rows 0, cols 0), (rows 8, cols 0), (rows 0, cols 8), (rows 8, cols 8):
// without transpose the A operand of a row-major [m][k] block; with transpose the B operands of two
// neighbouring n blocks of a row-major [k][n] block (registers 0, 1 then 2, 3).
__host__ __device__ constexpr LdmatrixLane ldmatrix_rows_first(int lane) {
  return {lane % 8 + ((lane >> 3) & 1) * 8, lane >> 4};
}

// Matrices in the order (rows 0, cols 0), (rows 0, cols 8), (rows 8, cols 0), (rows 8, cols 8):
// without transpose the B operands of two neighbouring n blocks of a row-major [n][k] block.
__host__ __device__ constexpr LdmatrixLane ldmatrix_cols_first(int lane) {
  return {lane % 8 + (lane >> 4) * 8, (lane >> 3) & 1};
}

// Walks 16 x 16 blocks of a swizzled tile for one lane. Block rows start at multiples of 8 rows, so
// the swizzle depends on the lane alone and a step down is a constant; a step right is one XOR.
template <int kRowBytes>
struct LdmatrixWalk {
  uint32_t row_offset;  // bytes to the lane's row
  uint32_t swizzle;     // (lane's chunk ^ lane's row % 8) * 16

  __host__ __device__ explicit constexpr LdmatrixWalk(LdmatrixLane lane)
      : row_offset(static_cast<uint32_t>(lane.row) * kRowBytes),
        swizzle(static_cast<uint32_t>(lane.chunk ^ (lane.row & 7)) << 4) {}

  // Offset of the lane's 16 bytes in the block at (row, 16 * col_block); row is a multiple of 8.
  __host__ __device__ constexpr uint32_t at(int row, int col_block) const {
    return row_offset + static_cast<uint32_t>(row) * kRowBytes +
           (swizzle ^ (static_cast<uint32_t>(col_block & 3) << 5)) +
           (static_cast<uint32_t>(col_block >> 2) << 7);
  }
};

#ifdef __CUDACC__

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8x8 matrices from shared memory; see the lane maps above for `address`.
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

#endif  // __CUDACC__

}  // namespace astrai
