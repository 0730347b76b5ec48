// What a prefill block works on: its rows, the keys they see, and its share of these if several
// blocks have the same rows. It stands in shared memory, as it would fill registers that the loop
// over the keys needs: one thread finds it out, the others read what they need where they need it.
#pragma once

#include <cstdint>

#include "kernels/attention/mask.cuh"
#include "kernels/attention/prefill_args.cuh"
#include "kernels/attention/score.cuh"
#include "kernels/attention/work_split.cuh"

namespace astrai::attention {

// Tiles of keys first .. end - 1.
struct TileRange {
  int first;
  int end;
};

struct PrefillWork {
  QWork work;  // work.batch is negative if there is nothing to do
  ScoreRule rule;
  int kv_len;
  int diagonal;         // kv_len - q_len
  TileRange tiles;      // of this block
  TileRange whole;      // that every row sees every key of
  int split;            // number of this block among those that have the same rows
  int parts;            // of these blocks that have keys; one at least
  int mask_end;         // keys that the mask and the request both have
  const uint8_t* mask;  // of the first head, at position 0

  // Called by one thread, before a barrier.
  template <typename Args>
  __device__ __forceinline__ void begin(const Args& args, int tile_keys) {
    const int block = static_cast<int>(blockIdx.x);
    split = block % args.splits;
    work = args.schedule.at(block / args.splits);
    if (work.batch < 0) return;
    rule = ScoreRule(args.score);
    kv_len = args.kv.length(work.batch);
    diagonal = kv_len - work.q_len;
    // Both edges of a window move with the position.
    const PackedRows rows = {args.group, work.row_end};
    const int first = rows.position(work.first_row);
    const int last = rows.position(work.row_end - 1);
    const KeyRange seen = keys_in_window(args.score, first, last, diagonal, kv_len);
    whole.first = (keys_in_window(args.score, last, last, diagonal, kv_len).first + tile_keys - 1) /
                  tile_keys;
    whole.end = keys_in_window(args.score, first, first, diagonal, kv_len).end / tile_keys;
    tiles.first = seen.first / tile_keys;
    tiles.end = max(tiles.first, (seen.end + tile_keys - 1) / tile_keys);
    take_share(args.splits, args.fixed_splits, tile_keys);
    mask_end = min(kv_len, args.score.mask.width);
    mask = mask_row(args.score.mask, work.batch, work.kv_head * args.group, 0);
    if (split >= parts) work.batch = -1;
  }

 private:
  __device__ __forceinline__ void take_share(int splits, bool fixed, int tile_keys) {
    parts = 1;
    if (splits == 1) return;
    const int count = tiles.end - tiles.first;
    const int each = fixed ? fixed_split_keys(count * tile_keys) / tile_keys
                           : max((count + splits - 1) / splits, kLeastPrefillSplitKeys / tile_keys);
    parts = max(1, (count + each - 1) / each);
    tiles.first += split * each;
    tiles.end = min(tiles.first + each, tiles.end);
  }
};

}  // namespace astrai::attention
