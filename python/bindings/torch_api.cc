#include "python/bindings/torch_api.h"

#include "python/bindings/errors.h"

namespace astrai::bindings {
namespace {

// References below are kept for the life of the process: modules are never unloaded.

PyObject* attribute(PyObject* object, const char* name) {
  return checked(PyObject_GetAttrString(object, name));
}

PyObject* optional_attribute(PyObject* object, const char* name) {
  PyObject* value = PyObject_GetAttrString(object, name);
  if (value == nullptr) PyErr_Clear();
  return value;
}

// The table of C functions, if this torch has one that this code understands.
const DLPackExchangeAPI* find_exchange_api(PyObject* tensor_type) {
  Owned capsule(optional_attribute(tensor_type, "__dlpack_c_exchange_api__"));
  if (capsule.get() == nullptr) return nullptr;
  auto* header = static_cast<DLPackExchangeAPIHeader*>(
      PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  if (header == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  while (header != nullptr && header->version.major != DLPACK_MAJOR_VERSION) {
    header = header->prev_api;
  }
  auto* api = reinterpret_cast<const DLPackExchangeAPI*>(header);
  const bool usable = api != nullptr && api->dltensor_from_py_object_no_sync != nullptr &&
                      api->current_work_stream != nullptr;
  return usable ? api : nullptr;
}

struct State {
  TorchApi api{};
  const DLPackExchangeAPI* found = nullptr;
  bool loaded = false;
};

State& state() {
  static State instance;
  return instance;
}

void load(State& s) {
  PyObject* torch = checked(PyImport_ImportModule("torch"));
  PyObject* c = attribute(torch, "_C");
  PyObject* functorch = attribute(c, "_functorch");
  Owned nn(attribute(torch, "nn"));

  TorchApi& api = s.api;
  api.tensor_type = attribute(torch, "Tensor");
  api.parameter_type = attribute(nn.get(), "Parameter");
  api.is_neg = attribute(api.tensor_type, "is_neg");
  api.requires_grad = attribute(api.tensor_type, "requires_grad");
  if (Py_TYPE(api.requires_grad)->tp_descr_get == nullptr) {
    raise(ErrorClass::kRuntime, "torch.Tensor.requires_grad is not a descriptor");
  }
  api.is_grad_enabled = attribute(torch, "is_grad_enabled");
  api.dispatch_stack_depth = attribute(c, "_len_torch_dispatch_stack");
  api.function_stack_depth = attribute(c, "_len_torch_function_stack");
  api.functorch_level = attribute(functorch, "maybe_current_level");
  api.jit_tracing_state = attribute(c, "_get_tracing_state");
  api.increment_version = attribute(c, "_increment_version");
  api.current_raw_stream = optional_attribute(c, "_cuda_getCurrentRawStream");
  api.strided = attribute(torch, "strided");
  api.uint8 = attribute(torch, "uint8");
  api.float8_e4m3fn = attribute(torch, "float8_e4m3fn");
  api.float8_e5m2 = attribute(torch, "float8_e5m2");

  s.found = find_exchange_api(api.tensor_type);
  api.exchange = s.found;
  s.loaded = true;
  Py_DECREF(functorch);
  Py_DECREF(c);
  Py_DECREF(torch);
}

}  // namespace

const TorchApi& torch_api() {
  State& s = state();
  if (!s.loaded) load(s);
  return s.api;
}

bool use_exchange_api(bool wanted) {
  torch_api();
  State& s = state();
  s.api.exchange = wanted ? s.found : nullptr;
  return s.api.exchange != nullptr;
}

bool call_bool(PyObject* function) {
  Owned result(checked(PyObject_CallNoArgs(function)));
  return result.get() == Py_True;
}

long call_int(PyObject* function) {
  Owned result(checked(PyObject_CallNoArgs(function)));
  const long value = PyLong_AsLong(result.get());
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError{};
  return value;
}

bool call_is_none(PyObject* function) {
  Owned result(checked(PyObject_CallNoArgs(function)));
  return result.get() == Py_None;
}

bool is_eager(const TorchApi& torch) {
  return call_int(torch.dispatch_stack_depth) == 0 && call_int(torch.function_stack_depth) == 0 &&
         call_is_none(torch.functorch_level) && call_is_none(torch.jit_tracing_state);
}

}  // namespace astrai::bindings
