#include "python/bindings/attention_call.h"

#include <algorithm>
#include <limits>

#include "python/bindings/attention_features.h"

namespace astrai::bindings {
namespace {

using attention::AttentionParams;

constexpr const char* kQueryLayout = "[batch, q_len, q_heads, head_dim]";
constexpr const char* kKeyLayout = "[batch, kv_len, kv_heads, head_dim]";
constexpr const char* kPackedQueryLayout = "[tokens, q_heads, head_dim]";
constexpr const char* kPackedKeyLayout = "[tokens, kv_heads, head_dim]";

attention::MaskView read_mask(Call& call, PyObject* object, const AttentionParams& params) {
  const TensorView mask = call.input(object, "mask");
  require_dtype(call, mask, {ScalarType::kBool});
  if (mask.rank < 2 || mask.rank > 4) {
    raise_argument(ErrorClass::kShape, call.function(), "mask",
                   "2-D [batch, kv_len], 3-D [batch, q_len, kv_len] or 4-D "
                   "[batch, q_heads, q_len, kv_len]",
                   std::to_string(mask.rank) + "-D of shape " + mask.shape_text());
  }
  if (mask.shape[mask.rank - 1] != params.kv_len) {
    raise_argument(ErrorClass::kShape, call.function(), "mask",
                   "of kv_len " + std::to_string(params.kv_len) + " in its last dimension",
                   "shape " + mask.shape_text());
  }
  attention::MaskView view;
  view.batch_stride = broadcast_stride(call, mask, 0, params.batch, "batch");
  if (mask.rank >= 3) {
    view.q_stride = broadcast_stride(call, mask, mask.rank - 2, params.q_len, "q_len");
  }
  if (mask.rank == 4) {
    view.head_stride = broadcast_stride(call, mask, 1, params.q_heads, "q_heads");
  }
  require_dense_rows(call, mask);
  view.data = static_cast<const bool*>(mask.data);
  view.rows = params.q_len;
  view.width = params.kv_len;
  return view;
}

// None for all there are, or an int of at most that.
int read_longest(const Call& call, PyObject* object, const char* name, int64_t tokens) {
  if (object == Py_None) return static_cast<int>(tokens);
  const int64_t longest = read_int(call.function(), object, name);
  if (longest < 0) {
    raise_argument(ErrorClass::kShape, call.function(), name, "0 or more", std::to_string(longest));
  }
  return static_cast<int>(std::min(longest, tokens));
}

// lse, if it is wanted.
void read_lse(Call& call, PyObject* object, std::initializer_list<int64_t> shape,
              const char* layout, std::initializer_list<const TensorView*> inputs,
              AttentionParams* params) {
  if (object == Py_None) return;
  const TensorView lse = call.output(object, "lse");
  require_dtype(call, lse, {ScalarType::kFloat32});
  require_shape(call, lse, shape, layout);
  require_contiguous(call, lse);
  for (const TensorView* input : inputs) require_no_overlap(call, lse, *input);
  params->lse = static_cast<float*>(lse.data);
}

}  // namespace

attention::Operand dense_operand(const TensorView& view) {
  return {view.data, view.strides[0], view.strides[1], view.strides[2]};
}

attention::Operand packed_operand(const TensorView& view) {
  return {view.data, 0, view.strides[0], view.strides[1]};
}

void require_indices(const Call& call, const TensorView& view, int64_t size, const char* layout) {
  require_dtype(call, view, {ScalarType::kInt32});
  if (size < 0) {
    require_rank(call, view, 1, layout);
  } else {
    require_shape(call, view, {size}, layout);
  }
  require_contiguous(call, view);
}

void read_types(const Call& call, const TensorView& q, const TensorView& k, const TensorView& v,
                AttentionParams* params) {
  require_dtype(call, q, {ScalarType::kBFloat16, ScalarType::kFloat16});
  params->dtype = q.dtype == ScalarType::kBFloat16 ? DType::kBF16 : DType::kFP16;
  if (k.dtype != q.dtype && k.dtype != ScalarType::kFloat8E4M3) {
    raise_argument(ErrorClass::kDtype, call.function(), k.name,
                   std::string(name_of(q.dtype)) + " like q or torch.float8_e4m3fn",
                   name_of(k.dtype));
  }
  require_same_dtype(call, v, k);
  params->kv_dtype = k.dtype == q.dtype ? params->dtype : DType::kE4M3;
}

void read_heads(const Call& call, const TensorView& q, const TensorView& k, const TensorView& v,
                AttentionParams* params) {
  const int64_t q_heads = q.shape[q.rank - 2], head_dim = q.shape[q.rank - 1];
  const int64_t kv_heads = k.shape[k.rank - 2], v_head_dim = v.shape[v.rank - 1];
  if (!attention::supports_head_dims(static_cast<int>(head_dim), static_cast<int>(head_dim))) {
    raise(ErrorClass::kShape, std::string(call.function()) + ": unsupported head_dim " +
                                  std::to_string(head_dim) +
                                  " (supported: multiples of 8 up to 256)");
  }
  if (!attention::supports_head_dims(static_cast<int>(head_dim), static_cast<int>(v_head_dim))) {
    raise_argument(ErrorClass::kShape, call.function(), v.name,
                   "of head_dim " + std::to_string(head_dim) + (head_dim == 192 ? " or 128" : ""),
                   "shape " + v.shape_text());
  }
  if (kv_heads == 0 ? q_heads != 0 : q_heads % kv_heads != 0) {
    raise_argument(ErrorClass::kShape, call.function(), "q",
                   "of a number of heads that is a multiple of the " + std::to_string(kv_heads) +
                       " heads of " + k.name,
                   std::to_string(q_heads) + " heads");
  }
  params->q_heads = static_cast<int>(q_heads);
  params->kv_heads = static_cast<int>(kv_heads);
  params->head_dim = static_cast<int>(head_dim);
  params->v_head_dim = static_cast<int>(v_head_dim);
}

int64_t broadcast_stride(const Call& call, const TensorView& mask, int dim, int64_t size,
                         const char* what) {
  if (mask.shape[dim] == 1) return 0;
  if (mask.shape[dim] != size) {
    raise_argument(ErrorClass::kShape, call.function(), "mask",
                   "of size 1 or " + std::to_string(size) + " in its " + what + " dimension",
                   "shape " + mask.shape_text());
  }
  return mask.strides[dim];
}

void read_packed_outputs(Call& call, PyObject* out_object, PyObject* lse_object,
                         const TensorView& q, std::initializer_list<const TensorView*> inputs,
                         AttentionParams* params) {
  const int64_t tokens = q.shape[0];
  const TensorView out = call.output(out_object, "out");
  require_same_dtype(call, out, q);
  require_shape(call, out, {tokens, params->q_heads, params->v_head_dim},
                "[tokens, q_heads, v_head_dim]");
  require_dense_rows(call, out);
  for (const TensorView* input : inputs) require_no_overlap(call, out, *input);
  params->out = out.data;
  // Without prefix sums each token is a request.
  params->out_batch_stride = out.strides[0];
  params->out_seq_stride = out.strides[0];
  params->out_head_stride = out.strides[1];
  read_lse(call, lse_object, {tokens, params->q_heads}, "[tokens, q_heads]", {&q, &out}, params);
}

AttentionParams read_dense(Call& call, PyObject* const* args) {
  const TensorView q = call.input(args[0], "q");
  const TensorView k = call.input(args[1], "k");
  const TensorView v = call.input(args[2], "v");
  AttentionParams params;
  read_types(call, q, k, v, &params);
  require_rank(call, q, 4, kQueryLayout);
  require_rank(call, k, 4, kKeyLayout);
  require_rank(call, v, 4, kKeyLayout);
  for (const TensorView* view : {&q, &k, &v}) require_int_sizes(call, *view);

  const int64_t batch = q.shape[0], kv_len = k.shape[1], kv_heads = k.shape[2];
  require_shape(call, k, {batch, kv_len, kv_heads, q.shape[3]}, kKeyLayout);
  require_shape(call, v, {batch, kv_len, kv_heads, v.shape[3]}, kKeyLayout);
  read_heads(call, q, k, v, &params);
  for (const TensorView* view : {&q, &k, &v}) require_dense_rows(call, *view);
  params.batch = static_cast<int>(batch);
  params.q_len = static_cast<int>(q.shape[1]);
  params.kv_len = static_cast<int>(kv_len);
  params.q = dense_operand(q);
  params.k = dense_operand(k);
  params.v = dense_operand(v);

  if (args[3] != Py_None) params.mask = read_mask(call, args[3], params);
  read_features(call, args + 4, &params);

  const TensorView out = call.output(args[11], "out");
  require_same_dtype(call, out, q);
  require_shape(call, out, {batch, params.q_len, params.q_heads, params.v_head_dim},
                "[batch, q_len, q_heads, v_head_dim]");
  require_dense_rows(call, out);
  for (const TensorView* view : {&q, &k, &v}) require_no_overlap(call, out, *view);
  params.out = out.data;
  params.out_batch_stride = out.strides[0];
  params.out_seq_stride = out.strides[1];
  params.out_head_stride = out.strides[2];
  read_lse(call, args[12], {batch, params.q_len, params.q_heads}, "[batch, q_len, q_heads]",
           {&q, &k, &v, &out}, &params);
  return params;
}

AttentionParams read_varlen(Call& call, PyObject* const* args) {
  const TensorView q = call.input(args[0], "q");
  const TensorView k = call.input(args[1], "k");
  const TensorView v = call.input(args[2], "v");
  AttentionParams params;
  read_types(call, q, k, v, &params);
  require_rank(call, q, 3, kPackedQueryLayout);
  require_rank(call, k, 3, kPackedKeyLayout);
  require_rank(call, v, 3, kPackedKeyLayout);
  for (const TensorView* view : {&q, &k, &v}) require_int_sizes(call, *view);
  require_shape(call, k, {k.shape[0], k.shape[1], q.shape[2]}, kPackedKeyLayout);
  require_shape(call, v, {k.shape[0], k.shape[1], v.shape[2]}, kPackedKeyLayout);
  read_heads(call, q, k, v, &params);
  for (const TensorView* view : {&q, &k, &v}) require_dense_rows(call, *view);

  const TensorView q_starts = call.input(args[3], "cu_seqlens_q");
  const TensorView k_starts = call.input(args[4], "cu_seqlens_k");
  require_indices(call, q_starts, -1, "[batch + 1]");
  if (q_starts.shape[0] == 0) {
    raise_argument(ErrorClass::kShape, call.function(), "cu_seqlens_q",
                   "of shape (batch + 1,), at least one element", q_starts.shape_text());
  }
  require_indices(call, k_starts, q_starts.shape[0], "[batch + 1]");
  params.batch = static_cast<int>(q_starts.shape[0] - 1);
  params.total_q = static_cast<int>(q.shape[0]);
  params.q_len = read_longest(call, args[5], "max_seqlen_q", q.shape[0]);
  params.kv_len = read_longest(call, args[6], "max_seqlen_k", k.shape[0]);
  params.qo_indptr = static_cast<const int32_t*>(q_starts.data);
  params.kv_indptr = static_cast<const int32_t*>(k_starts.data);
  params.q = packed_operand(q);
  params.k = packed_operand(k);
  params.v = packed_operand(v);

  read_features(call, args + 7, &params);
  read_packed_outputs(call, args[14], args[15], q, {&q, &k, &v}, &params);
  return params;
}

}  // namespace astrai::bindings
