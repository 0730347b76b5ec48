// A paged cache of keys or values as the bindings read it.
#pragma once

#include <Python.h>

#include <cstdint>

#include "python/bindings/tensor.h"

namespace astrai::bindings {

// [slots, kv_heads, dim], which is pages of one row, or [pages, page_size, kv_heads, dim].
struct CacheView {
  TensorView view;
  int64_t pages;
  int64_t page_size;
  int64_t page_stride, row_stride, head_stride;

  // Whether slots page * page_size + row lie one row_stride behind the other.
  bool pages_are_rows() const {
    return page_size == 1 || pages <= 1 || page_stride == page_size * row_stride;
  }
};

// Any dtype; last stride 1. `written`: whether the kernel writes it. Throws PythonError, as below.
CacheView read_cache(Call& call, PyObject* object, const char* name, bool written);

// As many pages of the same size.
void require_same_pages(const Call& call, const CacheView& cache, const CacheView& other);

}  // namespace astrai::bindings
