// Device memory that a launch needs beside the tensors of its call.
#pragma once

#include <Python.h>

#include <cstddef>

#include "python/bindings/errors.h"
#include "python/bindings/tensor.h"

namespace astrai::bindings {

// New memory from torch's allocator, on the device of the tensor `like`, so that it takes part in
// stream order and CUDA graph capture: a uint8 tensor of `bytes`, a new reference.
PyObject* new_bytes(PyObject* like, size_t bytes);

class Workspace {
 public:
  // `given`: None, or a contiguous 16-byte aligned tensor of any dtype with at least `needed`
  // bytes; a smaller one raises ShapeError with both figures. With None, `spare` is taken if it is
  // not None and large enough, else new memory like `like`. Throws PythonError.
  Workspace(Call& call, PyObject* given, PyObject* spare, PyObject* like, size_t needed);

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  Owned memory_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace astrai::bindings
