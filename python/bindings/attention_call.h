// Arguments of attn_decode and attn_prefill, checked and laid out for the kernels.
#pragma once

#include <Python.h>

#include "kernels/attention/attention.h"
#include "python/bindings/tensor.h"

namespace astrai::bindings {

// Both take the same eight positional arguments:
//
//     q          [batch, q_len, q_heads, head_dim]   bf16 or fp16, last stride 1
//     k, v       [batch, kv_len, kv_heads, head_dim] like q
//     mask       None, or bool [batch|1, kv_len], [batch|1, q_len|1, kv_len] or
//                [batch|1, q_heads|1, q_len|1, kv_len]; true = may attend; last stride 1
//     is_causal  bool, aligned to the bottom right
//     scale      None for 1 / sqrt(head_dim), or a finite float
//     out        like q, written; last stride 1
//     lse        None, or fp32 contiguous [batch, q_len, q_heads], written
constexpr Py_ssize_t kAttentionArguments = 8;

// Params point into the tensors of `args`. Throws PythonError.
attention::DenseParams read_attention(Call& call, PyObject* const* args);

}  // namespace astrai::bindings
