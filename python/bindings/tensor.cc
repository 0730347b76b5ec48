#include "python/bindings/tensor.h"

#include <algorithm>

#include "python/bindings/refuse.h"

namespace astrai::bindings {
namespace {

ScalarType scalar_type_of(DLDataType dtype) {
  if (dtype.lanes != 1) return ScalarType::kOther;
  switch (dtype.code) {
    case kDLBfloat:
      return dtype.bits == 16 ? ScalarType::kBFloat16 : ScalarType::kOther;
    case kDLFloat:
      if (dtype.bits == 16) return ScalarType::kFloat16;
      if (dtype.bits == 32) return ScalarType::kFloat32;
      return dtype.bits == 64 ? ScalarType::kFloat64 : ScalarType::kOther;
    case kDLFloat8_e4m3fn:
      return ScalarType::kFloat8E4M3;
    case kDLFloat8_e5m2:
      return ScalarType::kFloat8E5M2;
    case kDLBool:
      return ScalarType::kBool;
    case kDLUInt:
      return dtype.bits == 8 ? ScalarType::kUInt8 : ScalarType::kOther;
    case kDLInt:
      if (dtype.bits == 8) return ScalarType::kInt8;
      if (dtype.bits == 16) return ScalarType::kInt16;
      if (dtype.bits == 32) return ScalarType::kInt32;
      return dtype.bits == 64 ? ScalarType::kInt64 : ScalarType::kOther;
    case kDLComplex:
      return ScalarType::kComplex;
    default:
      return ScalarType::kOther;
  }
}

// Whether two elements of a tensor may lie at one address. Sorted by stride, each dimension must
// step over everything that the smaller ones reach.
bool shares_elements(const TensorView& view) {
  int order[kMaxRank];
  int count = 0;
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] == 0) return false;
    if (view.shape[i] == 1) continue;
    int slot = count++;
    for (; slot > 0 && view.strides[order[slot - 1]] > view.strides[i]; --slot) {
      order[slot] = order[slot - 1];
    }
    order[slot] = i;
  }
  int64_t reach = 0;
  for (int n = 0; n < count; ++n) {
    const int i = order[n];
    if (view.strides[i] <= reach) return true;
    reach += (view.shape[i] - 1) * view.strides[i];
  }
  return false;
}

std::string tuple_text(const int64_t* values, int count) {
  std::string text = "(";
  for (int i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(values[i]);
  }
  if (count == 1) text += ",";
  return text + ")";
}

// Copies sizes and strides and canonicalises the strides of size-1 dimensions.
void copy_layout(const DLTensor& source, TensorView* view) {
  view->rank = source.ndim;
  int64_t contiguous = 1;
  for (int i = source.ndim - 1; i >= 0; --i) {
    const int64_t size = source.shape[i];
    const bool given = source.strides != nullptr && size != 1;
    view->shape[i] = size;
    view->strides[i] = given ? source.strides[i] : contiguous;
    contiguous = view->strides[i] * std::max<int64_t>(size, 1);
  }
  view->data =
      source.data == nullptr ? nullptr : static_cast<char*>(source.data) + source.byte_offset;
  view->device = source.device;
}

// Reading through torch.Tensor.__dlpack__, for torch before 2.10
// -----------------------------------

// `with torch.cuda.device(index)`: before 2.10, __dlpack__ refuses a tensor that is not on the
// current device. Nothing for a CPU tensor.
class CudaDeviceContext {
 public:
  explicit CudaDeviceContext(PyObject* tensor) {
    Owned is_cuda(checked(PyObject_GetAttrString(tensor, "is_cuda")));
    if (is_cuda.get() != Py_True) return;
    Owned device(checked(PyObject_GetAttrString(tensor, "device")));
    Owned cuda(checked(PyImport_ImportModule("torch.cuda")));
    context_ = checked(PyObject_CallMethod(cuda.get(), "device", "O", device.get()));
    Owned entered(PyObject_CallMethod(context_, "__enter__", nullptr));
    if (entered.get() == nullptr) {
      Py_CLEAR(context_);
      throw PythonError{};
    }
  }
  ~CudaDeviceContext() {
    if (context_ == nullptr) return;
    PyObject* on_its_way_out = take_exception();
    Owned left(PyObject_CallMethod(context_, "__exit__", "OOO", Py_None, Py_None, Py_None));
    if (left.get() == nullptr) PyErr_Clear();
    put_exception(on_its_way_out);
    Py_DECREF(context_);
  }
  CudaDeviceContext(const CudaDeviceContext&) = delete;
  CudaDeviceContext& operator=(const CudaDeviceContext&) = delete;

 private:
  PyObject* context_ = nullptr;
};

// float8 has no DLPack code before torch 2.10: it is exported as bytes, the dtype goes beside.
void read_through_capsule(const TorchApi& torch, PyObject* object, TensorView* view) {
  Owned dtype(checked(PyObject_GetAttrString(object, "dtype")));
  Owned detached(checked(PyObject_CallMethod(object, "detach", nullptr)));
  const bool is_e4m3 = dtype.get() == torch.float8_e4m3fn;
  const bool is_e5m2 = dtype.get() == torch.float8_e5m2;
  Owned bytes(is_e4m3 || is_e5m2
                  ? checked(PyObject_CallMethod(detached.get(), "view", "O", torch.uint8))
                  : nullptr);
  PyObject* exported = bytes.get() != nullptr ? bytes.get() : detached.get();

  CudaDeviceContext context(exported);
  Owned method(checked(PyObject_GetAttrString(exported, "__dlpack__")));
  Owned no_arguments(checked(PyTuple_New(0)));
  // -1: no synchronisation, the kernel runs on torch's own current stream. Before 2.9 a CPU tensor
  // takes only None.
  Owned is_cuda(checked(PyObject_GetAttrString(exported, "is_cuda")));
  Owned keywords(is_cuda.get() == Py_True ? checked(Py_BuildValue("{s:i}", "stream", -1))
                                          : checked(Py_BuildValue("{s:O}", "stream", Py_None)));
  Owned capsule(checked(PyObject_Call(method.get(), no_arguments.get(), keywords.get())));
  // The capsule is not consumed, so its destructor frees the export; the caller's argument keeps
  // the memory alive.
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.get(), "dltensor"));
  if (managed == nullptr) throw PythonError{};
  if (managed->dl_tensor.ndim <= kMaxRank) copy_layout(managed->dl_tensor, view);
  view->rank = managed->dl_tensor.ndim;
  view->dtype = is_e4m3   ? ScalarType::kFloat8E4M3
                : is_e5m2 ? ScalarType::kFloat8E5M2
                          : scalar_type_of(managed->dl_tensor.dtype);
}

}  // namespace

const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kBFloat16:
      return "torch.bfloat16";
    case ScalarType::kFloat16:
      return "torch.float16";
    case ScalarType::kFloat32:
      return "torch.float32";
    case ScalarType::kFloat64:
      return "torch.float64";
    case ScalarType::kFloat8E4M3:
      return "torch.float8_e4m3fn";
    case ScalarType::kFloat8E5M2:
      return "torch.float8_e5m2";
    case ScalarType::kBool:
      return "torch.bool";
    case ScalarType::kUInt8:
      return "torch.uint8";
    case ScalarType::kInt8:
      return "torch.int8";
    case ScalarType::kInt16:
      return "torch.int16";
    case ScalarType::kInt32:
      return "torch.int32";
    case ScalarType::kInt64:
      return "torch.int64";
    case ScalarType::kComplex:
      return "a complex dtype";
    case ScalarType::kOther:
      break;
  }
  return "another dtype";
}

int64_t size_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat8E4M3:
    case ScalarType::kFloat8E5M2:
    case ScalarType::kBool:
    case ScalarType::kUInt8:
    case ScalarType::kInt8:
      return 1;
    case ScalarType::kBFloat16:
    case ScalarType::kFloat16:
    case ScalarType::kInt16:
      return 2;
    case ScalarType::kFloat32:
    case ScalarType::kInt32:
      return 4;
    case ScalarType::kFloat64:
    case ScalarType::kInt64:
      return 8;
    case ScalarType::kComplex:
    case ScalarType::kOther:
      break;
  }
  return 0;
}

int64_t TensorView::numel() const {
  int64_t count = 1;
  for (int i = 0; i < rank; ++i) count *= shape[i];
  return count;
}

bool TensorView::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t expected = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

int64_t TensorView::span() const {
  int64_t last = 0;
  for (int i = 0; i < rank; ++i) {
    if (shape[i] == 0) return 0;
    last += (shape[i] - 1) * strides[i];
  }
  return last + 1;
}

std::string TensorView::shape_text() const { return tuple_text(shape.data(), rank); }
std::string TensorView::strides_text() const { return tuple_text(strides.data(), rank); }

std::string device_text(DLDevice device) {
  switch (device.device_type) {
    case kDLCPU:
      return "cpu";
    case kDLCUDA:
      return "cuda:" + std::to_string(device.device_id);
    default:
      return "device type " + std::to_string(device.device_type) + " of DLPack, index " +
             std::to_string(device.device_id);
  }
}

Call::Call(const char* function, Devices devices)
    : torch_(torch_api()),
      function_(function),
      devices_(devices),
      grad_enabled_(call_bool(torch_.is_grad_enabled)) {}

TensorView Call::read(PyObject* object, const char* name) {
  if (!torch_.is_plain_tensor(object)) refuse_type(function_, name, object, torch_);

  TensorView view;
  view.name = name;
  if (torch_.exchange != nullptr) {
    DLTensor tensor;
    if (torch_.exchange->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
      refuse_unreadable(function_, name, object);
    }
    if (tensor.ndim <= kMaxRank) copy_layout(tensor, &view);
    view.rank = tensor.ndim;
    view.dtype = scalar_type_of(tensor.dtype);
  } else {
    try {
      read_through_capsule(torch_, object, &view);
    } catch (const PythonError&) {
      refuse_unreadable(function_, name, object);
    }
  }
  if (view.rank > kMaxRank) {
    raise_argument(ErrorClass::kShape, function_, name,
                   "of rank " + std::to_string(kMaxRank) + " at most",
                   "rank " + std::to_string(view.rank));
  }
  // Wrappers of every kind answer with success and no memory; so do meta tensors.
  if (view.data == nullptr && view.numel() != 0) refuse_unreadable(function_, name, object);

  // Only memory that was not torch's to begin with can start between two elements.
  const int64_t element = size_of(view.dtype);
  if (element > 1 && reinterpret_cast<uintptr_t>(view.data) % element != 0) {
    raise_argument(ErrorClass::kShape, function_, name,
                   "aligned to its elements of " + std::to_string(element) + " bytes",
                   "an address that is not a multiple of it");
  }

  // DLPack carries neither bit. No tensor of bool has one.
  if (view.dtype != ScalarType::kBool) {
    Owned negated(checked(PyObject_Vectorcall(torch_.is_neg, &object, 1, nullptr)));
    if (negated.get() == Py_True) {
      raise_argument(ErrorClass::kType, function_, name, "a tensor without the negative bit",
                     "a negated view; call .resolve_neg()");
    }
  }
  if (view.dtype == ScalarType::kComplex) refuse_conjugated(function_, name, object);

  if (grad_enabled_) {
    PyObject* descriptor = torch_.requires_grad;
    Owned requires_grad(checked(
        Py_TYPE(descriptor)
            ->tp_descr_get(descriptor, object, reinterpret_cast<PyObject*>(Py_TYPE(object)))));
    if (requires_grad.get() == Py_True) {
      raise(ErrorClass::kRuntime,
            std::string(function_) + ": " + name +
                " requires grad, but this kernel has no autograd formula; call it under "
                "torch.no_grad() or pass " +
                name + ".detach()");
    }
  }

  if (devices_ == Devices::kCuda && view.device.device_type != kDLCUDA) {
    raise_argument(ErrorClass::kRuntime, function_, name, "a CUDA tensor",
                   "a tensor on " + device_text(view.device));
  }
  if (!has_device_) {
    device_ = view.device;
    has_device_ = true;
  } else if (view.device.device_type != device_.device_type ||
             view.device.device_id != device_.device_id) {
    raise_argument(ErrorClass::kRuntime, function_, name,
                   "on " + device_text(device_) + " like the arguments before it",
                   device_text(view.device));
  }
  return view;
}

TensorView Call::input(PyObject* object, const char* name) { return read(object, name); }

TensorView Call::output(PyObject* object, const char* name) {
  TensorView view = read(object, name);
  if (shares_elements(view)) {
    raise_argument(ErrorClass::kShape, function_, name,
                   "a tensor whose elements do not share memory",
                   "shape " + view.shape_text() + " with strides " + view.strides_text());
  }
  if (output_count_ == kMaxOutputs) {
    raise(ErrorClass::kRuntime, std::string(function_) + ": too many outputs");
  }
  outputs_[output_count_++] = object;
  return view;
}

void Call::finish() {
  for (int i = 0; i < output_count_; ++i) {
    Owned tuple(checked(PyTuple_Pack(1, outputs_[i])));
    PyObject* argument = tuple.get();
    Owned none(checked(PyObject_Vectorcall(torch_.increment_version, &argument, 1, nullptr)));
  }
}

void* Call::stream() const {
  if (device_.device_type != kDLCUDA) return nullptr;
  if (torch_.exchange != nullptr) {
    void* stream = nullptr;
    if (torch_.exchange->current_work_stream(kDLCUDA, device_.device_id, &stream) != 0) {
      throw PythonError{};
    }
    return stream;
  }
  if (torch_.current_raw_stream == nullptr) {
    raise(ErrorClass::kRuntime, std::string(function_) + ": this torch is built without CUDA");
  }
  Owned stream(checked(PyObject_CallFunction(torch_.current_raw_stream, "i", device_.device_id)));
  void* pointer = PyLong_AsVoidPtr(stream.get());
  if (pointer == nullptr && PyErr_Occurred() != nullptr) throw PythonError{};
  return pointer;
}

}  // namespace astrai::bindings
