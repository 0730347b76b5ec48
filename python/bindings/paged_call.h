// Arguments of attention over a paged cache, checked and laid out for the kernels.
#pragma once

#include <Python.h>

#include "kernels/attention/attention.h"
#include "python/bindings/tensor.h"

namespace astrai::bindings {

//     q                 [batch, q_heads, head_dim], one query a request; with qo_indptr packed
//                       [tokens, q_heads, head_dim]; bf16 or fp16, last stride 1
//     k_cache           [slots, kv_heads, head_dim] or [pages, page_size, kv_heads, head_dim], like
//     q
//                       or float8_e4m3fn; last stride 1
//     v_cache           likewise with v_head_dim, like k_cache
//     req_to_token      int32 [requests, max_len] of slots, last stride 1, and
//     req_pool_indices  int32 contiguous [batch]: the row of each request; both None with
//     block_table       None, or int32 [batch, max_pages] of pages, last stride 1
//     kv_indptr         int32 contiguous [batch + 1]
//     qo_indptr         None, or int32 contiguous [batch + 1]
//     max_q_len         None, or an int: no request has more queries
//     new_k, new_v      None, or [tokens of q, kv_heads, dim] like q, last stride 1: put into the
//                       caches, which are written
//     mask              None, or bool [batch|1, width] or [batch|1, q_heads|1, rows, width]; last
//                       stride 1
//     is_causal .. v_scale: see attention_features.h
//     out               [tokens of q, q_heads, v_head_dim] like q, written; last stride 1
//     lse               None, or fp32 contiguous [tokens of q, q_heads], written
constexpr Py_ssize_t kPagedArguments = 21;

// `most_queries`: of a request, where max_q_len is None; also what max_q_len may be at most.
attention::AttentionParams read_paged(Call& call, PyObject* const* args, int most_queries);

}  // namespace astrai::bindings
