#include "python/bindings/rope_append_call.h"

#include "python/bindings/cache_view.h"
#include "python/bindings/rotary_call.h"

namespace astrai::bindings {
namespace {

using rotary::RopeAppendParams;

constexpr const char* kLayout = "[tokens, heads, head_dim]";

TensorView as_tokens(const Call& call, const TensorView& view) {
  require_rank(call, view, 3, kLayout);
  require_int_sizes(call, view);
  require_dense_rows(call, view);
  return view;
}

// int32 or int64 [tokens].
TensorView read_indices(Call& call, PyObject* object, const char* name, int64_t tokens) {
  const TensorView view = call.input(object, name);
  require_dtype(call, view, {ScalarType::kInt32, ScalarType::kInt64});
  require_shape(call, view, {tokens}, "[tokens]");
  require_contiguous(call, view);
  return view;
}

void read_q(Call& call, PyObject* q_object, PyObject* out_object, const TensorView& k,
            RopeAppendParams* params, TensorView* out) {
  const bool in_place = q_object == out_object;
  const TensorView q =
      as_tokens(call, in_place ? call.output(q_object, "q") : call.input(q_object, "q"));
  require_same_dtype(call, q, k);
  require_shape(call, q, {k.shape[0], q.shape[1], k.shape[2]}, "[tokens, q_heads, head_dim]");
  *out = q;
  if (!in_place) {
    *out = as_tokens(call, call.output(out_object, "q_out"));
    require_same_dtype(call, *out, q);
    require_shape(call, *out, {q.shape[0], q.shape[1], q.shape[2]}, "[tokens, q_heads, head_dim]");
    if (!same_memory(*out, q)) require_no_overlap(call, *out, q);
  }
  params->q.heads = static_cast<int>(q.shape[1]);
  params->q.in = q.data;
  params->q.out = out->data;
  params->q.in_token_stride = q.strides[0];
  params->q.in_head_stride = q.strides[1];
  params->q.out_token_stride = out->strides[0];
  params->q.out_head_stride = out->strides[1];
}

void read_rotation(Call& call, PyObject* const* args, int64_t tokens, RopeAppendParams* params) {
  params->pairing = read_bool(call.function(), args[8], "interleaved")
                        ? rotary::Pairing::kInterleaved
                        : rotary::Pairing::kHalfSplit;
  if (args[3] == Py_None) {
    if (args[9] != Py_None) {
      raise_argument(ErrorClass::kShape, call.function(), "rotary_dim",
                     "None where cos_sin_cache is", describe(args[9]));
    }
    return;
  }
  const TensorView cache = call.input(args[3], "cos_sin_cache");
  require_dtype(call, cache, {ScalarType::kFloat32});
  require_rank(call, cache, 2, "[max_pos, rotary_dim]");
  require_contiguous(call, cache);
  params->rotary_dim = static_cast<int>(read_rotary_dim(call, args[9], cache, params->head_dim));
  params->angles = static_cast<const float*>(cache.data);
  params->max_pos = cache.shape[0];
  const TensorView positions = read_indices(call, args[4], "positions", tokens);
  params->positions = positions.data;
  params->positions_are_int64 = positions.dtype == ScalarType::kInt64;
}

CacheView read_target(Call& call, PyObject* object, const char* name, const TensorView& rows) {
  const CacheView cache = read_cache(call, object, name, true);
  const TensorView& view = cache.view;
  if (view.dtype != rows.dtype && view.dtype != ScalarType::kFloat8E4M3) {
    raise_argument(
        ErrorClass::kDtype, call.function(), name,
        std::string(name_of(rows.dtype)) + " like " + rows.name + " or torch.float8_e4m3fn",
        name_of(view.dtype));
  }
  if (view.shape[view.rank - 2] != rows.shape[1] || view.shape[view.rank - 1] != rows.shape[2]) {
    raise_argument(
        ErrorClass::kShape, call.function(), name,
        "of the heads and head_dim of " + std::string(rows.name) + ", shape " + rows.shape_text(),
        view.shape_text());
  }
  return cache;
}

rotary::AppendedOperand operand(const TensorView& rows, const CacheView& cache) {
  rotary::AppendedOperand x;
  x.in = rows.data;
  x.token_stride = rows.strides[0];
  x.head_stride = rows.strides[1];
  x.cache = cache.view.data;
  x.page_stride = cache.page_stride;
  x.row_stride = cache.row_stride;
  x.cache_head_stride = cache.head_stride;
  return x;
}

void require_page_size(const Call& call, const CacheView& k, const CacheView& v) {
  const int64_t page = k.page_size;
  const bool power_of_two = page > 0 && (page & (page - 1)) == 0;
  if (power_of_two || k.pages * page == 0 || (k.pages_are_rows() && v.pages_are_rows())) return;
  raise_argument(ErrorClass::kShape, call.function(), "k_cache",
                 "of a page_size that is a power of two, or of pages that follow each other",
                 "shape " + k.view.shape_text() + " with strides " + k.view.strides_text());
}

}  // namespace

RopeAppendParams read_rope_append(Call& call, PyObject* const* args) {
  const TensorView k = as_tokens(call, call.input(args[1], "k"));
  require_dtype(call, k, {ScalarType::kBFloat16, ScalarType::kFloat16});
  const TensorView v = as_tokens(call, call.input(args[2], "v"));
  require_same_dtype(call, v, k);
  const int64_t tokens = k.shape[0];
  require_shape(call, v, {tokens, k.shape[1], v.shape[2]}, "[tokens, kv_heads, v_head_dim]");

  RopeAppendParams params;
  params.dtype = k.dtype == ScalarType::kBFloat16 ? DType::kBF16 : DType::kFP16;
  params.tokens = tokens;
  params.kv_heads = static_cast<int>(k.shape[1]);
  params.head_dim = static_cast<int>(k.shape[2]);
  params.v_head_dim = static_cast<int>(v.shape[2]);
  TensorView q_out;
  if (args[0] != Py_None) read_q(call, args[0], args[12], k, &params, &q_out);
  read_rotation(call, args, tokens, &params);

  const CacheView k_cache = read_target(call, args[5], "k_cache", k);
  const CacheView v_cache = read_target(call, args[6], "v_cache", v);
  require_same_dtype(call, v_cache.view, k_cache.view);
  require_same_pages(call, v_cache, k_cache);
  require_page_size(call, k_cache, v_cache);
  params.cache_dtype = k_cache.view.dtype == k.dtype ? params.dtype : DType::kE4M3;
  params.k = operand(k, k_cache);
  params.v = operand(v, v_cache);
  params.page_size = static_cast<int>(k_cache.page_size == 0 ? 1 : k_cache.page_size);
  params.slot_count = k_cache.pages * k_cache.page_size;

  const TensorView slots = read_indices(call, args[7], "slots", tokens);
  params.slots = slots.data;
  params.slots_are_int64 = slots.dtype == ScalarType::kInt64;
  read_step(call, args[10], "k_scale", &params.k.scale, &params.k.scale_pointer);
  read_step(call, args[11], "v_scale", &params.v.scale, &params.v.scale_pointer);

  for (const TensorView* input : {&k, &v}) {
    require_no_overlap(call, k_cache.view, *input);
    require_no_overlap(call, v_cache.view, *input);
    if (args[0] != Py_None) require_no_overlap(call, q_out, *input);
  }
  require_no_overlap(call, k_cache.view, v_cache.view);
  if (args[0] != Py_None) {
    require_no_overlap(call, q_out, k_cache.view);
    require_no_overlap(call, q_out, v_cache.view);
  }
  return params;
}

}  // namespace astrai::bindings
