#include "python/bindings/merge_call.h"

#include <algorithm>
#include <limits>

namespace astrai::bindings {
namespace {

void require_like(const Call& call, const TensorView& view, const TensorView& other) {
  require_same_dtype(call, view, other);
  const bool same =
      view.rank == other.rank &&
      std::equal(view.shape.begin(), view.shape.begin() + view.rank, other.shape.begin());
  if (!same) {
    raise_argument(ErrorClass::kShape, call.function(), view.name,
                   "of shape " + other.shape_text() + " like " + other.name, view.shape_text());
  }
  require_contiguous(call, view);
}

void require_row_of(const Call& call, const TensorView& lse, const TensorView& out) {
  require_dtype(call, lse, {ScalarType::kFloat32});
  TensorView rows = out;
  --rows.rank;
  const bool same = lse.rank == rows.rank &&
                    std::equal(lse.shape.begin(), lse.shape.begin() + lse.rank, rows.shape.begin());
  if (!same) {
    raise_argument(ErrorClass::kShape, call.function(), lse.name,
                   "of shape " + rows.shape_text() + ", that of o_a without head_dim",
                   lse.shape_text());
  }
  require_contiguous(call, lse);
}

void require_same_or_apart(const Call& call, const TensorView& output, const TensorView& input) {
  if (!same_memory(output, input)) require_no_overlap(call, output, input);
}

}  // namespace

attention::MergeParams read_merge(Call& call, PyObject* const* args) {
  const TensorView a = call.input(args[0], "o_a");
  const TensorView lse_a = call.input(args[1], "lse_a");
  const TensorView b = call.input(args[2], "o_b");
  const TensorView lse_b = call.input(args[3], "lse_b");
  require_dtype(call, a, {ScalarType::kBFloat16, ScalarType::kFloat16, ScalarType::kFloat32});
  if (a.rank == 0 || a.shape[a.rank - 1] > std::numeric_limits<int>::max()) {
    raise_argument(ErrorClass::kShape, call.function(), "o_a", "of shape [..., head_dim]",
                   a.shape_text());
  }
  require_contiguous(call, a);
  require_row_of(call, lse_a, a);
  require_like(call, b, a);
  require_row_of(call, lse_b, a);
  const TensorView out = call.output(args[4], "out");
  const TensorView lse = call.output(args[5], "lse");
  require_like(call, out, a);
  require_row_of(call, lse, a);
  for (const TensorView* input : {&a, &b}) require_same_or_apart(call, out, *input);
  for (const TensorView* input : {&lse_a, &lse_b}) require_same_or_apart(call, lse, *input);
  for (const TensorView* input : {&lse_a, &lse_b, &lse}) require_no_overlap(call, out, *input);
  for (const TensorView* input : {&a, &b}) require_no_overlap(call, lse, *input);

  attention::MergeParams params;
  params.dtype = a.dtype == ScalarType::kBFloat16  ? DType::kBF16
                 : a.dtype == ScalarType::kFloat16 ? DType::kFP16
                                                   : DType::kFP32;
  params.rows = lse_a.numel();
  params.head_dim = static_cast<int>(a.shape[a.rank - 1]);
  params.out_a = a.data;
  params.lse_a = static_cast<const float*>(lse_a.data);
  params.out_b = b.data;
  params.lse_b = static_cast<const float*>(lse_b.data);
  params.out = out.data;
  params.lse = static_cast<float*>(lse.data);
  return params;
}

}  // namespace astrai::bindings
