// Raising Python exceptions from the bindings.
//
// Every text reads "<function>: <argument> must be <expected>, got <what came>". Classes:
//
//     kShape        astrai.extension.errors.ShapeError (ValueError and RuntimeError)
//     kDtype        astrai.extension.errors.DtypeError (TypeError and RuntimeError)
//     kType         TypeError: not a tensor that a binding can read
//     kRuntime      RuntimeError: device, autograd, launch
//     kUnsupported  NotImplementedError (a RuntimeError): no kernel for this compute capability
#pragma once

#include <Python.h>

#include <string>
#include <utility>

namespace astrai::bindings {

// Thrown once a Python exception is set; caught by entry() below.
struct PythonError {};

enum class ErrorClass { kShape, kDtype, kType, kRuntime, kUnsupported };

// Sets the Python exception and throws PythonError. An exception that is already set becomes its
// __cause__.
[[noreturn]] void raise(ErrorClass error_class, const std::string& message);

// The same, with the message put together in the house form.
[[noreturn]] void raise_argument(ErrorClass error_class, const char* function, const char* argument,
                                 const std::string& expected, const std::string& got);

// The exception that is set, which it clears; null if there is none. A new reference.
PyObject* take_exception();
// Sets it again; null is allowed. Takes the reference.
void put_exception(PyObject* exception);

// Throws if a Python C API call failed, that is, returned null.
inline PyObject* checked(PyObject* result) {
  if (result == nullptr) throw PythonError{};
  return result;
}

// An owned reference.
class Owned {
 public:
  explicit Owned(PyObject* object = nullptr) : object_(object) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Owned(Owned&& other) noexcept : object_(other.object_) { other.object_ = nullptr; }
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

// str(object), or its type's name where that fails. For messages only.
std::string describe(PyObject* object);

// Turns `PyObject* f(args, count)` that may throw into a METH_FASTCALL function.
template <PyObject* (*Function)(PyObject* const*, Py_ssize_t)>
PyObject* entry(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) noexcept {
  try {
    return Function(args, count);
  } catch (const PythonError&) {
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// Checks the number of positional arguments of a METH_FASTCALL function.
void require_count(const char* function, Py_ssize_t count, Py_ssize_t expected);

}  // namespace astrai::bindings
