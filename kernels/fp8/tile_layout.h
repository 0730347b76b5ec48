// Where the codes of a matrix product's operand tile lie in shared memory, and which addresses the
// lanes of a warp give to ldmatrix.
//
// A tile is [rows][kK] bytes, K innermost, in chunks of 16 bytes. The chunk's number is XORed with
// bits of the row, so that 8 neighbouring rows at one chunk lie in all 32 banks.
#pragma once

#include "kernels/fp8/formats.h"

namespace astrai::fp8 {

// Byte offset of chunk `chunk` (16 codes) of row `row`.
template <int kK>
ASTRAI_FP8_HOST_DEVICE constexpr int tile_at(int row, int chunk) {
  static_assert(kK == 32 || kK == 64 || kK == 128, "a row is 2, 4 or 8 chunks");
  constexpr int kChunks = kK / 16;
  return row * kK + (chunk ^ (row / (8 / kChunks) % kChunks)) * 16;
}

// The row and chunk that a lane gives to ldmatrix.x4, from the first of the fragment. The four
// matrices are the registers of mma m16n8k32: a0..a3, or b0 and b1 of 8 columns of N and of the
// next 8.
ASTRAI_FP8_HOST_DEVICE constexpr int a_lane_row(int lane) { return lane % 16; }
ASTRAI_FP8_HOST_DEVICE constexpr int a_lane_chunk(int lane) { return lane / 16; }
ASTRAI_FP8_HOST_DEVICE constexpr int b_lane_row(int lane) { return lane / 16 * 8 + lane % 8; }
ASTRAI_FP8_HOST_DEVICE constexpr int b_lane_chunk(int lane) { return lane / 8 % 2; }

// The same from a base: lane_base = tile_at(first row + lane's row, lane's chunk), where first row
// is a multiple of 8. The XOR's source bits are those of row % 8, which a step of 16 rows leaves
// alone; a segment of 32 codes is two chunks, whose bits nothing is added to.
template <int kK>
ASTRAI_FP8_HOST_DEVICE constexpr int fragment_at(int lane_base, int step, int segment) {
  return (lane_base + step * 16 * kK) ^ (segment << 5);
}

}  // namespace astrai::fp8
