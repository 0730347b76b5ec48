// Attention of one launch: dense, ragged or paged keys and values, any number of queries a request.
//
// For every request b, query position i, query head h, with g = h / (q_heads / kv_heads):
//   s[j] = scale * k_scale * dot(q[b, i, h, :], k[b, j, g, :])          j in [0, kv_len(b))
//   s[j] = softcap * tanh(s[j] / softcap)                               if softcap > 0
//   out  = v_scale * sum_j exp(s[j]) * v[b, j, g, :] / (sum_j exp(s[j]) + exp(sinks[h]))
//   lse  = log(sum_j exp(s[j]) + exp(sinks[h]))                         natural logarithm
// over the keys j that the row may see; without sinks their term is absent. With d = i +
// kv_len(b) - q_len(b), the diagonal that is aligned to the bottom right, key j is seen iff
//   (not causal or j <= d) and (window_left < 0 or j >= d - window_left) and
//   (window_right < 0 or j <= d + window_right) and (no mask or mask is true there) and
//   (not paged or the table's entry is not negative).
// V must be finite at every key below kv_len(b) that has a page: the weight of a key that a row
// does not see is 0, and 0 times NaN is NaN. K may hold anything there, and memory beyond the
// lengths too. A row that sees no key gives out 0 and lse -inf; with a sink, out 0 and lse = sink.
//
// Method: online softmax in one pass (Milakov and Gimelshein 2018; Dao 2023, FlashAttention-2),
// with the keys of a row split over thread blocks where rows are few (Dao et al. 2023,
// Flash-Decoding). Products accumulate in fp32, the probabilities are rounded to the type of q
// before the product with V.
//
// Launches go to the given stream of the current device, never block or allocate, and can be
// captured in a CUDA graph. Lengths and tables are read on the device when the launch runs, so a
// captured launch follows them as far as the sizes given here allow. Params hold device pointers;
// nothing is kept after the call returns.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/dtype.h"

namespace astrai::attention {

// A [batch, seq, heads, head_dim] tensor, or a packed [tokens, heads, head_dim] one (batch_stride
// is not looked at). Strides are in elements and may be anything (0 and negative included); the
// last dimension has stride 1.
struct Operand {
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t seq_stride = 0;
  int64_t head_stride = 0;
};

// A bool mask [batch, q_heads, rows, width], true = may attend; rows are positions of the request's
// queries, columns positions of its keys. A stride of 0 broadcasts that dimension; the last one has
// stride 1. Positions outside `rows` and `width` may not attend. `data` null = no mask. No
// alignment is needed.
struct MaskView {
  const bool* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t q_stride = 0;
  int rows = 0;
  int width = 0;
};

// Where the tokens of a request lie in a paged cache. Token j of request b is row j % page_size of
// page entries[row * row_stride + j / page_size], with row = rows[b], or b if `rows` is null. With
// page_size 1 this is a token table. A negative entry holds no token: the key is skipped. Entries
// from ceil(kv_len(b) / page_size) on are never read.
struct PageTable {
  const int32_t* entries = nullptr;  // device; null = keys are not paged
  int64_t row_stride = 0;
  int width = 0;  // entries that a row has
  const int32_t* rows = nullptr;
  int page_size = 1;  // a power of two up to kMaxPageSize
};

struct AttentionParams {
  DType dtype = DType::kBF16;     // of q, new_k, new_v and out: kBF16 or kFP16
  DType kv_dtype = DType::kBF16;  // of k and v: like dtype, or kE4M3
  int batch = 0;                  // requests
  int q_heads = 0;                // a multiple of kv_heads, at most kMaxGroup times as many
  int kv_heads = 0;
  int head_dim = 0;    // of q and k: a multiple of 8 up to 256
  int v_head_dim = 0;  // of v and out: head_dim, or 128 with head_dim 192

  // Queries. Without qo_indptr, q is [batch, q_len, q_heads, head_dim]. With it, q is packed
  // [total_q, q_heads, head_dim]: request b owns rows qo_indptr[b] .. qo_indptr[b + 1] - 1, at most
  // q_len of them.
  Operand q;
  int q_len = 0;
  const int32_t* qo_indptr = nullptr;  // device [batch + 1], not decreasing
  int total_q = 0;                     // rows of q with qo_indptr

  // Keys and values. Without kv_indptr every request has kv_len of them. With it, request b has
  // kv_indptr[b + 1] - kv_indptr[b], at most kv_len.
  //   not paged, no kv_indptr:  k, v [batch, kv_len, kv_heads, dim]
  //   not paged, kv_indptr:     k, v packed [tokens, kv_heads, dim] at those offsets
  //   paged:                    k, v [pages, page_size, kv_heads, dim]: batch_stride steps pages
  Operand k, v;
  int kv_len = 0;
  const int32_t* kv_indptr = nullptr;  // device [batch + 1]
  PageTable pages;

  // Keys and values that the launch puts into the paged cache before it attends to them: packed
  // like q, [rows of q, kv_heads, dim], one for each query, at positions kv_len(b) - q_len(b) ... A
  // copy is exact; for a cache of e4m3 the value is divided by k_scale or v_scale and rounded to
  // nearest, saturating. Null data = nothing to put.
  Operand new_k, new_v;

  void* out = nullptr;  // like q with v_head_dim, written whole; last stride 1
  int64_t out_batch_stride = 0;
  int64_t out_seq_stride = 0;
  int64_t out_head_stride = 0;
  float* lse = nullptr;  // nullable; contiguous [batch, q_len, q_heads] or [total_q, q_heads]

  float scale = 0.0f;            // any finite value; usually 1 / sqrt(head_dim)
  bool causal = false;           // same as window_right = 0
  int window_left = -1;          // keys left of the diagonal that are seen; negative = all
  int window_right = -1;         // keys right of the diagonal that are seen; negative = all
  float softcap = 0.0f;          // 0 = none
  const float* sinks = nullptr;  // nullable; device [q_heads], natural-log logits
  MaskView mask;
  // Dequantisation steps of k and v: the number, times what the device pointer holds if not null.
  float k_scale = 1.0f;
  float v_scale = 1.0f;
  const float* k_scale_pointer = nullptr;
  const float* v_scale_pointer = nullptr;

  // launch_decode: the result of a row does not depend on the other requests of the launch.
  bool deterministic = false;
};

// Largest q_heads / kv_heads.
inline constexpr int kMaxGroup = 64;
inline constexpr int kMaxPageSize = 256;
// Most queries of a request in launch_decode.
inline constexpr int kMaxDecodeQueries = 16;
// Query positions that one entry of a Q work map stands for.
inline constexpr int kQMapRows = 64;

// A multiple of 8 up to 256 with v_head_dim the same, or 192 with v_head_dim 128.
bool supports_head_dims(int head_dim, int v_head_dim);

// Null if the kernels can compute `params`, else one sentence that says which argument they cannot
// take, such as "head_dim must be a multiple of 8 up to 256". Rows that are not 16-byte aligned are
// taken (by a slower kernel that reads element by element). Looks at no device memory.
const char* why_not_implemented(const AttentionParams& params);

// Bytes of workspace with which launch_decode splits the keys as it thinks best; 0 if it would not
// split. Bounded by the number of SMs, not by batch or kv_len, unless params.deterministic (then
// proportional to the number of query rows). The pointers in `params` may still be null; their
// alignment and the strides count if they are set.
size_t decode_workspace_bytes(const AttentionParams& params, int sm_count);

// Attention with 1 to kMaxDecodeQueries queries a request: the keys are split over thread blocks
// and the parts merged within the launch. `workspace` is 16-byte aligned device memory that nothing
// else touches until the launch has run; its contents need no initialisation, and launches that
// follow each other on a stream may share it. A smaller workspace than decode_workspace_bytes (or
// null) means fewer splits, not an error, unless params.deterministic. Returns
// cudaErrorInvalidValue for what why_not_implemented names, and for a larger q_len. An empty batch
// launches nothing.
cudaError_t launch_decode(const AttentionParams& params, void* workspace, size_t workspace_bytes,
                          cudaStream_t stream);

// Maps a block of launch_prefill to its queries when they are packed: entry t stands for positions
// tile[t] * kQMapRows ... of request batch[t]. A negative batch is an entry without work. Every
// tile of every request stands in it once, in any order.
struct QWorkMap {
  const int32_t* batch = nullptr;  // device [size]
  const int32_t* tile = nullptr;   // device [size]
  int size = 0;
};

// Entries that a map needs at most, whatever qo_indptr holds.
constexpr int64_t q_work_map_capacity(int batch, int total_q) {
  return total_q / kQMapRows + (batch < total_q ? batch : total_q);
}

// Fills a map on the host: the arrays have room for q_work_map_capacity entries. Returns the number
// of entries with work.
int build_q_work_map(const int32_t* qo_indptr, int batch, int32_t* map_batch, int32_t* map_tile);

// The same on the device, for all `capacity` entries; those left over get batch -1.
cudaError_t launch_q_work_map(const int32_t* qo_indptr, int batch, int32_t* map_batch,
                              int32_t* map_tile, int capacity, cudaStream_t stream);

// Bytes of workspace with which launch_prefill splits the keys as it thinks best, which it does
// where query tiles are too few for the SMs; as decode_workspace_bytes.
size_t prefill_workspace_bytes(const AttentionParams& params, int sm_count);

// Attention with any number of queries. `map` is needed with qo_indptr, and not looked at without.
// Workspace and errors as launch_decode. Empty q launches nothing.
cudaError_t launch_prefill(const AttentionParams& params, const QWorkMap& map, void* workspace,
                           size_t workspace_bytes, cudaStream_t stream);

// Merges two attention results over disjoint keys: out = sum_i exp(lse_i) o_i / sum_i exp(lse_i),
// lse = log of that sum; two -inf give 0 and -inf. Rows are contiguous [rows, head_dim] of `dtype`,
// lse fp32 [rows]; out may be one of the inputs.
struct MergeParams {
  DType dtype = DType::kBF16;  // kBF16, kFP16 or kFP32
  int64_t rows = 0;
  int head_dim = 0;
  const void* out_a = nullptr;
  const float* lse_a = nullptr;
  const void* out_b = nullptr;
  const float* lse_b = nullptr;
  void* out = nullptr;
  float* lse = nullptr;
};
cudaError_t launch_merge_states(const MergeParams& params, cudaStream_t stream);

}  // namespace astrai::attention
