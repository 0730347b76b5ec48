#include "python/bindings/probe_params.h"

#include <pybind11/pybind11.h>

#include "kernels/rotary/rope_append_plan.h"
#include "python/bindings/attention_call.h"
#include "python/bindings/merge_call.h"
#include "python/bindings/module.h"
#include "python/bindings/paged_call.h"
#include "python/bindings/rope_append_call.h"
#include "python/bindings/rotary_call.h"

namespace py = pybind11;

namespace astrai::bindings {
namespace {

intptr_t address(const void* pointer) { return reinterpret_cast<intptr_t>(pointer); }

py::tuple operand_tuple(const attention::Operand& x) {
  return py::make_tuple(address(x.data), x.batch_stride, x.seq_stride, x.head_stride);
}

PyObject* attention_dict(const attention::AttentionParams& p) {
  py::dict d;
  d["dtype"] = name_of(p.dtype);
  d["kv_dtype"] = name_of(p.kv_dtype);
  d["sizes"] =
      py::make_tuple(p.batch, p.q_len, p.kv_len, p.q_heads, p.kv_heads, p.head_dim, p.v_head_dim);
  d["total_q"] = p.total_q;
  d["q"] = operand_tuple(p.q);
  d["k"] = operand_tuple(p.k);
  d["v"] = operand_tuple(p.v);
  d["new_k"] = operand_tuple(p.new_k);
  d["new_v"] = operand_tuple(p.new_v);
  d["out"] = operand_tuple({p.out, p.out_batch_stride, p.out_seq_stride, p.out_head_stride});
  d["lse"] = address(p.lse);
  d["indptr"] = py::make_tuple(address(p.qo_indptr), address(p.kv_indptr));
  d["pages"] = py::make_tuple(address(p.pages.entries), p.pages.row_stride, p.pages.width,
                              address(p.pages.rows), p.pages.page_size);
  d["scale"] = p.scale;
  d["causal"] = p.causal;
  d["window"] = py::make_tuple(p.window_left, p.window_right);
  d["softcap"] = p.softcap;
  d["sinks"] = address(p.sinks);
  d["mask"] = py::make_tuple(address(p.mask.data), p.mask.batch_stride, p.mask.head_stride,
                             p.mask.q_stride, p.mask.rows, p.mask.width);
  d["steps"] =
      py::make_tuple(p.k_scale, p.v_scale, address(p.k_scale_pointer), address(p.v_scale_pointer));
  const char* reason = attention::why_not_implemented(p);
  d["why_not"] = reason == nullptr ? "" : reason;
  return d.release().ptr();
}

PyObject* dense_params(PyObject* const* args, Py_ssize_t count) {
  require_count("dense_params", count, 1 + kDenseArguments);
  Call call(PyUnicode_AsUTF8(args[0]), Devices::kAny);
  return attention_dict(read_dense(call, args + 1));
}

PyObject* varlen_params(PyObject* const* args, Py_ssize_t count) {
  require_count("attn_varlen", count, kVarlenArguments);
  Call call("attn_varlen", Devices::kAny);
  return attention_dict(read_varlen(call, args));
}

PyObject* paged_params(PyObject* const* args, Py_ssize_t count) {
  require_count("paged_params", count, 2 + kPagedArguments);
  Call call(PyUnicode_AsUTF8(args[0]), Devices::kAny);
  const auto most = static_cast<int>(read_int("paged_params", args[1], "most_queries"));
  return attention_dict(read_paged(call, args + 2, most));
}

PyObject* merge_params(PyObject* const* args, Py_ssize_t count) {
  require_count("merge_states", count, kMergeArguments);
  Call call("merge_states", Devices::kAny);
  const attention::MergeParams p = read_merge(call, args);
  py::dict d;
  d["dtype"] = name_of(p.dtype);
  d["sizes"] = py::make_tuple(p.rows, p.head_dim);
  d["inputs"] =
      py::make_tuple(address(p.out_a), address(p.lse_a), address(p.out_b), address(p.lse_b));
  d["outputs"] = py::make_tuple(address(p.out), address(p.lse));
  return d.release().ptr();
}

py::tuple rotary_operand(const rotary::RotaryOperand& x) {
  return py::make_tuple(address(x.in), x.in_batch_stride, x.in_token_stride, x.in_head_stride,
                        address(x.out), x.out_batch_stride, x.out_token_stride, x.out_head_stride,
                        x.heads);
}

PyObject* rotary_dict(const rotary::RotaryParams& p) {
  py::dict d;
  d["dtype"] = name_of(p.dtype);
  d["sizes"] = py::make_tuple(p.batch, p.tokens, p.head_dim, p.rotary_dim);
  d["interleaved"] = p.pairing == rotary::Pairing::kInterleaved;
  d["q"] = rotary_operand(p.q);
  d["k"] = rotary_operand(p.k);
  d["angles"] = address(p.angles);
  d["positions"] = address(p.positions);
  d["positions_are_int64"] = p.positions_are_int64;
  d["max_pos"] = p.max_pos;
  d["has_work"] = has_work(p);
  return d.release().ptr();
}

PyObject* rotary_emb_params(PyObject* const* args, Py_ssize_t count) {
  require_count("rotary_emb", count, kRotaryEmbArguments);
  Call call("rotary_emb", Devices::kAny);
  return rotary_dict(read_rotary_emb(call, args));
}

PyObject* rotary_embed_params(PyObject* const* args, Py_ssize_t count) {
  require_count("rotary_embed", count, kRotaryEmbedArguments);
  Call call("rotary_embed", Devices::kAny);
  return rotary_dict(read_rotary_embed(call, args));
}

py::tuple appended_operand(const rotary::AppendedOperand& x) {
  return py::make_tuple(address(x.in), x.token_stride, x.head_stride, address(x.cache),
                        x.page_stride, x.row_stride, x.cache_head_stride, x.scale,
                        address(x.scale_pointer));
}

PyObject* rope_append_params(PyObject* const* args, Py_ssize_t count) {
  require_count("rope_append_kv", count, kRopeAppendArguments);
  Call call("rope_append_kv", Devices::kAny);
  const rotary::RopeAppendParams p = read_rope_append(call, args);
  py::dict d;
  d["dtype"] = name_of(p.dtype);
  d["cache_dtype"] = name_of(p.cache_dtype);
  d["sizes"] = py::make_tuple(p.tokens, p.kv_heads, p.head_dim, p.v_head_dim, p.rotary_dim);
  d["interleaved"] = p.pairing == rotary::Pairing::kInterleaved;
  d["q"] = py::make_tuple(p.q.heads, address(p.q.in), p.q.in_token_stride, p.q.in_head_stride,
                          address(p.q.out), p.q.out_token_stride, p.q.out_head_stride);
  d["k"] = appended_operand(p.k);
  d["v"] = appended_operand(p.v);
  d["angles"] = py::make_tuple(address(p.angles), p.max_pos);
  d["positions"] = py::make_tuple(address(p.positions), p.positions_are_int64);
  d["slots"] = py::make_tuple(address(p.slots), p.slots_are_int64, p.slot_count, p.page_size);
  d["has_work"] = has_work(p);
  d["can_implement"] = rotary::can_implement(p);
  return d.release().ptr();
}

}  // namespace

PyMethodDef probe_params_functions[] = {
    ASTRAI_FASTCALL("dense_params", dense_params, "dense_params(function, *args)"),
    ASTRAI_FASTCALL("varlen_params", varlen_params, "varlen_params(*args)"),
    ASTRAI_FASTCALL("paged_params", paged_params, "paged_params(function, most_queries, *args)"),
    ASTRAI_FASTCALL("merge_params", merge_params, "merge_params(*args)"),
    ASTRAI_FASTCALL("rotary_emb_params", rotary_emb_params, "rotary_emb_params(*args)"),
    ASTRAI_FASTCALL("rotary_embed_params", rotary_embed_params, "rotary_embed_params(*args)"),
    ASTRAI_FASTCALL("rope_append_params", rope_append_params, "rope_append_params(*args)"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace astrai::bindings
