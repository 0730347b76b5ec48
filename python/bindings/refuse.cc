#include "python/bindings/refuse.h"

#include <string>

#include "python/bindings/errors.h"

namespace astrai::bindings {
namespace {

bool method_is_true(PyObject* object, const char* name) {
  Owned result(PyObject_CallMethod(object, name, nullptr));
  if (result.get() == nullptr) PyErr_Clear();
  return result.get() == Py_True;
}

bool function_is_true(const char* module_name, const char* function, PyObject* object) {
  Owned module(PyImport_ImportModule(module_name));
  Owned result(module.get() == nullptr ? nullptr
                                       : PyObject_CallMethod(module.get(), function, "O", object));
  if (result.get() == nullptr) PyErr_Clear();
  return result.get() == Py_True;
}

std::string attribute_text(PyObject* object, const char* name) {
  Owned value(PyObject_GetAttrString(object, name));
  if (value.get() != nullptr) return describe(value.get());
  PyErr_Clear();
  return "unknown";
}

std::string type_text(PyObject* object) {
  if (object == Py_None) return "None";
  PyTypeObject* type = Py_TYPE(object);
  Owned module(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__module__"));
  Owned name(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__qualname__"));
  if (module.get() == nullptr || name.get() == nullptr) {
    PyErr_Clear();
    return type->tp_name;
  }
  const std::string module_text = describe(module.get());
  return (module_text == "builtins" ? "" : module_text + ".") + describe(name.get());
}

struct Refusal {
  std::string expected, got;
};

constexpr const char* kConjugatedExpected = "a tensor without the conjugate bit";
constexpr const char* kConjugatedGot = "a conjugated view; call .resolve_conj()";

Refusal explain(PyObject* object) {
  if (function_is_true("torch._C._functorch", "is_functorch_wrapped_tensor", object)) {
    return {"a tensor with memory of its own",
            "a tensor inside a functorch transform such as vmap; call the operator in "
            "torch.ops.astrai, which torch can batch"};
  }
  if (function_is_true("torch", "_is_functional_tensor", object)) {
    return {"a tensor with memory of its own",
            "a functional tensor; call the operator in torch.ops.astrai, which torch can trace"};
  }
  const std::string layout = attribute_text(object, "layout");
  if (layout != "torch.strided" && layout != "unknown") {
    return {"a dense tensor (layout torch.strided)", "layout " + layout};
  }
  const std::string device = attribute_text(object, "device");
  if (device == "meta") {
    return {"a tensor with memory",
            "a meta tensor; the operator in torch.ops.astrai infers shapes from meta tensors"};
  }
  if (method_is_true(object, "is_conj")) return {kConjugatedExpected, kConjugatedGot};
  return {"a tensor with memory", "dtype " + attribute_text(object, "dtype") + " on device " +
                                      device + " whose memory torch does not give out"};
}

}  // namespace

void refuse_conjugated(const char* function, const char* name, PyObject* object) {
  if (!method_is_true(object, "is_conj")) return;
  raise_argument(ErrorClass::kType, function, name, kConjugatedExpected, kConjugatedGot);
}

void refuse_type(const char* function, const char* name, PyObject* object, const TorchApi& torch) {
  const int is_tensor = PyObject_IsInstance(object, torch.tensor_type);
  if (is_tensor < 0) PyErr_Clear();
  std::string got = type_text(object);
  if (is_tensor == 1) {
    got += ", a subclass; call the operator in torch.ops.astrai, which dispatches on subclasses";
  }
  raise_argument(ErrorClass::kType, function, name, "a torch.Tensor", got);
}

void refuse_unreadable(const char* function, const char* name, PyObject* object) {
  // torch's own exception, if any, waits while Python code looks at the tensor.
  PyObject* waiting = take_exception();
  const Refusal refusal = explain(object);
  put_exception(waiting);
  raise_argument(ErrorClass::kType, function, name, refusal.expected, refusal.got);
}

}  // namespace astrai::bindings
