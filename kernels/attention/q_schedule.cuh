// Which query rows a prefill block works on. The kernel takes the schedule as a template policy.
//
// Rows are packed: row r of a (request, kv head) is query position r / group and head r % group of
// the group, so that all heads that share K and V fill one tile, whatever the group size.
#pragma once

#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/attention/kv_append.cuh"

namespace astrai::attention {

// One block's share.
struct QWork {
  int batch;  // negative: the block has no work
  int kv_head;
  int first_row;  // packed rows first_row .. row_end - 1
  int row_end;
  int q_len;           // of this request
  int64_t q_offset;    // elements to query position 0 of the request, in q
  int64_t out_offset;  // the same in out
  int64_t lse_row;     // token index of position 0 in lse
};

// Rectangular batches: every request has q_len positions.
struct DenseQSchedule {
  int q_len;
  int rows;  // q_len * group
  int kv_heads;
  int tile_rows;
  int row_tiles;
  int pairs;           // batch * kv_heads
  int section;         // pairs that run side by side (see prefill_plan.h)
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
            min(tile * tile_rows + tile_rows, rows),
            q_len,
            batch * q_batch_stride,
            batch * out_batch_stride,
            static_cast<int64_t>(batch) * q_len};
  }
};

// Packed queries behind a work map: an entry stands for kQMapRows positions, that is kQMapRows *
// group packed rows, which `blocks_per_entry` blocks share. Finding its rows costs a block two
// loads of the map and two of qo_indptr, however many requests there are. Without a map the entries
// are `tiles_per_request` for each request, in order, whether it has as many positions or not.
struct PackedQSchedule {
  QueryRows queries;
  const int32_t* map_batch;  // nullable
  const int32_t* map_tile;
  int tiles_per_request;
  int entries;
  int kv_heads;
  int group;
  int tile_rows;  // kQMapRows * group times a whole number, or any number below that
  int blocks_per_entry;
  bool longest_first;
  int64_t q_batch_stride;  // without qo_indptr
  int64_t q_seq_stride;
  int64_t out_batch_stride;
  int64_t out_seq_stride;

  // Blocks in order: entry, block of the entry, kv head, so that the blocks of one request's head
  // that read the same keys run at the same time.
  __device__ __forceinline__ QWork at(int block) const {
    int step = block / kv_heads;
    const int kv_head = block - step * kv_heads;
    if (longest_first) step = entries * blocks_per_entry - 1 - step;
    const int entry = step / blocks_per_entry;
    const int part = step - entry * blocks_per_entry;
    int batch, tile;
    if (map_batch == nullptr) {
      batch = entry / tiles_per_request;
      tile = entry - batch * tiles_per_request;
    } else {
      batch = __ldg(map_batch + entry);
      tile = __ldg(map_tile + entry);
    }
    const QWork no_work = {-1, 0, 0, 0, 0, 0, 0, 0};
    if (batch < 0) return no_work;
    const int q_len = queries.length(batch);
    const int entry_rows = kQMapRows * group;
    const int entry_first = tile * entry_rows;
    int entry_end = entry_first + entry_rows;
    if (tile_rows > entry_rows) {
      // A block has the rows of several entries: the first of them stands for all.
      if (entry_first % tile_rows != 0) return no_work;
      entry_end = entry_first + tile_rows;
    }
    const int first_row = entry_first + part * tile_rows;
    const int row_end = min(min(first_row + tile_rows, entry_end), q_len * group);
    if (first_row >= row_end) return no_work;
    return {batch,
            kv_head,
            first_row,
            row_end,
            q_len,
            queries.offset(batch, q_batch_stride, q_seq_stride),
            queries.offset(batch, out_batch_stride, out_seq_stride),
            queries.token(batch)};
  }
};

}  // namespace astrai::attention
