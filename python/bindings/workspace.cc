#include "python/bindings/workspace.h"

#include <cstdint>

namespace astrai::bindings {
namespace {

constexpr int64_t kAlignment = 16;

size_t bytes_of(const TensorView& view) {
  return static_cast<size_t>(view.numel() * size_of(view.dtype));
}

}  // namespace

PyObject* new_bytes(PyObject* like, size_t bytes) {
  Owned method(checked(PyObject_GetAttrString(like, "new_empty")));
  Owned arguments(checked(Py_BuildValue("((n))", static_cast<Py_ssize_t>(bytes))));
  Owned keywords(checked(Py_BuildValue("{s:O}", "dtype", torch_api().uint8)));
  return checked(PyObject_Call(method.get(), arguments.get(), keywords.get()));
}

Workspace::Workspace(Call& call, PyObject* given, PyObject* spare, PyObject* like, size_t needed) {
  if (given != Py_None) {
    const TensorView view = call.output(given, "workspace");
    require_contiguous(call, view);
    require_alignment(call, view, kAlignment);
    if (bytes_of(view) < needed) {
      raise_argument(ErrorClass::kShape, call.function(), "workspace",
                     "of at least " + std::to_string(needed) + " bytes",
                     std::to_string(bytes_of(view)) + " bytes");
    }
    data_ = view.data;
    bytes_ = bytes_of(view);
    return;
  }
  if (needed == 0) return;
  if (spare != Py_None) {
    const TensorView view = call.output(spare, "o_part_buf");
    const bool aligned = reinterpret_cast<uintptr_t>(view.data) % kAlignment == 0;
    if (view.is_contiguous() && aligned && bytes_of(view) >= needed) {
      data_ = view.data;
      bytes_ = bytes_of(view);
      return;
    }
  }
  memory_ = Owned(new_bytes(like, needed));
  data_ = call.input(memory_.get(), "workspace").data;
  bytes_ = needed;
}

}  // namespace astrai::bindings
