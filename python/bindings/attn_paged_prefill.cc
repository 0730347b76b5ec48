// Module attn_paged_prefill: attention of packed queries over a paged cache, and the map of its
// work.
#include <pybind11/pybind11.h>

#include <limits>
#include <string>

#include "kernels/attention/attention.h"
#include "python/bindings/attention_call.h"
#include "python/bindings/attention_launch.h"
#include "python/bindings/device.h"
#include "python/bindings/module.h"
#include "python/bindings/paged_call.h"

namespace astrai::bindings {
namespace {

// q_tile_to_batch and q_tile_to_index, both or neither.
bool read_map(Call& call, PyObject* batch_object, PyObject* tile_object, int total_q,
              attention::QWorkMap* map) {
  if (batch_object == Py_None && tile_object == Py_None) return false;
  const TensorView batch = call.input(batch_object, "q_tile_to_batch");
  const TensorView tile = call.input(tile_object, "q_tile_to_index");
  require_indices(call, batch, -1, "[tiles]");
  require_indices(call, tile, batch.shape[0], "[tiles]");
  require_int_sizes(call, batch);
  const int64_t least = (int64_t{total_q} + attention::kQMapRows - 1) / attention::kQMapRows;
  if (batch.shape[0] < least) {
    raise_argument(ErrorClass::kShape, call.function(), "q_tile_to_batch",
                   "of at least " + std::to_string(least) + " tiles of " +
                       std::to_string(attention::kQMapRows) + " queries for the " +
                       std::to_string(total_q) + " of q",
                   "shape " + batch.shape_text());
  }
  *map = {static_cast<const int32_t*>(batch.data), static_cast<const int32_t*>(tile.data),
          static_cast<int>(batch.shape[0])};
  return true;
}

PyObject* attn_paged_prefill(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "attn_paged_prefill";
  require_count(kName, count, kPagedArguments + 3);
  Call call(kName);
  if (args[7] == Py_None) {
    raise_argument(ErrorClass::kType, kName, "qo_indptr", "a torch.Tensor", "None");
  }
  const attention::AttentionParams params = read_paged(call, args, std::numeric_limits<int>::max());
  PyObject* const* rest = args + kPagedArguments;
  attention::QWorkMap map;
  const bool has_map = read_map(call, rest[0], rest[1], params.total_q, &map);
  run_prefill(call, params, {args[0], rest[2], Py_None}, has_map ? &map : nullptr);
  call.finish();
  Py_RETURN_NONE;
}

PyObject* build_q_work_map(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "build_q_work_map";
  require_count(kName, count, 3);
  Call call(kName);
  const TensorView starts = call.input(args[0], "qo_indptr");
  require_indices(call, starts, -1, "[batch + 1]");
  const TensorView batch = call.output(args[1], "q_tile_to_batch");
  const TensorView tile = call.output(args[2], "q_tile_to_index");
  require_indices(call, batch, -1, "[tiles]");
  require_indices(call, tile, batch.shape[0], "[tiles]");
  for (const TensorView* view : {&starts, &batch}) require_int_sizes(call, *view);
  if (starts.shape[0] > 1 && batch.shape[0] > 0) {
    const int device = call.device().device_id;
    require_capability(kName, device);
    auto* stream = static_cast<cudaStream_t>(call.stream());
    DeviceGuard guard(kName, device);
    require_launched(kName, attention::launch_q_work_map(static_cast<const int32_t*>(starts.data),
                                                         static_cast<int>(starts.shape[0] - 1),
                                                         static_cast<int32_t*>(batch.data),
                                                         static_cast<int32_t*>(tile.data),
                                                         static_cast<int>(batch.shape[0]), stream));
  }
  call.finish();
  Py_RETURN_NONE;
}

PyObject* attn_paged_prefill_workspace_size(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "attn_paged_prefill_workspace_size";
  require_count(kName, count, kWorkspaceSizeArguments);
  return prefill_workspace_size(kName, args);
}

PyMethodDef functions[] = {
    ASTRAI_FASTCALL("attn_paged_prefill", attn_paged_prefill,
                    "attn_paged_prefill(q, k_cache, v_cache, req_to_token, req_pool_indices, "
                    "block_table, kv_indptr, qo_indptr, max_q_len, new_k, new_v, mask, is_causal, "
                    "scale, window, softcap, sinks, k_scale, v_scale, out, lse, q_tile_to_batch, "
                    "q_tile_to_index, workspace, /) -> None\n\n"
                    "Writes out and lse; see astrai.extension.ops.attention for the arguments."),
    ASTRAI_FASTCALL("build_q_work_map", build_q_work_map,
                    "build_q_work_map(qo_indptr, q_tile_to_batch, q_tile_to_index, /) -> None\n\n"
                    "Writes the two maps, with batch -1 in entries without work."),
    ASTRAI_FASTCALL("attn_paged_prefill_workspace_size", attn_paged_prefill_workspace_size,
                    "attn_paged_prefill_workspace_size(batch, max_q_len, q_heads, kv_heads, "
                    "head_dim, v_head_dim, deterministic, device, /) -> int\n\nBytes of "
                    "workspace."),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace astrai::bindings

PYBIND11_MODULE(attn_paged_prefill, module) {
  module.doc() = "Prefill attention over a paged cache on CUDA.";
  astrai::bindings::define_module(module, "attn_paged_prefill", astrai::bindings::functions);
}
