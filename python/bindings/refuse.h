// Why a Python object is no tensor for a kernel: the slow way to an exception.
#pragma once

#include <Python.h>

#include "python/bindings/torch_api.h"

namespace astrai::bindings {

// An object that is not exactly torch.Tensor or torch.nn.Parameter.
[[noreturn]] void refuse_type(const char* function, const char* name, PyObject* object,
                              const TorchApi& torch);

// A tensor of the right type that gives out no memory: functional, vmap, sparse, meta, conjugated.
// An exception of torch that is already set becomes the cause.
[[noreturn]] void refuse_unreadable(const char* function, const char* name, PyObject* object);

// Returns if the conjugate bit is not set.
void refuse_conjugated(const char* function, const char* name, PyObject* object);

}  // namespace astrai::bindings
