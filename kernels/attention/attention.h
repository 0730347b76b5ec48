// Attention over dense (contiguous, strided) keys and values: one-token decode and prefill.
//
// For every batch b, query row i and query head h, with g = h / (q_heads / kv_heads):
//   s[j]   = scale * dot(q[b, i, h, :], k[b, j, g, :])           j in [0, kv_len)
//   out    = sum_j softmax(s)[j] * v[b, j, g, :]                 over the allowed j only
//   lse    = log(sum_j exp(s[j]))                                natural logarithm
// A key j is allowed iff (not causal or j <= i + kv_len - q_len) and (no mask or mask is true
// there): the causal diagonal is aligned to the bottom right. A row with no allowed key gives out
// 0, lse -inf.
//
// Method: online softmax in one pass (Milakov and Gimelshein 2018; Dao 2023, FlashAttention-2),
// with the key range split over thread blocks in decode (Dao et al. 2023, Flash-Decoding). Products
// accumulate in fp32, the probabilities are rounded to the operand type before the product with V.
//
// Launches go to the given stream of the current device, never block or allocate, and can be
// captured in a CUDA graph. Params hold device pointers; nothing is kept after the call returns.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/dtype.h"

namespace astrai::attention {

// A [batch, seq, heads, head_dim] tensor. Strides are in elements and may be anything (0 and
// negative included); the last dimension has stride 1.
struct Operand {
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t seq_stride = 0;
  int64_t head_stride = 0;
};

// A bool mask [batch, q_heads, q_len, kv_len], true = may attend. A stride of 0 broadcasts that
// dimension; the kv dimension has stride 1. `data` null = no mask. No alignment is needed.
struct MaskView {
  const bool* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t q_stride = 0;
};

struct DenseParams {
  DType dtype = DType::kBF16;  // of q, k, v and out: kBF16 or kFP16
  int batch = 0;
  int q_len = 0;
  int kv_len = 0;
  int q_heads = 0;  // a multiple of kv_heads, at most kMaxGroup times as many
  int kv_heads = 0;
  int head_dim = 0;  // see supports_head_dim
  Operand q, k, v;  // q [batch, q_len, q_heads, head_dim]; k, v [batch, kv_len, kv_heads, head_dim]
  void* out = nullptr;  // [batch, q_len, q_heads, head_dim], written whole; last stride 1
  int64_t out_batch_stride = 0;
  int64_t out_seq_stride = 0;
  int64_t out_head_stride = 0;
  float* lse = nullptr;  // nullable; contiguous [batch, q_len, q_heads]
  float scale = 0.0f;    // any finite value; usually 1 / sqrt(head_dim)
  bool causal = false;
  MaskView mask;
};

// Largest q_heads / kv_heads.
inline constexpr int kMaxGroup = 64;

// 64, 128 and 256.
bool supports_head_dim(int head_dim);

// Null if the kernels can compute `params`, else one sentence that says which argument they cannot
// take, such as "head_dim must be 64, 128 or 256". Rows that are not 16-byte aligned are taken (by
// a slower kernel that reads element by element). Looks at no device memory.
const char* why_not_implemented(const DenseParams& params);

// Bytes of workspace with which launch_decode splits the keys as it thinks best; 0 if it would not
// split. Bounded by the number of SMs, not by batch or kv_len (under 20 MB on a GPU of 132 SMs).
// The pointers in `params` may still be null; their alignment and the strides count if they are
// set.
size_t decode_workspace_bytes(const DenseParams& params, int sm_count);

// Attention with q_len == 1 (kv split over thread blocks, then combined). `workspace` is 16-byte
// aligned device memory that nothing else touches until the launch has run; its contents need no
// initialisation. A smaller workspace than decode_workspace_bytes (or null) means fewer splits, not
// an error. Returns cudaErrorInvalidValue for what why_not_implemented names, and for q_len != 1.
// An empty batch launches nothing.
cudaError_t launch_decode(const DenseParams& params, void* workspace, size_t workspace_bytes,
                          cudaStream_t stream);

// Attention with any q_len. Same errors. Empty q launches nothing.
cudaError_t launch_prefill(const DenseParams& params, cudaStream_t stream);

}  // namespace astrai::attention
