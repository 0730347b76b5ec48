// Module attn_paged_decode: attention of 1 to 16 queries per request over a paged cache.
#include <pybind11/pybind11.h>

#include "kernels/attention/attention.h"
#include "python/bindings/attention_launch.h"
#include "python/bindings/module.h"
#include "python/bindings/paged_call.h"

namespace astrai::bindings {
namespace {

// The buffers that callers of an older layout bring: fp32 and contiguous, both or neither is used.
void require_part_buffers(Call& call, PyObject* o_part, PyObject* ml_part) {
  for (PyObject* object : {o_part, ml_part}) {
    if (object == Py_None) continue;
    const TensorView view = call.input(object, object == o_part ? "o_part_buf" : "ml_part_buf");
    require_dtype(call, view, {ScalarType::kFloat32});
    require_contiguous(call, view);
  }
}

PyObject* attn_paged_decode(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "attn_paged_decode";
  require_count(kName, count, kPagedArguments + 4);
  Call call(kName);
  attention::AttentionParams params = read_paged(call, args, attention::kMaxDecodeQueries);
  PyObject* const* rest = args + kPagedArguments;
  params.deterministic = read_bool(kName, rest[0], "deterministic");
  if (params.qo_indptr != nullptr) {
    // Packed queries are the newest tokens of their requests.
    params.causal = true;
    // Which kernel runs follows from q_len, which must not follow from how many rows there are.
    if (params.deterministic) {
      params.q_len = args[8] == Py_None ? attention::kMaxDecodeQueries
                                        : static_cast<int>(read_int(kName, args[8], "max_q_len"));
    }
  }
  require_part_buffers(call, rest[2], rest[3]);
  PyObject* spare = rest[3] == Py_None ? Py_None : rest[2];
  run_decode(call, params, {args[0], rest[1], spare});
  call.finish();
  Py_RETURN_NONE;
}

PyObject* attn_paged_decode_workspace_size(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "attn_paged_decode_workspace_size";
  require_count(kName, count, kWorkspaceSizeArguments);
  return decode_workspace_size(kName, args);
}

PyMethodDef functions[] = {
    ASTRAI_FASTCALL("attn_paged_decode", attn_paged_decode,
                    "attn_paged_decode(q, k_cache, v_cache, req_to_token, req_pool_indices, "
                    "block_table, kv_indptr, qo_indptr, max_q_len, new_k, new_v, mask, is_causal, "
                    "scale, window, softcap, sinks, k_scale, v_scale, out, lse, deterministic, "
                    "workspace, o_part_buf, ml_part_buf, /) -> None\n\n"
                    "Writes out and lse, and with new_k and new_v the caches; see "
                    "astrai.extension.ops.attention for the arguments."),
    ASTRAI_FASTCALL("attn_paged_decode_workspace_size", attn_paged_decode_workspace_size,
                    "attn_paged_decode_workspace_size(batch, max_q_len, q_heads, kv_heads, "
                    "head_dim, v_head_dim, deterministic, device, /) -> int\n\nBytes of "
                    "workspace."),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace astrai::bindings

PYBIND11_MODULE(attn_paged_decode, module) {
  module.doc() = "Decode attention over a paged cache on CUDA.";
  astrai::bindings::define_module(module, "attn_paged_decode", astrai::bindings::functions);
}
