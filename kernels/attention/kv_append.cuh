// Puts the keys and values of new tokens into a paged cache: a copy, or rounded to e4m3.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/attention/kv_source.cuh"
#include "kernels/common/fp8.cuh"
#include "kernels/common/vec.cuh"

namespace astrai::attention {

// Where a request's queries lie: packed behind prefix sums, or q_len for every request. New keys
// and values lie alike.
struct QueryRows {
  int q_len;                 // of each request, or the most that one may have
  const int32_t* qo_indptr;  // nullable

  __device__ __forceinline__ int length(int batch) const {
    return request_length(qo_indptr, batch, q_len);
  }
  // Elements to position 0 of the request.
  __device__ __forceinline__ int64_t offset(int batch, int64_t batch_stride,
                                            int64_t seq_stride) const {
    return qo_indptr == nullptr ? batch * batch_stride : qo_indptr[batch] * seq_stride;
  }
  // Token index of position 0, as in lse.
  __device__ __forceinline__ int64_t token(int batch) const {
    return qo_indptr == nullptr ? static_cast<int64_t>(batch) * q_len : qo_indptr[batch];
  }
};

struct AppendArgs {
  Operand k;  // null data = nothing to put
  Operand v;
  float k_scale;
  float v_scale;
  const float* k_scale_pointer;  // nullable
  const float* v_scale_pointer;  // nullable
};

inline AppendArgs append_args(const AttentionParams& p) {
  return {p.new_k, p.new_v, p.k_scale, p.v_scale, p.k_scale_pointer, p.v_scale_pointer};
}

#ifdef __CUDACC__

// Writes kWidth elements: as they are, or divided by `scale` and rounded to e4m3.
template <int kWidth, typename T, typename E>
__device__ __forceinline__ void append_elements(const T* source, E* target, float scale) {
  if constexpr (sizeof(E) == sizeof(T)) {
    store_vec<T, kWidth>(target, load_vec<T, kWidth>(source));
  } else {
    float x[kWidth];
    unpack<T, kWidth>(load_vec<T, kWidth>(source), x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] /= scale;
    store_e4m3<kWidth>(x, target);
  }
}

// Puts the new tokens at keys begin .. end - 1 of one (request, kv head) into the cache;
// `owns(key)` says which of them this block puts. All threads of the block take part; kWidth
// elements at a time. Tokens whose table entry is negative have no place and are left out.
template <typename T, int kWidth, typename KvSource, typename Owns>
__device__ __forceinline__ void append_tokens(const AppendArgs& args, const QueryRows& queries,
                                              const typename KvSource::Rows& rows, int batch,
                                              int kv_head, int q_len, int kv_len, int head_dim,
                                              int v_head_dim, int begin, int end, Owns owns) {
  using E = typename KvSource::Element;
  const int first_new = kv_len - q_len;  // negative if more queries than keys
  const float k_scale =
      args.k_scale_pointer == nullptr ? args.k_scale : args.k_scale * *args.k_scale_pointer;
  const float v_scale =
      args.v_scale_pointer == nullptr ? args.v_scale : args.v_scale * *args.v_scale_pointer;
  const T* k = static_cast<const T*>(args.k.data) +
               queries.offset(batch, args.k.batch_stride, args.k.seq_stride) +
               kv_head * args.k.head_stride;
  const T* v = static_cast<const T*>(args.v.data) +
               queries.offset(batch, args.v.batch_stride, args.v.seq_stride) +
               kv_head * args.v.head_stride;
  // Not unrolled: this runs once for a few tokens, and stands in every paged kernel.
#pragma unroll 1
  for (int key = max(begin, max(first_new, 0)); key < end; ++key) {
    if (!owns(key)) continue;
    const int page = rows.page(key);
    if (page < 0) continue;
    const int64_t position = key - first_new;
    E* k_row = const_cast<E*>(rows.walk_k(key, 1, 0).next(page));
    E* v_row = const_cast<E*>(rows.walk_v(key, 1, 0).next(page));
#pragma unroll 1
    for (int i = threadIdx.x * kWidth; i < head_dim; i += blockDim.x * kWidth) {
      append_elements<kWidth>(k + position * args.k.seq_stride + i, k_row + i, k_scale);
    }
#pragma unroll 1
    for (int i = threadIdx.x * kWidth; i < v_head_dim; i += blockDim.x * kWidth) {
      append_elements<kWidth>(v + position * args.v.seq_stride + i, v_row + i, v_scale);
    }
  }
}

#endif  // __CUDACC__

}  // namespace astrai::attention
