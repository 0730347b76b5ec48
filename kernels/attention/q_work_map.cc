#include "kernels/attention/attention.h"

namespace astrai::attention {

int build_q_work_map(const int32_t* qo_indptr, int batch, int32_t* map_batch, int32_t* map_tile) {
  int entries = 0;
  for (int b = 0; b < batch; ++b) {
    const int q_len = qo_indptr[b + 1] - qo_indptr[b];
    for (int tile = 0; tile * kQMapRows < q_len; ++tile) {
      map_batch[entries] = b;
      map_tile[entries] = tile;
      ++entries;
    }
  }
  return entries;
}

}  // namespace astrai::attention
