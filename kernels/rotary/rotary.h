// Rotary position embedding (RoPE) of q and k in one launch.
//
// Each pair (x1, x2) of a head is turned by the angle of its token and frequency:
//
//     y1 = x1 * cos - x2 * sin        y2 = x1 * sin + x2 * cos
//
// in fp32, with one rounding at the store. Method: Su et al., "RoFormer: Enhanced Transformer with
// Rotary Position Embedding", 2021 (interleaved pairs); GPT-NeoX and Llama as stored by Hugging
// Face pair the two halves instead.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace astrai::rotary {

// Which elements of a head form pair i, 0 <= i < rotary_dim / 2.
enum class Pairing {
  kInterleaved,  // (2i, 2i + 1): GPT-J, Llama as first published
  kHalfSplit,    // (i, i + rotary_dim / 2): GPT-NeoX, Hugging Face
};

// One tensor [batch, tokens, heads, head_dim] and its result of the same shape.
//
// Strides are in elements and may be anything, the last dimension has stride 1; a stride of a
// dimension of size 1 is ignored. Pointers need the alignment of one element only: 16-byte accesses
// are taken where pointers and strides allow them, narrower ones elsewhere.
//
// In place: `out == in` with equal strides. Otherwise the two must not overlap.
struct RotaryOperand {
  const void* in = nullptr;
  void* out = nullptr;
  int heads = 0;  // 0: this operand is absent
  int64_t in_batch_stride = 0, in_token_stride = 0, in_head_stride = 0;
  int64_t out_batch_stride = 0, out_token_stride = 0, out_head_stride = 0;
};

// Where the cosines and sines of a token come from. Both arrays are fp32 and contiguous.
enum class AngleSource {
  kPerToken,  // angles [batch * tokens, rotary_dim / 2, 2], last dimension (cos, sin)
  kTable,     // angles [max_pos, rotary_dim], rotary_dim / 2 cosines and then as many sines;
              // row = positions[batch * tokens + token]
};

struct RotaryParams {
  using Source = AngleSource;
  static constexpr AngleSource kPerToken = AngleSource::kPerToken;
  static constexpr AngleSource kTable = AngleSource::kTable;

  DType dtype = DType::kBF16;  // of q and k: kBF16 or kFP16
  int batch = 0;
  int64_t tokens = 0;  // per batch element
  int head_dim = 0;
  int rotary_dim = 0;  // even, 2..head_dim; elements past it are passed through bit for bit
  Pairing pairing = Pairing::kInterleaved;
  RotaryOperand q, k;

  const float* angles = nullptr;
  AngleSource source = AngleSource::kPerToken;

  // kTable only: int32 or int64 [batch * tokens], contiguous. A position outside [0, max_pos) reads
  // nothing: the rotated part of that token is written as NaN, so that the fault shows.
  const void* positions = nullptr;
  bool positions_are_int64 = false;
  int64_t max_pos = 0;
};

// Rotates q and k on `stream` of the current device. Needs compute capability 8.0.
//
// Nothing to do (a size of 0) returns cudaSuccess without a launch. Params that the kernel cannot
// take (see can_implement in plan.h) return cudaErrorInvalidValue and touch nothing.
cudaError_t launch_rotary(const RotaryParams& params, cudaStream_t stream);

}  // namespace astrai::rotary
