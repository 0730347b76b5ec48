// Which query rows a prefill block works on. The kernel takes the schedule as a template policy.
//
// Rows are packed: row r of a (request, kv head) is query position r / group and head r % group of
// the group, so that all heads that share K and V fill one tile, whatever the group size.
#pragma once

#include <cstdint>

#include "kernels/attention/attention.h"

namespace astrai::attention {

// One block's share.
struct QWork {
  int batch;
  int kv_head;
  int first_row;       // packed row
  int q_len;           // of this request
  int64_t q_offset;    // elements to query position 0 of the request, in q
  int64_t out_offset;  // the same in out
  int64_t lse_row;     // token index of position 0 in lse
};

// Rectangular batches: every request has q_len positions.
struct DenseQSchedule {
  int q_len;
  int kv_heads;
  int tile_rows;
  int row_tiles;
  int pairs;           // batch * kv_heads
  int section;         // pairs that run side by side (see plan.h)
  bool longest_first;  // causal: later rows see more keys, so their blocks start first
  int64_t q_batch_stride;
  int64_t out_batch_stride;

  // Blocks in order: section, row tile, pair within the section.
  __device__ __forceinline__ QWork at(int block) const {
    const int section_index = block / (section * row_tiles);
    const int first_pair = section_index * section;
    const int width = min(section, pairs - first_pair);
    const int in_section = block - first_pair * row_tiles;
    const int step = in_section / width;
    const int pair = first_pair + in_section - step * width;
    const int tile = longest_first ? row_tiles - 1 - step : step;
    const int batch = pair / kv_heads;
    return {batch,
            pair - batch * kv_heads,
            tile * tile_rows,
            q_len,
            batch * q_batch_stride,
            batch * out_batch_stride,
            static_cast<int64_t>(batch) * q_len};
  }
};

}  // namespace astrai::attention
