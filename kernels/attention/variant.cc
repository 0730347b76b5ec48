#include "kernels/attention/variant.h"

#include <cstdint>

namespace astrai::attention {
namespace {

#ifdef ASTRAI_NO_MMA
constexpr bool kHaveMma = false;
#else
constexpr bool kHaveMma = true;
#endif

// A dimension of size 1 may have any stride: it is never multiplied by anything but 0.
struct Sizes {
  int64_t batch;
  int64_t seq;
  int64_t heads;
};

bool is_aligned(const Operand& x, const Sizes& sizes, DType dtype, int dim) {
  const int64_t elements = static_cast<int64_t>(16 / size_of(dtype));
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && dim % elements == 0 &&
         (sizes.batch == 1 || x.batch_stride % elements == 0) &&
         (sizes.seq == 1 || x.seq_stride % elements == 0) &&
         (sizes.heads == 1 || x.head_stride % elements == 0);
}

}  // namespace

bool rows_are_aligned(const AttentionParams& p) {
  const bool paged = p.pages.entries != nullptr;
  // Packed tensors have no batch dimension.
  const Sizes q = {p.qo_indptr == nullptr ? p.batch : 1,
                   p.qo_indptr == nullptr ? p.q_len : p.total_q, p.q_heads};
  Sizes kv = {p.batch, p.kv_len, p.kv_heads};
  if (paged) kv = {2, p.pages.page_size, p.kv_heads};
  if (!paged && p.kv_indptr != nullptr) kv = {1, 2, p.kv_heads};
  const Sizes fresh = {q.batch, q.seq, p.kv_heads};
  const Operand out = {p.out, p.out_batch_stride, p.out_seq_stride, p.out_head_stride};
  return is_aligned(p.q, q, p.dtype, p.head_dim) && is_aligned(out, q, p.dtype, p.v_head_dim) &&
         is_aligned(p.k, kv, p.kv_dtype, p.head_dim) &&
         is_aligned(p.v, kv, p.kv_dtype, p.v_head_dim) &&
         (p.new_k.data == nullptr || is_aligned(p.new_k, fresh, p.dtype, p.head_dim)) &&
         (p.new_v.data == nullptr || is_aligned(p.new_v, fresh, p.dtype, p.v_head_dim));
}

Variant choose_variant(const AttentionParams& p) {
  return kHaveMma && rows_are_aligned(p) ? Variant::kMma : Variant::kScalar;
}

}  // namespace astrai::attention
