// Module attn_prefill: attention of any number of queries over dense keys and values.
#include <pybind11/pybind11.h>

#include "kernels/attention/attention.h"
#include "python/bindings/attention_call.h"
#include "python/bindings/device.h"
#include "python/bindings/module.h"

namespace astrai::bindings {
namespace {

PyObject* attn_prefill(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "attn_prefill";
  require_count(kName, count, kAttentionArguments);
  Call call(kName);
  const attention::DenseParams params = read_attention(call, args);
  if (params.batch > 0 && params.q_len > 0 && params.q_heads > 0) {
    if (const char* reason = attention::why_not_implemented(params)) {
      raise(ErrorClass::kShape, std::string(kName) + ": " + reason);
    }
    const int device = call.device().device_id;
    require_capability(kName, device);
    auto* stream = static_cast<cudaStream_t>(call.stream());
    DeviceGuard guard(kName, device);
    require_launched(kName, attention::launch_prefill(params, stream));
  }
  call.finish();
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    ASTRAI_FASTCALL("attn_prefill", attn_prefill,
                    "attn_prefill(q, k, v, mask, is_causal, scale, out, lse, /) -> None\n\n"
                    "Writes out and lse; see astrai.extension.ops.attention for the arguments."),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace astrai::bindings

PYBIND11_MODULE(attn_prefill, module) {
  module.doc() = "Dense prefill attention on CUDA.";
  astrai::bindings::define_module(module, "attn_prefill", astrai::bindings::functions);
}
