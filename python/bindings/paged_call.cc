#include "python/bindings/paged_call.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "python/bindings/attention_call.h"
#include "python/bindings/attention_features.h"
#include "python/bindings/cache_view.h"

namespace astrai::bindings {
namespace {

using attention::AttentionParams;

constexpr const char* kQueryLayout = "[tokens, q_heads, head_dim]";
constexpr const char* kNewLayout = "[tokens of q, kv_heads, dim]";

// What the kernels' 32-bit positions hold.
constexpr int64_t kMostKeys = std::numeric_limits<int32_t>::max() - 1024;

// A page table of slots looks into a cache of larger pages as if it had none.
void flatten_pages(const Call& call, CacheView* cache) {
  if (cache->page_size == 1) return;
  if (!cache->pages_are_rows()) {
    raise_argument(
        ErrorClass::kShape, call.function(), cache->view.name,
        "of pages that follow each other where req_to_token is given (use block_table)",
        "strides " + cache->view.strides_text() + " for shape " + cache->view.shape_text());
  }
  cache->pages *= cache->page_size;
  cache->page_size = 1;
  cache->page_stride = cache->row_stride;
}

attention::Operand cache_operand(const CacheView& cache) {
  return {cache.view.data, cache.page_stride, cache.row_stride, cache.head_stride};
}

void require_absent(const Call& call, PyObject* object, const char* name) {
  if (object == Py_None) return;
  raise_argument(ErrorClass::kShape, call.function(), name, "None where block_table is given",
                 Py_TYPE(object)->tp_name);
}

TensorView read_table(Call& call, PyObject* object, const char* name, const char* layout) {
  const TensorView table = call.input(object, name);
  require_dtype(call, table, {ScalarType::kInt32});
  require_rank(call, table, 2, layout);
  require_int_sizes(call, table);
  require_dense_rows(call, table);
  return table;
}

// req_to_token, req_pool_indices and block_table, of which either the first two or the last is
// given; and kv_len, the most keys that a table row has room for.
void read_page_table(Call& call, PyObject* const* args, CacheView* k, CacheView* v,
                     AttentionParams* params) {
  TensorView table;
  if (args[2] != Py_None) {
    require_absent(call, args[0], "req_to_token");
    require_absent(call, args[1], "req_pool_indices");
    table = read_table(call, args[2], "block_table", "[batch, max_pages]");
    require_shape(call, table, {params->batch, table.shape[1]}, "[batch, max_pages]");
  } else {
    table = read_table(call, args[0], "req_to_token", "[requests, max_len]");
    const TensorView rows = call.input(args[1], "req_pool_indices");
    require_indices(call, rows, params->batch, "[batch]");
    params->pages.rows = static_cast<const int32_t*>(rows.data);
    flatten_pages(call, k);
    flatten_pages(call, v);
  }
  require_same_pages(call, *v, *k);
  const int64_t page = k->page_size;
  if (page < 1 || page > attention::kMaxPageSize || (page & (page - 1)) != 0) {
    raise_argument(
        ErrorClass::kShape, call.function(), "k_cache",
        "of a page_size that is a power of two up to " + std::to_string(attention::kMaxPageSize),
        "shape " + k->view.shape_text());
  }
  params->pages.page_size = static_cast<int>(page);
  params->pages.row_stride = table.strides[0];
  params->pages.width = static_cast<int>(table.shape[1]);
  params->kv_len = static_cast<int>(std::min(table.shape[1] * page, kMostKeys));
  // A table without entries still says that keys are paged, by any address: none is read.
  params->pages.entries =
      table.numel() == 0 ? params->kv_indptr : static_cast<const int32_t*>(table.data);
}

// How many queries each request has: sets batch, q_len, total_q and the prefix sums.
void read_lengths(Call& call, PyObject* const* args, const TensorView& q, int most_queries,
                  AttentionParams* params) {
  const TensorView kv = call.input(args[0], "kv_indptr");
  require_indices(call, kv, -1, "[batch + 1]");
  if (kv.shape[0] == 0) {
    raise_argument(ErrorClass::kShape, call.function(), "kv_indptr",
                   "of shape (batch + 1,), at least one element", kv.shape_text());
  }
  params->kv_indptr = static_cast<const int32_t*>(kv.data);
  int64_t longest = most_queries;
  if (args[2] != Py_None) {
    longest = read_int(call.function(), args[2], "max_q_len");
    if (longest < 0 || longest > most_queries) {
      raise_argument(ErrorClass::kShape, call.function(), "max_q_len",
                     "in 0.." + std::to_string(most_queries), std::to_string(longest));
    }
  }
  if (args[1] == Py_None) {
    require_indices(call, kv, q.shape[0] + 1, "[batch + 1], one query for each request");
    params->batch = static_cast<int>(q.shape[0]);
    params->q_len = 1;
    return;
  }
  const TensorView qo = call.input(args[1], "qo_indptr");
  require_indices(call, qo, kv.shape[0], "[batch + 1]");
  params->batch = static_cast<int>(kv.shape[0] - 1);
  params->qo_indptr = static_cast<const int32_t*>(qo.data);
  params->total_q = static_cast<int>(q.shape[0]);
  params->q_len = static_cast<int>(std::min(longest, q.shape[0]));
}

// Packed rows, each of which is a request of its own where there are no prefix sums.
attention::Operand rows_operand(const TensorView& view) {
  attention::Operand x = packed_operand(view);
  x.batch_stride = x.seq_stride;
  return x;
}

void read_new_rows(Call& call, PyObject* object, const char* name, const TensorView& q,
                   const CacheView& cache, attention::Operand* operand) {
  const TensorView rows = call.input(object, name);
  require_same_dtype(call, rows, q);
  const TensorView& view = cache.view;
  require_shape(call, rows, {q.shape[0], view.shape[view.rank - 2], view.shape[view.rank - 1]},
                kNewLayout);
  require_dense_rows(call, rows);
  require_no_overlap(call, view, rows);
  *operand = rows_operand(rows);
}

// Positions of a request that a mask has no row or column for may not attend.
void read_mask(Call& call, PyObject* object, AttentionParams* params) {
  const TensorView mask = call.input(object, "mask");
  require_dtype(call, mask, {ScalarType::kBool});
  if (mask.rank != 2 && mask.rank != 4) {
    raise_argument(ErrorClass::kShape, call.function(), "mask",
                   "2D or 4D, [batch, kv] or [batch, q_heads, q_len, kv]",
                   std::to_string(mask.rank) + "-D of shape " + mask.shape_text());
  }
  require_int_sizes(call, mask);
  attention::MaskView& view = params->mask;
  view.batch_stride = broadcast_stride(call, mask, 0, params->batch, "batch");
  view.rows = params->q_len;
  if (mask.rank == 4) {
    view.head_stride = broadcast_stride(call, mask, 1, params->q_heads, "q_heads");
    if (mask.shape[2] != 1) {
      view.rows = static_cast<int>(mask.shape[2]);
      view.q_stride = mask.strides[2];
    }
  }
  require_dense_rows(call, mask);
  view.width = static_cast<int>(mask.shape[mask.rank - 1]);
  // A mask without columns allows nothing, and says so by any address: none is read.
  view.data = mask.numel() == 0 ? reinterpret_cast<const bool*>(params->kv_indptr)
                                : static_cast<const bool*>(mask.data);
}

}  // namespace

AttentionParams read_paged(Call& call, PyObject* const* args, int most_queries) {
  const bool appends = args[9] != Py_None || args[10] != Py_None;
  if (appends && (args[9] == Py_None || args[10] == Py_None)) {
    raise_argument(ErrorClass::kShape, call.function(), args[9] == Py_None ? "new_k" : "new_v",
                   "given where the other of new_k and new_v is", "None");
  }
  const TensorView q = call.input(args[0], "q");
  require_rank(call, q, 3, kQueryLayout);
  require_int_sizes(call, q);
  require_dense_rows(call, q);
  CacheView k = read_cache(call, args[1], "k_cache", appends);
  CacheView v = read_cache(call, args[2], "v_cache", appends);
  AttentionParams params;
  read_types(call, q, k.view, v.view, &params);
  const int64_t kv_heads = k.view.shape[k.view.rank - 2];
  if (k.view.shape[k.view.rank - 1] != q.shape[2]) {
    raise_argument(ErrorClass::kShape, call.function(), "k_cache",
                   "of head_dim " + std::to_string(q.shape[2]) + " like q",
                   "shape " + k.view.shape_text());
  }
  if (v.view.shape[v.view.rank - 2] != kv_heads) {
    raise_argument(ErrorClass::kShape, call.function(), "v_cache",
                   "of " + std::to_string(kv_heads) + " heads like k_cache",
                   "shape " + v.view.shape_text());
  }
  read_heads(call, q, k.view, v.view, &params);

  read_lengths(call, args + 6, q, most_queries, &params);
  read_page_table(call, args + 3, &k, &v, &params);
  params.q = rows_operand(q);
  params.k = cache_operand(k);
  params.v = cache_operand(v);
  if (appends) {
    read_new_rows(call, args[9], "new_k", q, k, &params.new_k);
    read_new_rows(call, args[10], "new_v", q, v, &params.new_v);
    require_no_overlap(call, k.view, v.view);
    require_no_overlap(call, k.view, q);
    require_no_overlap(call, v.view, q);
  }
  if (args[11] != Py_None) read_mask(call, args[11], &params);
  read_features(call, args + 12, &params);
  read_packed_outputs(call, args[19], args[20], q, {&q, &k.view, &v.view}, &params);
  return params;
}

}  // namespace astrai::bindings
