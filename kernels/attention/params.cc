// What the attention kernels take, whatever the plan: supports_head_dims and why_not_implemented.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/attention/attention.h"

namespace astrai::attention {
namespace {

constexpr int kMaxHeadDim = 256;

// Positions and packed rows are held in 32 bits inside the kernels, with room for a tile past the
// end; block indices in 31.
constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max() - 1024;
constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();

bool is_power_of_two(int value) { return value > 0 && (value & (value - 1)) == 0; }

bool is_step(float scale) { return std::isfinite(scale) && scale > 0.0f; }

bool is_aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

const char* why_not_types(const AttentionParams& p) {
  if (p.dtype != DType::kBF16 && p.dtype != DType::kFP16) {
    return "dtype must be bfloat16 or float16";
  }
  if (p.kv_dtype != p.dtype && p.kv_dtype != DType::kE4M3) {
    return "kv_dtype must be that of q or float8_e4m3fn";
  }
  return nullptr;
}

const char* why_not_heads(const AttentionParams& p) {
  if (p.head_dim <= 0 || p.head_dim > kMaxHeadDim || p.head_dim % 8 != 0) {
    return "head_dim must be a multiple of 8 up to 256";
  }
  if (!supports_head_dims(p.head_dim, p.v_head_dim)) {
    return "v_head_dim must be head_dim, or 128 with head_dim 192";
  }
  if (p.kv_heads <= 0 || p.q_heads <= 0) return "q_heads and kv_heads must be positive";
  if (p.q_heads % p.kv_heads != 0) return "q_heads must be a multiple of kv_heads";
  if (p.q_heads / p.kv_heads > kMaxGroup) return "q_heads / kv_heads must be at most 64";
  return nullptr;
}

const char* why_not_sizes(const AttentionParams& p) {
  if (p.batch < 0 || p.q_len < 0 || p.kv_len < 0 || p.total_q < 0) {
    return "sizes must not be negative";
  }
  const int64_t rows = int64_t{p.q_len} * (p.q_heads / p.kv_heads);
  if (rows > kMaxRows || p.kv_len > kMaxRows) {
    return "q_len * q_heads / kv_heads and kv_len must be below 2^31 - 1024";
  }
  // Packed queries: decode has room for all that every request may have, prefill for those there
  // are.
  const double padded = static_cast<double>(p.batch) *
                        (p.qo_indptr == nullptr ? p.q_len : std::min(p.q_len, kMaxDecodeQueries));
  const double queries = p.qo_indptr == nullptr ? padded : std::max<double>(padded, p.total_q);
  if (queries * p.q_heads > static_cast<double>(kMaxBlocks)) {
    return "the number of queries times q_heads must be below 2^31";
  }
  return nullptr;
}

const char* why_not_numbers(const AttentionParams& p) {
  if (!std::isfinite(p.scale)) return "scale must be finite";
  if (!std::isfinite(p.softcap) || p.softcap < 0.0f) return "softcap must be finite and 0 or more";
  if (!is_step(p.k_scale) || !is_step(p.v_scale)) {
    return "k_scale and v_scale must be finite and more than 0";
  }
  return nullptr;
}

const char* why_not_pages(const AttentionParams& p) {
  const PageTable& pages = p.pages;
  if (pages.entries == nullptr) {
    if (p.new_k.data != nullptr || p.new_v.data != nullptr) {
      return "new_k and new_v must come with a page table";
    }
    return nullptr;
  }
  if (!is_power_of_two(pages.page_size) || pages.page_size > kMaxPageSize) {
    return "page_size must be a power of two up to 256";
  }
  if (pages.width < 0 || p.kv_len > int64_t{pages.width} * pages.page_size) {
    return "kv_len must be at most the width of the page table times page_size";
  }
  if ((p.new_k.data == nullptr) != (p.new_v.data == nullptr)) {
    return "new_k and new_v must be given both or not at all";
  }
  return nullptr;
}

const char* why_not_pointers(const AttentionParams& p) {
  if (p.q.data == nullptr || p.out == nullptr) return "q and out must not be null";
  if (p.kv_len > 0 && (p.k.data == nullptr || p.v.data == nullptr)) {
    return "k and v must not be null";
  }
  if (p.mask.data != nullptr && (p.mask.rows < 0 || p.mask.width < 0)) {
    return "rows and width of the mask must not be negative";
  }
  const void* words[] = {p.qo_indptr, p.kv_indptr, p.pages.entries,   p.pages.rows,
                         p.sinks,     p.lse,       p.k_scale_pointer, p.v_scale_pointer};
  for (const void* pointer : words) {
    if (!is_aligned(pointer, 4)) return "int32 and fp32 arrays must be aligned to 4 bytes";
  }
  return nullptr;
}

}  // namespace

bool supports_head_dims(int head_dim, int v_head_dim) {
  if (head_dim <= 0 || head_dim > kMaxHeadDim || head_dim % 8 != 0) return false;
  return v_head_dim == head_dim || (head_dim == 192 && v_head_dim == 128);
}

const char* why_not_implemented(const AttentionParams& p) {
  for (const auto check :
       {why_not_types, why_not_heads, why_not_sizes, why_not_numbers, why_not_pages}) {
    if (const char* reason = check(p)) return reason;
  }
  const bool empty = p.batch == 0 || p.q_len == 0 || (p.qo_indptr != nullptr && p.total_q == 0);
  return empty ? nullptr : why_not_pointers(p);
}

}  // namespace astrai::attention
