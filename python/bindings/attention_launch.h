// From checked arguments to the launch of an attention kernel.
#pragma once

#include <Python.h>

#include "kernels/attention/attention.h"
#include "python/bindings/tensor.h"

namespace astrai::bindings {

// Memory that a call brings or that is made for it; see workspace.h.
struct LaunchMemory {
  PyObject* like;       // any tensor of the call
  PyObject* workspace;  // or None
  PyObject* spare;      // or None
};

// Whether there is anything to launch for.
bool has_work(const attention::AttentionParams& params);

// Each throws PythonError: what the kernels do not implement, a device that they are not built for,
// a workspace that is too small, a failed launch.
void run_decode(Call& call, const attention::AttentionParams& params, const LaunchMemory& memory);

// `map` null: made on the device where q is packed.
void run_prefill(Call& call, const attention::AttentionParams& params, const LaunchMemory& memory,
                 const attention::QWorkMap* map);

// Bytes that run_decode or run_prefill needs for any such call: (batch, max_q_len, q_heads,
// kv_heads, head_dim, v_head_dim, deterministic, device index), all ints. A new reference to an
// int.
constexpr Py_ssize_t kWorkspaceSizeArguments = 8;
PyObject* decode_workspace_size(const char* function, PyObject* const* args);
PyObject* prefill_workspace_size(const char* function, PyObject* const* args);

}  // namespace astrai::bindings
