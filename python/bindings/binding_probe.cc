// Module binding_probe: shows what tensor.h reads and checks, on tensors of any device.
//
// For tests only, not in the wheel: everything of the bindings but a launch runs here without a
// GPU.
#include <pybind11/pybind11.h>

#include "python/bindings/device.h"
#include "python/bindings/module.h"
#include "python/bindings/probe_params.h"
#include "python/bindings/tensor.h"

namespace py = pybind11;

namespace astrai::bindings {
namespace {

Owned tuple_of(const std::array<int64_t, kMaxRank>& values, int count) {
  Owned tuple(checked(PyTuple_New(count)));
  for (int i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(tuple.get(), i, checked(PyLong_FromLongLong(values[i])));
  }
  return tuple;
}

// view(tensor) -> dict of the TensorView
PyObject* view(PyObject* const* args, Py_ssize_t count) {
  require_count("view", count, 1);
  Call call("view", Devices::kAny);
  const TensorView view = call.input(args[0], "tensor");
  Owned shape = tuple_of(view.shape, view.rank);
  Owned strides = tuple_of(view.strides, view.rank);
  const std::string device = device_text(view.device);
  return checked(Py_BuildValue(
      "{s:n,s:O,s:O,s:s,s:s,s:L,s:L,s:O}", "data", reinterpret_cast<Py_ssize_t>(view.data), "shape",
      shape.get(), "strides", strides.get(), "dtype", name_of(view.dtype), "device", device.c_str(),
      "numel", static_cast<long long>(view.numel()), "span", static_cast<long long>(view.span()),
      "contiguous", view.is_contiguous() ? Py_True : Py_False));
}

// add(a, b, out): the whole path of an operator with three tensors and a preallocated output, with
// a loop on the CPU in place of a launch. fp32, any strides, rank 2.
PyObject* add(PyObject* const* args, Py_ssize_t count) {
  require_count("add", count, 3);
  Call call("add", Devices::kAny);
  const TensorView a = call.input(args[0], "a");
  const TensorView b = call.input(args[1], "b");
  const TensorView out = call.output(args[2], "out");
  for (const TensorView* view : {&a, &b, &out}) {
    require_dtype(call, *view, {ScalarType::kFloat32});
    require_rank(call, *view, 2, "[rows, columns]");
    require_dense_rows(call, *view);
    require_alignment(call, *view, 4);
  }
  require_shape(call, b, {a.shape[0], a.shape[1]}, "[rows, columns]");
  require_shape(call, out, {a.shape[0], a.shape[1]}, "[rows, columns]");
  if (!same_memory(out, a)) require_no_overlap(call, out, a);
  require_no_overlap(call, out, b);
  if (call.device().device_type != kDLCPU) {
    raise_argument(ErrorClass::kRuntime, "add", "a", "a CPU tensor", device_text(call.device()));
  }
  for (int64_t i = 0; i < a.shape[0]; ++i) {
    for (int64_t j = 0; j < a.shape[1]; ++j) {
      static_cast<float*>(out.data)[i * out.strides[0] + j] =
          static_cast<const float*>(a.data)[i * a.strides[0] + j] +
          static_cast<const float*>(b.data)[i * b.strides[0] + j];
    }
  }
  call.finish();
  Py_RETURN_NONE;
}

// require_cuda(tensor): what an operator says about the tensor's device
PyObject* require_cuda(PyObject* const* args, Py_ssize_t count) {
  require_count("require_cuda", count, 1);
  Call call("require_cuda", Devices::kCuda);
  call.input(args[0], "tensor");
  Py_RETURN_NONE;
}

// require_aligned(tensor, bytes), require_contiguous(tensor)
PyObject* require_aligned(PyObject* const* args, Py_ssize_t count) {
  require_count("require_aligned", count, 2);
  Call call("require_aligned", Devices::kAny);
  require_alignment(call, call.input(args[0], "tensor"),
                    read_int("require_aligned", args[1], "bytes"));
  Py_RETURN_NONE;
}

PyObject* require_contiguous_tensor(PyObject* const* args, Py_ssize_t count) {
  require_count("require_contiguous", count, 1);
  Call call("require_contiguous", Devices::kAny);
  require_contiguous(call, call.input(args[0], "tensor"));
  Py_RETURN_NONE;
}

// write(*tensors): only the checks of outputs
PyObject* write(PyObject* const* args, Py_ssize_t count) {
  Call call("write", Devices::kAny);
  for (Py_ssize_t i = 0; i < count; ++i) call.output(args[i], "out");
  call.finish();
  Py_RETURN_NONE;
}

// scalars(bool, float, int) -> the same three, as the bindings read them
PyObject* scalars(PyObject* const* args, Py_ssize_t count) {
  require_count("scalars", count, 3);
  const bool flag = read_bool("scalars", args[0], "flag");
  const double number = read_double("scalars", args[1], "number");
  const int64_t integer = read_int("scalars", args[2], "integer");
  return checked(
      Py_BuildValue("OdL", flag ? Py_True : Py_False, number, static_cast<long long>(integer)));
}

PyMethodDef functions[] = {
    ASTRAI_FASTCALL("view", view, "view(tensor, /) -> dict"),
    ASTRAI_FASTCALL("add", add, "add(a, b, out, /) -> None"),
    ASTRAI_FASTCALL("require_cuda", require_cuda, "require_cuda(tensor, /) -> None"),
    ASTRAI_FASTCALL("require_aligned", require_aligned,
                    "require_aligned(tensor, bytes, /) -> None"),
    ASTRAI_FASTCALL("require_contiguous", require_contiguous_tensor,
                    "require_contiguous(tensor, /) -> None"),
    ASTRAI_FASTCALL("write", write, "write(*tensors) -> None"),
    ASTRAI_FASTCALL("scalars", scalars, "scalars(flag, number, integer, /) -> tuple"),
    {nullptr, nullptr, 0, nullptr},
};

// The same as add(), called through pybind11's dispatch: what METH_FASTCALL saves.
void add_pybind(py::object a, py::object b, py::object out) {
  PyObject* args[] = {a.ptr(), b.ptr(), out.ptr()};
  try {
    Owned none(add(args, 3));
  } catch (const PythonError&) {
    throw py::error_already_set();
  }
}

// Through Python's error state, like require_capability in an operator.
void check_capability(const std::string& function, const std::string& archs, int major, int minor) {
  try {
    require_capability(function.c_str(), archs, major, minor);
  } catch (const PythonError&) {
    throw py::error_already_set();
  }
}

}  // namespace
}  // namespace astrai::bindings

PYBIND11_MODULE(binding_probe, module) {
  module.doc() = "Shows what the bindings read; for tests.";
  astrai::bindings::define_module(module, "binding_probe", astrai::bindings::functions);
  if (PyModule_AddFunctions(module.ptr(), astrai::bindings::probe_params_functions) != 0) {
    throw py::error_already_set();
  }
  module.def("add_pybind", &astrai::bindings::add_pybind, py::arg("a"), py::arg("b"),
             py::arg("out"));
  module.def("archs_cover", &astrai::bindings::archs_cover, py::arg("archs"), py::arg("major"),
             py::arg("minor"));
  module.def("check_capability", &astrai::bindings::check_capability, py::arg("function"),
             py::arg("archs"), py::arg("major"), py::arg("minor"));
}
