// Arguments of rope_append_kv, checked and laid out for the kernel.
#pragma once

#include <Python.h>

#include "kernels/rotary/rope_append.h"
#include "python/bindings/tensor.h"

namespace astrai::bindings {

//     q              None, or [tokens, q_heads, head_dim] like k
//     k              [tokens, kv_heads, head_dim], bf16 or fp16, last stride 1
//     v              [tokens, kv_heads, v_head_dim] like k
//     cos_sin_cache  None for no rotation, or fp32 contiguous [max_pos, rotary_dim]
//     positions      int32 or int64 contiguous [tokens]; not looked at without cos_sin_cache
//     k_cache        [slots, kv_heads, head_dim] or [pages, page_size, kv_heads, head_dim], like k
//     or
//                    float8_e4m3fn, last stride 1, written
//     v_cache        likewise with v_head_dim, like k_cache, written
//     slots          int32 or int64 contiguous [tokens]
//     interleaved    bool
//     rotary_dim     None for the width of cos_sin_cache, or that number
//     k_scale, v_scale  see read_step
//     q_out          None if q is, or like q, written; q itself, or apart from it in memory
constexpr Py_ssize_t kRopeAppendArguments = 13;
rotary::RopeAppendParams read_rope_append(Call& call, PyObject* const* args);

// Whether there is anything to launch for.
inline bool has_work(const rotary::RopeAppendParams& params) {
  return params.tokens > 0 && params.q.heads + params.kv_heads > 0;
}

}  // namespace astrai::bindings
