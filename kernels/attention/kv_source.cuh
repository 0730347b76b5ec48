// Where the keys and values of a request lie. The kernels take the source as a template policy: it
// gives the number of keys of a request and the address of each key's row, and schedules nothing.
//
// Rows of a paged source are reached in two steps, so that a kernel can fetch table entries ahead
// of the copies that need them: page(key) reads the table, next(page) makes the address of it. For
// a contiguous source the first costs nothing and the second only adds a stride.
#pragma once

#include <cstdint>

#include "kernels/attention/attention.h"

namespace astrai::attention {

// Length of request b by prefix sums, or `fixed` without them.
__device__ __forceinline__ int request_length(const int32_t* indptr, int b, int fixed) {
  return indptr == nullptr ? fixed : max(0, min(fixed, indptr[b + 1] - indptr[b]));
}

// ---- Contiguous: dense [batch, kv_len, kv_heads, dim], or packed at prefix sums -----------------

// Visits the rows first, first + step, first + 2 * step, ... of one tensor, at a fixed column.
template <typename E>
struct StridedWalk {
  const E* element;
  int64_t step;

  // Address in the row it stands on; moves to the next. The page is not looked at.
  __device__ __forceinline__ const E* next(int /*page*/) {
    const E* here = element;
    element += step;
    return here;
  }
};

// Rows of one (request, kv head).
template <typename E>
struct StridedRows {
  const E* k;
  const E* v;
  int64_t k_stride;
  int64_t v_stride;

  __device__ __forceinline__ int page(int /*key*/) const { return 0; }
  __device__ __forceinline__ StridedWalk<E> walk_k(int first, int step, int column) const {
    return {k + first * k_stride + column, step * k_stride};
  }
  __device__ __forceinline__ StridedWalk<E> walk_v(int first, int step, int column) const {
    return {v + first * v_stride + column, step * v_stride};
  }
};

template <typename E>
struct ContigKV {
  static constexpr bool kPaged = false;  // all pages are 0 and no key is missing
  using Element = E;
  using Rows = StridedRows<E>;

  Operand k;
  Operand v;
  int kv_len;                // of each request, or the most that one may have
  const int32_t* kv_indptr;  // nullable

  __device__ __forceinline__ int length(int batch) const {
    return request_length(kv_indptr, batch, kv_len);
  }

  __device__ __forceinline__ Rows rows(int batch, int kv_head) const {
    return {start(k, batch) + kv_head * k.head_stride, start(v, batch) + kv_head * v.head_stride,
            k.seq_stride, v.seq_stride};
  }

  __device__ __forceinline__ const E* start(const Operand& x, int batch) const {
    const int64_t offset =
        kv_indptr == nullptr ? batch * x.batch_stride : kv_indptr[batch] * x.seq_stride;
    return static_cast<const E*>(x.data) + offset;
  }
};

// ---- Paged: [pages, page_size, kv_heads, dim] behind a table ------------------------------------

// Visits the keys first, first + step, ... of one cache, at a fixed column.
template <typename E>
struct PagedWalk {
  const E* base;
  int64_t page_stride;
  int64_t slot_stride;
  int key;
  int step;
  int slot_mask;

  // Address of the key it stands on, which lies in page `page`; moves to the next. A negative page
  // gives an address that must not be read.
  __device__ __forceinline__ const E* next(int page) {
    const E* here = base + page * page_stride + (key & slot_mask) * slot_stride;
    key += step;
    return here;
  }
};

template <typename E>
struct PagedRows {
  const E* k;
  const E* v;
  int64_t k_page_stride;
  int64_t k_slot_stride;
  int64_t v_page_stride;
  int64_t v_slot_stride;
  const int32_t* entries;  // of the request
  int page_shift;

  // Entry of the table for `key`, which must be below the request's length.
  __device__ __forceinline__ int page(int key) const {
    return __ldg(entries + (key >> page_shift));
  }
  __device__ __forceinline__ PagedWalk<E> walk_k(int first, int step, int column) const {
    return {k + column, k_page_stride, k_slot_stride, first, step, (1 << page_shift) - 1};
  }
  __device__ __forceinline__ PagedWalk<E> walk_v(int first, int step, int column) const {
    return {v + column, v_page_stride, v_slot_stride, first, step, (1 << page_shift) - 1};
  }
};

template <typename E>
struct PagedKV {
  static constexpr bool kPaged = true;
  using Element = E;
  using Rows = PagedRows<E>;

  Operand k;  // batch_stride steps pages, seq_stride steps rows of a page
  Operand v;
  int kv_len;  // no more than the table's rows hold
  const int32_t* kv_indptr;
  const int32_t* entries;
  int64_t row_stride;
  const int32_t* table_rows;  // nullable
  int page_shift;

  __device__ __forceinline__ int length(int batch) const {
    return request_length(kv_indptr, batch, kv_len);
  }

  __device__ __forceinline__ Rows rows(int batch, int kv_head) const {
    const int64_t row = table_rows == nullptr ? batch : table_rows[batch];
    return {static_cast<const E*>(k.data) + kv_head * k.head_stride,
            static_cast<const E*>(v.data) + kv_head * v.head_stride,
            k.batch_stride,
            k.seq_stride,
            v.batch_stride,
            v.seq_stride,
            entries + row * row_stride,
            page_shift};
  }
};

}  // namespace astrai::attention
