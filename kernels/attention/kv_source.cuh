// Where the keys and values of a request lie. The kernels take the source as a template policy: it
// gives the number of keys of a batch element and the address of each key's row, and schedules
// nothing.
#pragma once

#include <cstdint>

#include "kernels/attention/attention.h"

namespace astrai::attention {

// Visits the rows first, first + step, first + 2 * step, ... of one tensor, at a fixed column.
template <typename T>
struct StridedWalk {
  const T* element;
  int64_t step;

  // Address in the row it stands on; moves to the next.
  __device__ __forceinline__ const T* next() {
    const T* here = element;
    element += step;
    return here;
  }
};

// Rows of one (batch, kv head), head_dim elements each.
template <typename T>
struct StridedRows {
  const T* k;
  const T* v;
  int64_t k_stride;
  int64_t v_stride;

  __device__ __forceinline__ StridedWalk<T> walk_k(int first, int step, int column) const {
    return {k + first * k_stride + column, step * k_stride};
  }
  __device__ __forceinline__ StridedWalk<T> walk_v(int first, int step, int column) const {
    return {v + first * v_stride + column, step * v_stride};
  }
};

// Dense [batch, kv_len, kv_heads, head_dim] tensors with any strides.
template <typename T>
struct ContigKV {
  Operand k;
  Operand v;
  int kv_len;

  using Element = T;
  using Rows = StridedRows<T>;

  __device__ __forceinline__ int length(int /*batch*/) const { return kv_len; }

  __device__ __forceinline__ Rows rows(int batch, int kv_head) const {
    return {static_cast<const T*>(k.data) + batch * k.batch_stride + kv_head * k.head_stride,
            static_cast<const T*>(v.data) + batch * v.batch_stride + kv_head * v.head_stride,
            k.seq_stride, v.seq_stride};
  }
};

}  // namespace astrai::attention
