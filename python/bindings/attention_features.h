// The arguments that all attention functions share beside their tensors.
#pragma once

#include <Python.h>

#include "kernels/attention/attention.h"
#include "python/bindings/tensor.h"

namespace astrai::bindings {

// Seven arguments, in this order:
//
//     is_causal  bool, aligned to the bottom right
//     scale      None for 1 / sqrt(head_dim), or a finite float
//     window     (left, right), two ints; -1 = unlimited
//     softcap    a finite float, 0 = none
//     sinks      None, or fp32 contiguous [q_heads]
//     k_scale    None for 1, a float above 0, or an fp32 tensor of one element
//     v_scale    likewise
constexpr Py_ssize_t kFeatureArguments = 7;

// Reads them into params, whose sizes are set: a window that reaches past them becomes unlimited.
// Throws PythonError.
void read_features(Call& call, PyObject* const* args, attention::AttentionParams* params);

}  // namespace astrai::bindings
