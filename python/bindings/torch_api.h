// What the bindings use of torch, all of it looked up at run time through Python.
//
// No symbol of torch is linked, so that one module works with every torch from 2.6 on. Two paths
// read a tensor:
//
//   * torch >= 2.10 publishes a table of C functions (DLPack 1.2),
//   Tensor.__dlpack_c_exchange_api__:
//     reading a tensor is one C call without a Python object being made.
//   * torch 2.6 .. 2.9 has only torch.Tensor.__dlpack__, which makes a capsule.
#pragma once

#include <Python.h>
#include <dlpack/dlpack.h>

namespace astrai::bindings {

struct TorchApi {
  // Exact types that a binding reads.
  PyObject* tensor_type;
  PyObject* parameter_type;

  // Null: read tensors through __dlpack__.
  const DLPackExchangeAPI* exchange;

  // Unbound methods and attributes of a tensor, called without a lookup by name.
  PyObject* is_neg;         // method descriptor
  PyObject* requires_grad;  // attribute descriptor

  // Functions of torch._C and torch. Each reads a piece of thread-local state.
  PyObject* is_grad_enabled;
  PyObject* dispatch_stack_depth;
  PyObject* function_stack_depth;
  PyObject* functorch_level;  // None outside vmap, grad, jvp, functionalize
  PyObject* jit_tracing_state;
  PyObject* increment_version;
  PyObject* current_raw_stream;  // null in a torch built without CUDA

  PyObject* strided;
  PyObject* uint8;
  PyObject* float8_e4m3fn;
  PyObject* float8_e5m2;

  bool is_plain_tensor(PyObject* object) const {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return type == tensor_type || type == parameter_type;
  }
};

// Imports torch on the first call. Throws PythonError if that fails.
const TorchApi& torch_api();

// Chooses the path: false takes __dlpack__ even where torch has the C functions (for tests), true
// goes back. Returns whether the C functions are in use from now on.
bool use_exchange_api(bool wanted);

// bool(function()), int(function()) and `function() is None` for functions without arguments.
bool call_bool(PyObject* function);
long call_int(PyObject* function);
bool call_is_none(PyObject* function);

// Whether a tensor may be read through its pointer and a kernel launched on it right away. False
// while a dispatch mode, a function mode, a functorch transform or a jit trace is active: these
// must see the registered operator.
bool is_eager(const TorchApi& torch);

}  // namespace astrai::bindings
