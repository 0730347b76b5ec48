#include "python/bindings/module.h"

#include <sstream>
#include <string>

#include "python/bindings/device.h"
#include "python/bindings/errors.h"
#include "python/bindings/torch_api.h"

namespace py = pybind11;

namespace astrai::bindings {
namespace {

py::list arch_list() {
  py::list archs;
  std::istringstream items(built_archs());
  for (std::string item; std::getline(items, item, ',');) archs.append(item);
  return archs;
}

PyMethodDef common_functions[] = {
    ASTRAI_FASTCALL("direct", direct,
                    "direct(*tensors) -> bool\n\nWhether a call with these arguments may skip "
                    "torch's dispatcher."),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyObject* direct(PyObject* const* args, Py_ssize_t count) {
  const TorchApi& torch = torch_api();
  for (Py_ssize_t i = 0; i < count; ++i) {
    // What is no tensor at all goes on too: the operator's own check names it best.
    if (args[i] == Py_None || torch.is_plain_tensor(args[i])) continue;
    const int is_tensor = PyObject_IsInstance(args[i], torch.tensor_type);
    if (is_tensor < 0) throw PythonError{};
    if (is_tensor == 1) Py_RETURN_FALSE;
  }
  return PyBool_FromLong(is_eager(torch));
}

void define_module(py::module_& module, const char* name, PyMethodDef* functions) {
  if (PyModule_AddFunctions(module.ptr(), common_functions) != 0 ||
      PyModule_AddFunctions(module.ptr(), functions) != 0) {
    throw py::error_already_set();
  }
  module.def("why_no_device", &why_no_device,
             "Empty if kernels can run here, else the reason as a sentence.");
  module.def(
      "build_info",
      [name = std::string(name)] {
        py::dict info;
        info["name"] = name;
        info["archs"] = arch_list();
        info["cuda"] = std::to_string(CUDART_VERSION / 1000) + "." +
                       std::to_string(CUDART_VERSION % 1000 / 10);
        return info;
      },
      "What this module was built with: name, archs (list), cuda (version of the runtime).");
  module.def(
      "use_exchange_api",
      [](bool wanted) {
        try {
          return use_exchange_api(wanted);
        } catch (const PythonError&) {
          throw py::error_already_set();
        }
      },
      py::arg("wanted"),
      "Reads tensors through torch's C exchange API (True, where torch has it) or through "
      "__dlpack__ (False). Returns whether the C API is in use. For tests.");
}

}  // namespace astrai::bindings
