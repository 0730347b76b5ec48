// Arguments of the attention functions, checked and laid out for the kernels.
//
// The functions below take their arguments as the bindings get them, all positional. Params point
// into the tensors of `args`. They throw PythonError.
#pragma once

#include <Python.h>

#include "kernels/attention/attention.h"
#include "python/bindings/tensor.h"

namespace astrai::bindings {

// Dense keys and values:
//
//     q          [batch, q_len, q_heads, head_dim]     bf16 or fp16, last stride 1
//     k          [batch, kv_len, kv_heads, head_dim]   like q, or float8_e4m3fn
//     v          [batch, kv_len, kv_heads, v_head_dim] like k
//     mask       None, or bool [batch|1, kv_len], [batch|1, q_len|1, kv_len] or
//                [batch|1, q_heads|1, q_len|1, kv_len]; true = may attend; last stride 1
//     is_causal .. v_scale: see attention_features.h
//     out        [batch, q_len, q_heads, v_head_dim] like q, written; last stride 1
//     lse        None, or fp32 contiguous [batch, q_len, q_heads], written
constexpr Py_ssize_t kDenseArguments = 13;
attention::AttentionParams read_dense(Call& call, PyObject* const* args);

// Packed queries, keys and values:
//
//     q, k, v    [tokens, heads, dim], otherwise as above
//     cu_seqlens_q, cu_seqlens_k   int32 contiguous [batch + 1]
//     max_seqlen_q, max_seqlen_k   None for the number of tokens, or an int
//     is_causal .. v_scale: see attention_features.h
//     out        [tokens of q, q_heads, v_head_dim]
//     lse        None, or fp32 contiguous [tokens of q, q_heads]
constexpr Py_ssize_t kVarlenArguments = 16;
attention::AttentionParams read_varlen(Call& call, PyObject* const* args);

// ---- Shared with the paged functions ------------------------------------------------------------

attention::Operand dense_operand(const TensorView& view);   // [batch, seq, heads, dim]
attention::Operand packed_operand(const TensorView& view);  // [tokens, heads, dim]

// int32, contiguous, [size]; `size` < 0 = any.
void require_indices(const Call& call, const TensorView& view, int64_t size, const char* layout);

// The types of q, k and v.
void read_types(const Call& call, const TensorView& q, const TensorView& k, const TensorView& v,
                attention::AttentionParams* params);

// The numbers of heads and their sizes, from the last two dimensions.
void read_heads(const Call& call, const TensorView& q, const TensorView& k, const TensorView& v,
                attention::AttentionParams* params);

// A dimension of size 1 broadcasts (stride 0), any other must be of `size`.
int64_t broadcast_stride(const Call& call, const TensorView& mask, int dim, int64_t size,
                         const char* what);

// out and lse of packed queries, [tokens, q_heads, v_head_dim] and [tokens, q_heads]; out must not
// share memory with `inputs`. `params` has its sizes.
void read_packed_outputs(Call& call, PyObject* out, PyObject* lse, const TensorView& q,
                         std::initializer_list<const TensorView*> inputs,
                         attention::AttentionParams* params);

}  // namespace astrai::bindings
