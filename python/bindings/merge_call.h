// Arguments of merge_states, checked and laid out for the kernel.
#pragma once

#include <Python.h>

#include "kernels/attention/attention.h"
#include "python/bindings/tensor.h"

namespace astrai::bindings {

//     o_a, o_b      [..., head_dim], bf16, fp16 or fp32, one shape, contiguous
//     lse_a, lse_b  fp32 contiguous, the shape of o_a without its last dimension
//     out, lse      likewise, written; out is o_a or o_b itself, or apart from both in memory, and
//                   lse likewise
constexpr Py_ssize_t kMergeArguments = 6;
attention::MergeParams read_merge(Call& call, PyObject* const* args);

}  // namespace astrai::bindings
