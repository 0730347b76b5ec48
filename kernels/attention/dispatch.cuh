// From the run-time types and layouts of AttentionParams to the template arguments of the kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/attention/attention.h"
#include "kernels/attention/kv_source.cuh"

namespace astrai::attention {

template <typename E>
ContigKV<E> make_kv_source(const AttentionParams& p, ContigKV<E>*) {
  return {p.k, p.v, p.kv_len, p.kv_indptr};
}

template <typename E>
PagedKV<E> make_kv_source(const AttentionParams& p, PagedKV<E>*) {
  int page_shift = 0;
  while (1 << page_shift < p.pages.page_size) ++page_shift;
  return {p.k,          p.v,       p.kv_len, p.kv_indptr, p.pages.entries, p.pages.row_stride,
          p.pages.rows, page_shift};
}

// Calls f(element, source) with a value of the type of q and out, and the source of keys and
// values.
template <typename F>
cudaError_t with_types(const AttentionParams& p, F f) {
  const auto with_source = [&](auto element, auto kv_element) {
    using E = decltype(kv_element);
    if (p.pages.entries == nullptr) {
      return f(element, make_kv_source(p, static_cast<ContigKV<E>*>(nullptr)));
    }
    return f(element, make_kv_source(p, static_cast<PagedKV<E>*>(nullptr)));
  };
  const auto with_element = [&](auto element) {
    if (p.kv_dtype == DType::kE4M3) return with_source(element, __nv_fp8_e4m3());
    return with_source(element, element);
  };
  return p.dtype == DType::kBF16 ? with_element(__nv_bfloat16()) : with_element(__half());
}

// Whether a grid may have that many blocks.
inline bool is_launchable(int64_t blocks) {
  return blocks > 0 && blocks <= std::numeric_limits<int32_t>::max();
}

}  // namespace astrai::attention
