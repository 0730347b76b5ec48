// What the entry points of decode and prefill over dense tensors share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

#include "kernels/attention/attention.h"
#include "kernels/attention/kv_source.cuh"

namespace astrai::attention {

// Calls f with a value of the element type.
template <typename F>
cudaError_t with_element_type(DType dtype, F f) {
  return dtype == DType::kBF16 ? f(__nv_bfloat16()) : f(__half());
}

template <typename T>
ContigKV<T> contig_kv(const DenseParams& p) {
  return {p.k, p.v, p.kv_len};
}

// Whether a grid may have that many blocks.
inline bool is_launchable(int64_t blocks) {
  return blocks > 0 && blocks <= std::numeric_limits<int32_t>::max();
}

}  // namespace astrai::attention
