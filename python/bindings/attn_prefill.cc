// Module attn_prefill: attention of any number of queries over dense or packed keys and values.
#include <pybind11/pybind11.h>

#include "kernels/attention/attention.h"
#include "python/bindings/attention_call.h"
#include "python/bindings/attention_launch.h"
#include "python/bindings/module.h"

namespace astrai::bindings {
namespace {

PyObject* attn_prefill(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "attn_prefill";
  require_count(kName, count, kDenseArguments + 1);
  Call call(kName);
  const attention::AttentionParams params = read_dense(call, args);
  run_prefill(call, params, {args[0], args[kDenseArguments], Py_None}, nullptr);
  call.finish();
  Py_RETURN_NONE;
}

PyObject* attn_varlen(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "attn_varlen";
  require_count(kName, count, kVarlenArguments + 1);
  Call call(kName);
  const attention::AttentionParams params = read_varlen(call, args);
  run_prefill(call, params, {args[0], args[kVarlenArguments], Py_None}, nullptr);
  call.finish();
  Py_RETURN_NONE;
}

PyObject* attn_prefill_workspace_size(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "attn_prefill_workspace_size";
  require_count(kName, count, kWorkspaceSizeArguments);
  return prefill_workspace_size(kName, args);
}

PyMethodDef functions[] = {
    ASTRAI_FASTCALL("attn_prefill", attn_prefill,
                    "attn_prefill(q, k, v, mask, is_causal, scale, window, softcap, sinks, "
                    "k_scale, v_scale, out, lse, workspace, /) -> None\n\n"
                    "Writes out and lse; see astrai.extension.ops.attention for the arguments."),
    ASTRAI_FASTCALL("attn_varlen", attn_varlen,
                    "attn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
                    "is_causal, scale, window, softcap, sinks, k_scale, v_scale, out, lse, "
                    "workspace, /) -> None\n\nWrites out and lse."),
    ASTRAI_FASTCALL("attn_prefill_workspace_size", attn_prefill_workspace_size,
                    "attn_prefill_workspace_size(batch, max_q_len, q_heads, kv_heads, head_dim, "
                    "v_head_dim, deterministic, device, /) -> int\n\nBytes of workspace."),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace astrai::bindings

PYBIND11_MODULE(attn_prefill, module) {
  module.doc() = "Dense and ragged prefill attention on CUDA.";
  astrai::bindings::define_module(module, "attn_prefill", astrai::bindings::functions);
}
