// What every module of kernels offers beside its operators.
//
//     direct(*tensors) -> bool       whether the operator may be called right away, see below
//     why_no_device() -> str         empty, or why kernels cannot run on this machine
//     build_info() -> dict           {"name", "archs", "cuda"}
//     use_exchange_api(bool) -> bool chooses the way tensors are read, see torch_api.h; for tests
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>

namespace astrai::bindings {

// direct(*tensors): every argument is None or exactly a Tensor or Parameter, and no dispatch mode,
// function mode, functorch transform or jit trace is active. Everything else goes to the registered
// operator, which torch can trace, batch or dispatch on a subclass.
PyObject* direct(PyObject* const* args, Py_ssize_t count);

// Adds the functions above. `functions` ends with a null entry and must live as long as the
// process: it holds the METH_FASTCALL operators, which pybind11's own dispatch would slow down
// severalfold.
void define_module(pybind11::module_& module, const char* name, PyMethodDef* functions);

}  // namespace astrai::bindings

// One row of such a table. METH_FASTCALL functions have another type than PyCFunction says.
#define ASTRAI_FASTCALL(name, function, doc)                                \
  {name,                                                                    \
   reinterpret_cast<PyCFunction>(                                           \
       reinterpret_cast<void (*)()>(&::astrai::bindings::entry<function>)), \
   METH_FASTCALL, doc}
