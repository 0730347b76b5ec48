// Module attn_decode: attention of one query per sequence over dense keys and values, and the merge
// of two results.
#include <pybind11/pybind11.h>

#include "kernels/attention/attention.h"
#include "python/bindings/attention_call.h"
#include "python/bindings/attention_launch.h"
#include "python/bindings/device.h"
#include "python/bindings/merge_call.h"
#include "python/bindings/module.h"

namespace astrai::bindings {
namespace {

PyObject* attn_decode(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "attn_decode";
  require_count(kName, count, kDenseArguments + 2);
  Call call(kName);
  attention::AttentionParams params = read_dense(call, args);
  params.deterministic = read_bool(kName, args[kDenseArguments], "deterministic");
  if (params.q_len != 1) {
    raise(ErrorClass::kShape, std::string(kName) + ": Q seq_len must be 1, got " +
                                  std::to_string(params.q_len) + "; use attn_prefill");
  }
  run_decode(call, params, {args[0], args[kDenseArguments + 1], Py_None});
  call.finish();
  Py_RETURN_NONE;
}

PyObject* attn_decode_workspace_size(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "attn_decode_workspace_size";
  require_count(kName, count, kWorkspaceSizeArguments);
  return decode_workspace_size(kName, args);
}

PyObject* merge_states(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "merge_states";
  require_count(kName, count, kMergeArguments);
  Call call(kName);
  const attention::MergeParams params = read_merge(call, args);
  if (params.rows > 0) {
    const int device = call.device().device_id;
    require_capability(kName, device);
    auto* stream = static_cast<cudaStream_t>(call.stream());
    DeviceGuard guard(kName, device);
    require_launched(kName, attention::launch_merge_states(params, stream));
  }
  call.finish();
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    ASTRAI_FASTCALL("attn_decode", attn_decode,
                    "attn_decode(q, k, v, mask, is_causal, scale, window, softcap, sinks, k_scale, "
                    "v_scale, out, lse, deterministic, workspace, /) -> None\n\n"
                    "Writes out and lse; see astrai.extension.ops.attention for the arguments."),
    ASTRAI_FASTCALL("attn_decode_workspace_size", attn_decode_workspace_size,
                    "attn_decode_workspace_size(batch, max_q_len, q_heads, kv_heads, head_dim, "
                    "v_head_dim, deterministic, device, /) -> int\n\nBytes of workspace."),
    ASTRAI_FASTCALL("merge_states", merge_states,
                    "merge_states(o_a, lse_a, o_b, lse_b, out, lse, /) -> None\n\n"
                    "Writes out and lse; see astrai.extension.ops.attention."),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace astrai::bindings

PYBIND11_MODULE(attn_decode, module) {
  module.doc() = "Dense decode attention on CUDA.";
  astrai::bindings::define_module(module, "attn_decode", astrai::bindings::functions);
}
