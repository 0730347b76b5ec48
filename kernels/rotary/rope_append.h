// Rotary position embedding of q and k, and the write of k and v into a paged cache, in one launch.
//
// Rotation as in rotary.h. What a decode or prefill step does between its projections and attention
// thereby reads and writes every element once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/rotary/rotary.h"

namespace astrai::rotary {

// Keys or values of new tokens, [tokens, kv_heads, dim], and the cache [pages, page_size, kv_heads,
// dim] that takes them. Strides are in elements and may be anything, the last dimension has stride
// 1; a stride of a dimension of size 1 is ignored. Pointers need the alignment of one element only.
// The two must not overlap.
struct AppendedOperand {
  const void* in = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  void* cache = nullptr;
  int64_t page_stride = 0;
  int64_t row_stride = 0;  // from token to token of a page
  int64_t cache_head_stride = 0;
  // For a cache of e4m3, the dequantisation step: the number, times what the device pointer holds
  // if it is not null.
  float scale = 1.0f;
  const float* scale_pointer = nullptr;
};

struct RopeAppendParams {
  DType dtype = DType::kBF16;        // of q, k and v: kBF16 or kFP16
  DType cache_dtype = DType::kBF16;  // like dtype, or kE4M3
  int64_t tokens = 0;
  int kv_heads = 0;
  int head_dim = 0;    // of q and k
  int v_head_dim = 0;  // of v
  // Even, up to head_dim; elements past it are passed through. 0: nothing is rotated, and angles
  // and positions are not looked at.
  int rotary_dim = 0;
  Pairing pairing = Pairing::kInterleaved;

  RotaryOperand q;  // its own number of heads, which may be 0; batch strides are not looked at
  AppendedOperand k, v;

  const float* angles = nullptr;    // [max_pos, rotary_dim], see AngleSource::kTable
  const void* positions = nullptr;  // [tokens] as in RotaryParams
  bool positions_are_int64 = false;
  int64_t max_pos = 0;

  // int32 or int64 [tokens], contiguous: token t becomes row slot % page_size of page slot /
  // page_size. A slot outside [0, slot_count) writes nothing.
  const void* slots = nullptr;
  bool slots_are_int64 = false;
  int64_t slot_count = 0;  // pages * page_size
  // A power of two, unless each page of both caches follows the one before as its rows do.
  int page_size = 1;
};

// Rotates q, and writes k (rotated) and v into the cache, on `stream` of the current device. Needs
// compute capability 8.0. Products are fp32 with one rounding at the store; elements that are not
// rotated keep their bits in a cache of `dtype`. A cache of e4m3 gets the value divided by the
// step, rounded to nearest even: beyond +-448 it saturates, NaN stays NaN.
//
// Two tokens of one launch must not have the same slot. Nothing to do returns cudaSuccess without a
// launch. Params that the kernel cannot take (see can_implement in rope_append_plan.h) return
// cudaErrorInvalidValue and touch nothing.
cudaError_t launch_rope_append(const RopeAppendParams& params, cudaStream_t stream);

}  // namespace astrai::rotary
