// What decode and prefill decide alike: whether tensor cores can be used, for which head dims the
// kernels are compiled, and what takes shared memory. Plain host code.
#pragma once

#include <initializer_list>

#include "kernels/attention/attention.h"

namespace astrai::attention {

enum class Variant {
  kMma,     // tensor cores; rows of q, k, v and out are 16-byte aligned
  kScalar,  // any alignment; the only variant in builds with -DASTRAI_NO_MMA
};

// Rows of one m block of the tensor cores' instruction.
inline constexpr int kMmaRows = 16;

// Head dims of a compiled kernel; smaller ones run in the next larger, with zeros for what is
// missing.
struct HeadDims {
  int qk;
  int v;
};

// The kernel for the head dims of a launch, which supports_head_dims accepts.
constexpr HeadDims kernel_dims(int head_dim, int v_head_dim) {
  if (head_dim == 192 && v_head_dim == 128) return {192, 128};
  for (const int dim : {64, 96, 128, 192}) {
    if (head_dim <= dim) return {dim, dim};
  }
  return {256, 256};
}

// Bytes from row to row of a tile in shared memory (TileRows of kernels/common/ldmatrix.cuh).
constexpr int tile_row_bytes(int dim, int element_bytes) {
  const int bytes = dim * element_bytes;
  return bytes % 128 == 0 ? bytes : (bytes / 16 | 1) * 16;
}

// Bytes of shared memory that the system takes for each block.
inline constexpr int kReservedSmem = 1024;

// The alignment that the MMA kernels need: every row of q, k, v, out and of the new keys and values
// starts at a multiple of 16 bytes, and ends at one.
bool rows_are_aligned(const AttentionParams& params);

Variant choose_variant(const AttentionParams& params);

}  // namespace astrai::attention
