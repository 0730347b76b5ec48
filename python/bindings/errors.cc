#include "python/bindings/errors.h"

namespace astrai::bindings {
namespace {

PyObject* import_attribute(const char* module_name, const char* attribute) {
  Owned module(PyImport_ImportModule(module_name));
  if (module.get() == nullptr) return nullptr;
  return PyObject_GetAttrString(module.get(), attribute);
}

// The Python class; a new reference, or null with ImportError set.
PyObject* find_class(ErrorClass error_class) {
  constexpr const char* kErrors = "astrai.extension.errors";
  switch (error_class) {
    case ErrorClass::kShape:
      return import_attribute(kErrors, "ShapeError");
    case ErrorClass::kDtype:
      return import_attribute(kErrors, "DtypeError");
    case ErrorClass::kType:
      Py_INCREF(PyExc_TypeError);
      return PyExc_TypeError;
    case ErrorClass::kUnsupported:
      Py_INCREF(PyExc_NotImplementedError);
      return PyExc_NotImplementedError;
    case ErrorClass::kRuntime:
      break;
  }
  Py_INCREF(PyExc_RuntimeError);
  return PyExc_RuntimeError;
}

}  // namespace

PyObject* take_exception() {
#if PY_VERSION_HEX >= 0x030C0000
  return PyErr_GetRaisedException();
#else
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  if (type == nullptr) return nullptr;
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  Py_DECREF(type);
  Py_XDECREF(traceback);
  return value;
#endif
}

void put_exception(PyObject* exception) {
  if (exception == nullptr) return;
#if PY_VERSION_HEX >= 0x030C0000
  PyErr_SetRaisedException(exception);
#else
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(exception));
  Py_INCREF(type);
  PyErr_Restore(type, exception, PyException_GetTraceback(exception));
#endif
}

void raise(ErrorClass error_class, const std::string& message) {
  PyObject* cause = take_exception();
  Owned exception_class(find_class(error_class));
  Owned exception(exception_class.get() == nullptr
                      ? nullptr
                      : PyObject_CallFunction(exception_class.get(), "s", message.c_str()));
  if (exception.get() == nullptr) {
    Py_XDECREF(cause);
    throw PythonError{};
  }
  if (cause != nullptr) PyException_SetCause(exception.get(), cause);  // takes the reference
  PyErr_SetObject(exception_class.get(), exception.get());
  throw PythonError{};
}

void raise_argument(ErrorClass error_class, const char* function, const char* argument,
                    const std::string& expected, const std::string& got) {
  raise(error_class,
        std::string(function) + ": " + argument + " must be " + expected + ", got " + got);
}

std::string describe(PyObject* object) {
  Owned text(PyObject_Str(object));
  const char* utf8 = text.get() == nullptr ? nullptr : PyUnicode_AsUTF8(text.get());
  if (utf8 != nullptr) return utf8;
  PyErr_Clear();
  return Py_TYPE(object)->tp_name;
}

void require_count(const char* function, Py_ssize_t count, Py_ssize_t expected) {
  if (count == expected) return;
  raise(ErrorClass::kType, std::string(function) + ": takes " + std::to_string(expected) +
                               " positional arguments, got " + std::to_string(count));
}

}  // namespace astrai::bindings
