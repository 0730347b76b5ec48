// Module attn_decode: attention of one query per sequence over dense keys and values.
#include <pybind11/pybind11.h>

#include "kernels/attention/attention.h"
#include "python/bindings/attention_call.h"
#include "python/bindings/device.h"
#include "python/bindings/module.h"

namespace astrai::bindings {
namespace {

// Memory for the partial results of a split key range, from torch's allocator so that it takes part
// in stream order and CUDA graph capture. A new reference.
PyObject* new_bytes(PyObject* like, size_t bytes) {
  Owned method(checked(PyObject_GetAttrString(like, "new_empty")));
  Owned arguments(checked(Py_BuildValue("((n))", static_cast<Py_ssize_t>(bytes))));
  Owned keywords(checked(Py_BuildValue("{s:O}", "dtype", torch_api().uint8)));
  return checked(PyObject_Call(method.get(), arguments.get(), keywords.get()));
}

PyObject* attn_decode(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "attn_decode";
  require_count(kName, count, kAttentionArguments);
  Call call(kName);
  const attention::DenseParams params = read_attention(call, args);
  if (params.q_len != 1) {
    raise(ErrorClass::kShape, std::string(kName) + ": Q seq_len must be 1, got " +
                                  std::to_string(params.q_len) + "; use attn_prefill");
  }
  if (params.batch > 0 && params.q_heads > 0) {
    if (const char* reason = attention::why_not_implemented(params)) {
      raise(ErrorClass::kShape, std::string(kName) + ": " + reason);
    }
    const int device = call.device().device_id;
    require_capability(kName, device);
    const size_t bytes = attention::decode_workspace_bytes(params, sm_count(device));
    Owned workspace(bytes == 0 ? nullptr : new_bytes(args[0], bytes));
    void* memory = bytes == 0 ? nullptr : call.input(workspace.get(), "workspace").data;
    auto* stream = static_cast<cudaStream_t>(call.stream());
    DeviceGuard guard(kName, device);
    require_launched(kName, attention::launch_decode(params, memory, bytes, stream));
  }
  call.finish();
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    ASTRAI_FASTCALL("attn_decode", attn_decode,
                    "attn_decode(q, k, v, mask, is_causal, scale, out, lse, /) -> None\n\n"
                    "Writes out and lse; see astrai.extension.ops.attention for the arguments."),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace astrai::bindings

PYBIND11_MODULE(attn_decode, module) {
  module.doc() = "Dense decode attention on CUDA.";
  astrai::bindings::define_module(module, "attn_decode", astrai::bindings::functions);
}
