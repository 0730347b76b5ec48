#include "python/bindings/cache_view.h"

namespace astrai::bindings {

CacheView read_cache(Call& call, PyObject* object, const char* name, bool written) {
  const TensorView view = written ? call.output(object, name) : call.input(object, name);
  if (view.rank != 3 && view.rank != 4) {
    raise_argument(ErrorClass::kShape, call.function(), name,
                   "3-D [slots, kv_heads, dim] or 4-D [pages, page_size, kv_heads, dim]",
                   std::to_string(view.rank) + "-D of shape " + view.shape_text());
  }
  require_int_sizes(call, view);
  require_dense_rows(call, view);
  if (view.rank == 3) {
    return {view, view.shape[0], 1, view.strides[0], view.strides[0], view.strides[1]};
  }
  return {view, view.shape[0], view.shape[1], view.strides[0], view.strides[1], view.strides[2]};
}

void require_same_pages(const Call& call, const CacheView& cache, const CacheView& other) {
  if (cache.pages == other.pages && cache.page_size == other.page_size) return;
  raise_argument(
      ErrorClass::kShape, call.function(), cache.view.name,
      std::string("of the pages of ") + other.view.name + ", shape " + other.view.shape_text(),
      cache.view.shape_text());
}

}  // namespace astrai::bindings
