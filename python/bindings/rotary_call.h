// Arguments of rotary_emb and rotary_embed, checked and laid out for the kernel.
#pragma once

#include <Python.h>

#include "kernels/rotary/rotary.h"
#include "python/bindings/tensor.h"

namespace astrai::bindings {

// Interleaved pairs of the whole head_dim, angles per token:
//
//     x          [tokens, heads, head_dim] or [batch, tokens, heads, head_dim], bf16 or fp16, last
//                stride 1
//     freqs_cis  fp32 contiguous, the token dimensions of x, then [head_dim / 2, 2] = (cos, sin)
//     out        like x, written; x itself, or apart from it in memory
constexpr Py_ssize_t kRotaryEmbArguments = 3;
rotary::RotaryParams read_rotary_emb(Call& call, PyObject* const* args);

// Angles from a table by position:
//
//     q, k           like x above, k or None
//     cos_sin_cache  fp32 contiguous [max_pos, rotary_dim]
//     positions      int32 or int64 contiguous [tokens]; [batch, tokens] or flat for 4-D q
//     interleaved    bool
//     rotary_dim     None for the width of cos_sin_cache, or that number
//     q_out, k_out   like q and k, written; q and k themselves, or apart from all in memory
constexpr Py_ssize_t kRotaryEmbedArguments = 8;
rotary::RotaryParams read_rotary_embed(Call& call, PyObject* const* args);

// `object`: None for the width of `cache` [max_pos, rotary_dim], or that number.
int64_t read_rotary_dim(const Call& call, PyObject* object, const TensorView& cache,
                        int64_t head_dim);

// Whether there is anything to launch for.
inline bool has_work(const rotary::RotaryParams& params) {
  return params.batch > 0 && params.tokens > 0 && params.q.heads + params.k.heads > 0;
}

}  // namespace astrai::bindings
