#include "python/bindings/attention_call.h"

#include <cmath>
#include <limits>

namespace astrai::bindings {
namespace {

constexpr const char* kQueryLayout = "[batch, q_len, q_heads, head_dim]";
constexpr const char* kKeyLayout = "[batch, kv_len, kv_heads, head_dim]";

attention::Operand operand(const TensorView& view) {
  return {view.data, view.strides[0], view.strides[1], view.strides[2]};
}

void require_int_sizes(const Call& call, const TensorView& view) {
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] > std::numeric_limits<int>::max()) {
      raise_argument(ErrorClass::kShape, call.function(), view.name, "of sizes below 2^31",
                     view.shape_text());
    }
  }
}

// A mask dimension of size 1 broadcasts: stride 0.
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

attention::MaskView read_mask(Call& call, PyObject* object, const TensorView& q, int64_t kv_len) {
  const TensorView mask = call.input(object, "mask");
  require_dtype(call, mask, {ScalarType::kBool});
  if (mask.rank < 2 || mask.rank > 4) {
    raise_argument(ErrorClass::kShape, call.function(), "mask",
                   "2-D [batch, kv_len], 3-D [batch, q_len, kv_len] or 4-D "
                   "[batch, q_heads, q_len, kv_len]",
                   std::to_string(mask.rank) + "-D of shape " + mask.shape_text());
  }
  if (mask.shape[mask.rank - 1] != kv_len) {
    raise_argument(ErrorClass::kShape, call.function(), "mask",
                   "of kv_len " + std::to_string(kv_len) + " in its last dimension",
                   "shape " + mask.shape_text());
  }
  attention::MaskView view;
  view.batch_stride = broadcast_stride(call, mask, 0, q.shape[0], "batch");
  if (mask.rank >= 3) {
    view.q_stride = broadcast_stride(call, mask, mask.rank - 2, q.shape[1], "q_len");
  }
  if (mask.rank == 4) {
    view.head_stride = broadcast_stride(call, mask, 1, q.shape[2], "q_heads");
  }
  require_dense_rows(call, mask);
  view.data = static_cast<const bool*>(mask.data);
  return view;
}

float read_scale(const Call& call, PyObject* object, int64_t head_dim) {
  if (object == Py_None) return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  const double scale = read_double(call.function(), object, "scale");
  if (!std::isfinite(static_cast<float>(scale))) {
    raise_argument(ErrorClass::kShape, call.function(), "scale", "finite in fp32",
                   std::to_string(scale));
  }
  return static_cast<float>(scale);
}

}  // namespace

attention::DenseParams read_attention(Call& call, PyObject* const* args) {
  const TensorView q = call.input(args[0], "q");
  const TensorView k = call.input(args[1], "k");
  const TensorView v = call.input(args[2], "v");
  require_dtype(call, q, {ScalarType::kBFloat16, ScalarType::kFloat16});
  require_same_dtype(call, k, q);
  require_same_dtype(call, v, q);
  require_rank(call, q, 4, kQueryLayout);
  require_rank(call, k, 4, kKeyLayout);
  require_rank(call, v, 4, kKeyLayout);
  for (const TensorView* view : {&q, &k, &v}) require_int_sizes(call, *view);

  const int64_t batch = q.shape[0], q_len = q.shape[1], q_heads = q.shape[2], head_dim = q.shape[3];
  const int64_t kv_len = k.shape[1], kv_heads = k.shape[2];
  if (!attention::supports_head_dim(static_cast<int>(head_dim))) {
    raise(ErrorClass::kShape, std::string(call.function()) + ": unsupported head_dim " +
                                  std::to_string(head_dim) + " (supported: 64, 128, 256)");
  }
  require_shape(call, k, {batch, kv_len, kv_heads, head_dim}, kKeyLayout);
  require_shape(call, v, {batch, kv_len, kv_heads, head_dim}, kKeyLayout);
  if (kv_heads == 0 ? q_heads != 0 : q_heads % kv_heads != 0) {
    raise_argument(ErrorClass::kShape, call.function(), "q",
                   "of a number of heads that is a multiple of the " + std::to_string(kv_heads) +
                       " heads of k",
                   std::to_string(q_heads) + " heads");
  }
  for (const TensorView* view : {&q, &k, &v}) require_dense_rows(call, *view);

  attention::DenseParams params;
  if (args[3] != Py_None) params.mask = read_mask(call, args[3], q, kv_len);
  params.causal = read_bool(call.function(), args[4], "is_causal");
  params.scale = read_scale(call, args[5], head_dim);

  const TensorView out = call.output(args[6], "out");
  require_same_dtype(call, out, q);
  require_shape(call, out, {batch, q_len, q_heads, head_dim}, kQueryLayout);
  require_dense_rows(call, out);
  for (const TensorView* view : {&q, &k, &v}) require_no_overlap(call, out, *view);
  if (args[7] != Py_None) {
    const TensorView lse = call.output(args[7], "lse");
    require_dtype(call, lse, {ScalarType::kFloat32});
    require_shape(call, lse, {batch, q_len, q_heads}, "[batch, q_len, q_heads]");
    require_contiguous(call, lse);
    params.lse = static_cast<float*>(lse.data);
  }

  params.dtype = q.dtype == ScalarType::kBFloat16 ? DType::kBF16 : DType::kFP16;
  params.batch = static_cast<int>(batch);
  params.q_len = static_cast<int>(q_len);
  params.kv_len = static_cast<int>(kv_len);
  params.q_heads = static_cast<int>(q_heads);
  params.kv_heads = static_cast<int>(kv_heads);
  params.head_dim = static_cast<int>(head_dim);
  params.q = operand(q);
  params.k = operand(k);
  params.v = operand(v);
  params.out = out.data;
  params.out_batch_stride = out.strides[0];
  params.out_seq_stride = out.strides[1];
  params.out_head_stride = out.strides[2];
  return params;
}

}  // namespace astrai::bindings
