// The checks that tensor.h declares.
#include <algorithm>
#include <cmath>
#include <limits>

#include "python/bindings/tensor.h"

namespace astrai::bindings {
namespace {

std::string shape_or_any(std::initializer_list<int64_t> shape) {
  std::string text = "(";
  int i = 0;
  for (int64_t size : shape) {
    if (i++ > 0) text += ", ";
    text += std::to_string(size);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

// No gaps and no shared elements: every byte of the range belongs to the tensor.
bool is_dense(const TensorView& view) { return view.span() == view.numel(); }

}  // namespace

void require_dtype(const Call& call, const TensorView& view,
                   std::initializer_list<ScalarType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), view.dtype) != allowed.end()) return;
  std::string expected;
  for (ScalarType dtype : allowed) {
    if (!expected.empty()) expected += " or ";
    expected += name_of(dtype);
  }
  raise_argument(ErrorClass::kDtype, call.function(), view.name, expected, name_of(view.dtype));
}

void require_same_dtype(const Call& call, const TensorView& view, const TensorView& other) {
  if (view.dtype == other.dtype) return;
  raise_argument(ErrorClass::kDtype, call.function(), view.name,
                 std::string(name_of(other.dtype)) + " like " + other.name, name_of(view.dtype));
}

void require_rank(const Call& call, const TensorView& view, int rank, const char* layout) {
  if (view.rank == rank) return;
  raise_argument(ErrorClass::kShape, call.function(), view.name,
                 std::to_string(rank) + "-D " + layout,
                 std::to_string(view.rank) + "-D of shape " + view.shape_text());
}

void require_shape(const Call& call, const TensorView& view, std::initializer_list<int64_t> shape,
                   const char* layout) {
  if (view.rank == static_cast<int>(shape.size()) &&
      std::equal(shape.begin(), shape.end(), view.shape.begin())) {
    return;
  }
  raise_argument(ErrorClass::kShape, call.function(), view.name,
                 "of shape " + shape_or_any(shape) + " = " + layout, view.shape_text());
}

void require_int_sizes(const Call& call, const TensorView& view) {
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] > std::numeric_limits<int>::max()) {
      raise_argument(ErrorClass::kShape, call.function(), view.name, "of sizes below 2^31",
                     view.shape_text());
    }
  }
}

void require_contiguous(const Call& call, const TensorView& view) {
  if (view.is_contiguous()) return;
  raise_argument(ErrorClass::kShape, call.function(), view.name, "contiguous",
                 "strides " + view.strides_text() + " for shape " + view.shape_text());
}

void require_dense_rows(const Call& call, const TensorView& view) {
  if (view.rank == 0 || view.numel() == 0 || view.strides[view.rank - 1] == 1) return;
  raise_argument(ErrorClass::kShape, call.function(), view.name,
                 "of stride 1 in its last dimension",
                 "strides " + view.strides_text() + " for shape " + view.shape_text());
}

void require_alignment(const Call& call, const TensorView& view, int64_t bytes) {
  if (view.numel() == 0) return;
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  if (address % bytes != 0) {
    raise_argument(ErrorClass::kShape, call.function(), view.name,
                   "aligned to " + std::to_string(bytes) + " bytes",
                   "an address " + std::to_string(address % bytes) +
                       " bytes past a multiple (a storage offset); call .clone()");
  }
  for (int i = 0; i + 1 < view.rank; ++i) {
    if (view.shape[i] > 1 && view.strides[i] * size_of(view.dtype) % bytes != 0) {
      raise_argument(ErrorClass::kShape, call.function(), view.name,
                     "of strides that are multiples of " + std::to_string(bytes) + " bytes",
                     "strides " + view.strides_text() + " of " + name_of(view.dtype));
    }
  }
}

void require_no_overlap(const Call& call, const TensorView& output, const TensorView& input) {
  if (output.numel() == 0 || input.numel() == 0) return;
  const auto* output_begin = static_cast<const char*>(output.data);
  const auto* input_begin = static_cast<const char*>(input.data);
  const char* output_end = output_begin + output.span() * size_of(output.dtype);
  const char* input_end = input_begin + input.span() * size_of(input.dtype);
  if (output_end <= input_begin || input_end <= output_begin) return;
  const bool proven = output.data == input.data || (is_dense(output) && is_dense(input));
  if (!proven) return;
  raise_argument(ErrorClass::kShape, call.function(), output.name,
                 std::string("in memory apart from ") + input.name, "memory that both share");
}

bool same_memory(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.rank == b.rank &&
         std::equal(a.shape.begin(), a.shape.begin() + a.rank, b.shape.begin()) &&
         std::equal(a.strides.begin(), a.strides.begin() + a.rank, b.strides.begin());
}

bool read_bool(const char* function, PyObject* object, const char* name) {
  if (object == Py_True) return true;
  if (object == Py_False) return false;
  const int truth = PyBool_Check(object) || PyLong_Check(object) ? PyObject_IsTrue(object) : -1;
  if (truth < 0) {
    PyErr_Clear();
    raise_argument(ErrorClass::kType, function, name, "a bool",
                   std::string(Py_TYPE(object)->tp_name));
  }
  return truth == 1;
}

double read_double(const char* function, PyObject* object, const char* name) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise_argument(ErrorClass::kType, function, name, "a float",
                   std::string(Py_TYPE(object)->tp_name));
  }
  return value;
}

int64_t read_int(const char* function, PyObject* object, const char* name) {
  const long long value = PyLong_Check(object) ? PyLong_AsLongLong(object) : -1;
  if (!PyLong_Check(object) || (value == -1 && PyErr_Occurred() != nullptr)) {
    PyErr_Clear();
    raise_argument(ErrorClass::kType, function, name, "an int",
                   std::string(Py_TYPE(object)->tp_name));
  }
  return value;
}

void read_step(Call& call, PyObject* object, const char* name, float* number,
               const float** pointer) {
  if (object == Py_None) return;
  if (torch_api().is_plain_tensor(object)) {
    const TensorView step = call.input(object, name);
    require_dtype(call, step, {ScalarType::kFloat32});
    if (step.numel() != 1) {
      raise_argument(ErrorClass::kShape, call.function(), name, "of one element",
                     "shape " + step.shape_text());
    }
    *pointer = static_cast<const float*>(step.data);
    return;
  }
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise_argument(ErrorClass::kType, call.function(), name, "a float or a torch.Tensor",
                   Py_TYPE(object)->tp_name);
  }
  *number = static_cast<float>(value);
  if (!std::isfinite(*number) || *number <= 0.0f) {
    raise_argument(ErrorClass::kShape, call.function(), name, "finite and more than 0 in fp32",
                   std::to_string(value));
  }
}

}  // namespace astrai::bindings
