// Shared-memory tiles that ldmatrix reads without bank conflicts, and ldmatrix itself.
//
// A tile is row-major, each row cut in 16-byte chunks. An 8x8 matrix of ldmatrix is one chunk of 8
// neighbouring rows, which must lie in 8 different groups of 4 banks:
//   rows of 128 bytes or a multiple: chunk c of row r is stored at position c ^ (r % 8), which also
//     spreads the 16-byte cp.async writes of one row;
//   other rows: they are padded to an odd number of chunks.
#pragma once

#include <cstdint>

#include "kernels/common/ptx.cuh"
#include "kernels/common/smem.cuh"

namespace astrai {

template <int kRowBytes>
struct TileRows {
  static_assert(kRowBytes % 16 == 0, "a row is whole chunks");
  static constexpr bool kSwizzled = kRowBytes % 128 == 0;
  // Bytes from row to row.
  static constexpr int kStride = kSwizzled ? kRowBytes : (kRowBytes / 16 | 1) * 16;

  // Byte offset of a chunk.
  static __host__ __device__ constexpr uint32_t offset(int row, int chunk) {
    const int position = kSwizzled ? chunk ^ (row & 7) : chunk;
    return static_cast<uint32_t>(row) * kStride + (static_cast<uint32_t>(position) << 4);
  }
};

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

// Walks the blocks of 16 rows and 32 bytes (two chunks) of a tile for one lane. Blocks start at
// multiples of 8 rows, so a swizzle depends on the lane alone: a step down is a constant, a step
// right one XOR, or a constant where rows are padded.
template <int kRowBytes>
struct LdmatrixWalk {
  using Rows = TileRows<kRowBytes>;

  uint32_t row_offset;  // bytes to the lane's row
  uint32_t position;    // of the lane's chunk in block 0, in bytes

  __host__ __device__ explicit constexpr LdmatrixWalk(LdmatrixLane lane)
      : row_offset(static_cast<uint32_t>(lane.row) * Rows::kStride),
        position(Rows::offset(lane.row, lane.chunk) - row_offset) {}

  // Offset of the lane's 16 bytes in block `col_block` of the rows from `row` on, a multiple of 8.
  __host__ __device__ constexpr uint32_t at(int row, int col_block) const {
    const uint32_t start = row_offset + static_cast<uint32_t>(row) * Rows::kStride;
    if constexpr (Rows::kSwizzled) {
      return start + (position ^ (static_cast<uint32_t>(col_block & 3) << 5)) +
             (static_cast<uint32_t>(col_block >> 2) << 7);
    } else {
      return start + position + (static_cast<uint32_t>(col_block) << 5);
    }
  }
};

#ifdef __CUDACC__

// Four 8x8 matrices from shared memory; see the lane maps above for `address`.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  ptx::ldmatrix_x4(r, address);
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  ptx::ldmatrix_x4_trans(r, address);
}

#endif  // __CUDACC__

}  // namespace astrai
