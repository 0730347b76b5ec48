#include "python/bindings/rotary_call.h"

#include <limits>

namespace astrai::bindings {
namespace {

using rotary::RotaryOperand;
using rotary::RotaryParams;

constexpr const char* kLayout = "[tokens, heads, head_dim] or [batch, tokens, heads, head_dim]";

// A tensor of heads as [batch, tokens, heads, head_dim]; 3-D has batch 1.
struct Heads {
  TensorView view;
  int64_t batch, tokens, heads, head_dim;
  int64_t batch_stride, token_stride, head_stride;
};

Heads as_heads(const Call& call, const TensorView& view) {
  if (view.rank != 3 && view.rank != 4) {
    raise_argument(ErrorClass::kShape, call.function(), view.name,
                   std::string("of shape ") + kLayout,
                   std::to_string(view.rank) + "-D of shape " + view.shape_text());
  }
  require_dtype(call, view, {ScalarType::kBFloat16, ScalarType::kFloat16});
  require_dense_rows(call, view);
  for (int i = 0; i < view.rank; ++i) {
    // Only the product of batch and tokens may be larger; a single size never is in practice.
    if (view.shape[i] > std::numeric_limits<int>::max()) {
      raise_argument(ErrorClass::kShape, call.function(), view.name, "of sizes below 2^31",
                     view.shape_text());
    }
  }
  const int token_dim = view.rank - 3;
  Heads heads{view,
              token_dim == 0 ? 1 : view.shape[0],
              view.shape[token_dim],
              view.shape[token_dim + 1],
              view.shape[token_dim + 2],
              token_dim == 0 ? 0 : view.strides[0],
              view.strides[token_dim],
              view.strides[token_dim + 1]};
  return heads;
}

// Input and output of one operand. In place if both are one object or the same memory.
struct Rotated {
  Heads in, out;
};

Rotated read_operand(Call& call, PyObject* in_object, PyObject* out_object, const char* in_name,
                     const char* out_name) {
  if (in_object == out_object) {
    const Heads heads = as_heads(call, call.output(in_object, in_name));
    return {heads, heads};
  }
  const Heads in = as_heads(call, call.input(in_object, in_name));
  const Heads out = as_heads(call, call.output(out_object, out_name));
  require_same_dtype(call, out.view, in.view);
  if (out.view.rank != in.view.rank || out.view.shape != in.view.shape) {
    raise_argument(ErrorClass::kShape, call.function(), out_name,
                   "of shape " + in.view.shape_text() + " like " + in_name, out.view.shape_text());
  }
  if (!same_memory(out.view, in.view)) require_no_overlap(call, out.view, in.view);
  return {in, out};
}

RotaryOperand operand(const Rotated& x) {
  RotaryOperand operand;
  operand.in = x.in.view.data;
  operand.out = x.out.view.data;
  operand.heads = static_cast<int>(x.in.heads);
  operand.in_batch_stride = x.in.batch_stride;
  operand.in_token_stride = x.in.token_stride;
  operand.in_head_stride = x.in.head_stride;
  operand.out_batch_stride = x.out.batch_stride;
  operand.out_token_stride = x.out.token_stride;
  operand.out_head_stride = x.out.head_stride;
  return operand;
}

void fill_sizes(RotaryParams* params, const Heads& heads) {
  params->dtype = heads.view.dtype == ScalarType::kBFloat16 ? DType::kBF16 : DType::kFP16;
  params->batch = static_cast<int>(heads.batch);
  params->tokens = heads.tokens;
  params->head_dim = static_cast<int>(heads.head_dim);
}

void require_positions(const Call& call, const TensorView& positions, const Heads& q) {
  require_dtype(call, positions, {ScalarType::kInt32, ScalarType::kInt64});
  const bool flat = positions.rank == 1 && positions.shape[0] == q.batch * q.tokens;
  const bool by_batch = positions.rank == 2 && q.view.rank == 4 && positions.shape[0] == q.batch &&
                        positions.shape[1] == q.tokens;
  if (!flat && !by_batch) {
    const std::string tokens = std::to_string(q.tokens), batch = std::to_string(q.batch);
    raise_argument(ErrorClass::kShape, call.function(), "positions",
                   "of shape (" + std::to_string(q.batch * q.tokens) + ",)" +
                       (q.view.rank == 4 ? " or (" + batch + ", " + tokens + ")" : std::string()) +
                       ", one position for each token of q",
                   positions.shape_text());
  }
  require_contiguous(call, positions);
}

}  // namespace

int64_t read_rotary_dim(const Call& call, PyObject* object, const TensorView& cache,
                        int64_t head_dim) {
  const int64_t width = cache.shape[1];
  const int64_t rotary_dim =
      object == Py_None ? width : read_int(call.function(), object, "rotary_dim");
  if (rotary_dim < 2 || rotary_dim > head_dim || rotary_dim % 2 != 0) {
    raise_argument(ErrorClass::kShape, call.function(), "rotary_dim",
                   "even and in 2.." + std::to_string(head_dim) + " (head_dim)",
                   std::to_string(rotary_dim));
  }
  if (rotary_dim != width) {
    raise_argument(ErrorClass::kShape, call.function(), "cos_sin_cache",
                   "of shape [max_pos, rotary_dim = " + std::to_string(rotary_dim) + "]",
                   cache.shape_text());
  }
  return rotary_dim;
}

rotary::RotaryParams read_rotary_emb(Call& call, PyObject* const* args) {
  const Rotated x = read_operand(call, args[0], args[2], "x", "out");
  const TensorView freqs = call.input(args[1], "freqs_cis");

  const int64_t head_dim = x.in.head_dim;
  if (head_dim == 0 || head_dim % 2 != 0) {
    raise_argument(ErrorClass::kShape, call.function(), "x", "of an even head_dim",
                   "shape " + x.in.view.shape_text());
  }
  require_dtype(call, freqs, {ScalarType::kFloat32});
  if (x.in.view.rank == 3) {
    require_shape(call, freqs, {x.in.tokens, head_dim / 2, 2}, "[tokens, head_dim / 2, 2]");
  } else {
    require_shape(call, freqs, {x.in.batch, x.in.tokens, head_dim / 2, 2},
                  "[batch, tokens, head_dim / 2, 2]");
  }
  require_contiguous(call, freqs);
  require_no_overlap(call, x.out.view, freqs);

  RotaryParams params;
  fill_sizes(&params, x.in);
  params.rotary_dim = params.head_dim;
  params.pairing = rotary::Pairing::kInterleaved;
  params.q = operand(x);
  params.angles = static_cast<const float*>(freqs.data);
  params.source = RotaryParams::kPerToken;
  return params;
}

rotary::RotaryParams read_rotary_embed(Call& call, PyObject* const* args) {
  const Rotated q = read_operand(call, args[0], args[6], "q", "q_out");

  RotaryParams params;
  fill_sizes(&params, q.in);
  params.q = operand(q);
  if (args[1] != Py_None) {
    const Rotated k = read_operand(call, args[1], args[7], "k", "k_out");
    require_same_dtype(call, k.in.view, q.in.view);
    if (k.in.view.rank != q.in.view.rank || k.in.batch != q.in.batch ||
        k.in.tokens != q.in.tokens || k.in.head_dim != q.in.head_dim) {
      raise_argument(ErrorClass::kShape, call.function(), "k",
                     "of q's batch, tokens and head_dim, q being " + q.in.view.shape_text(),
                     k.in.view.shape_text());
    }
    require_no_overlap(call, q.out.view, k.in.view);
    require_no_overlap(call, k.out.view, q.in.view);
    require_no_overlap(call, k.out.view, q.out.view);
    params.k = operand(k);
  }

  const TensorView cache = call.input(args[2], "cos_sin_cache");
  require_dtype(call, cache, {ScalarType::kFloat32});
  require_rank(call, cache, 2, "[max_pos, rotary_dim]");
  require_contiguous(call, cache);
  const TensorView positions = call.input(args[3], "positions");
  require_positions(call, positions, q.in);

  const bool interleaved = read_bool(call.function(), args[4], "interleaved");
  params.pairing = interleaved ? rotary::Pairing::kInterleaved : rotary::Pairing::kHalfSplit;
  params.rotary_dim = static_cast<int>(read_rotary_dim(call, args[5], cache, q.in.head_dim));
  params.angles = static_cast<const float*>(cache.data);
  params.source = RotaryParams::kTable;
  params.positions = positions.data;
  params.positions_are_int64 = positions.dtype == ScalarType::kInt64;
  params.max_pos = cache.shape[0];
  return params;
}

}  // namespace astrai::bindings
