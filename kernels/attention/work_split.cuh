// How the keys of all (request, kv head) pairs of a decode launch are shared out over its workers:
// one list of units, cut in equal parts wherever the cuts fall ("stream-K": Osama et al. 2023).
//
// A pair's visible keys count as ceil(keys / unit_keys) units, at least one, so that every pair has
// an owner; a request without queries has none. The list holds the kv heads in order, and for each
// of them the requests in order. Worker w of W takes the units [w X / W, (w + 1) X / W) of X: with
// W <= X each worker has at least one, and so every worker between the first and the last of a pair
// has one piece of that pair. All of it follows from the lengths by arithmetic, so every worker
// finds its own pieces, and the slots of those it shares a pair with, without asking another.
//
// A worker leaves at most two partial results: slot 2 w is that of a piece whose pair began before
// it, slot 2 w + 1 that of a piece whose pair begins with it and goes on.
#pragma once

#include <cstdint>

#ifndef __CUDACC__
#ifndef __host__
#define __host__
#define __device__
#endif
#endif

namespace astrai::attention {

struct WorkSplit {
  uint32_t units;    // of all pairs, below 2^31; 0 = no work
  uint32_t workers;  // at most `units` and 65535

  // First unit of worker w; w = workers gives `units`.
  __host__ __device__ constexpr uint32_t first_unit(uint32_t w) const {
    if (is_small()) return w * units / workers;
    return w * (units / workers) + w * (units % workers) / workers;
  }
  // The worker that has `unit`: the last w with w X / W < unit + 1.
  __host__ __device__ constexpr uint32_t owner(uint32_t unit) const {
    if (is_small()) return ((unit + 1) * workers - 1) / units;
    return static_cast<uint32_t>(((static_cast<uint64_t>(unit) + 1) * workers - 1) / units);
  }

  // Whether 32 bits hold X W: a division of 64 bits takes a thread a quarter of a microsecond.
  __host__ __device__ constexpr bool is_small() const {
    return static_cast<uint64_t>(units) * workers <= 0xffffffffu;
  }
};

// Workers that share `units`, of `most` that the launch has: no more than there are units. Where
// that costs at most 1/16 of them, as many for each pair: then pairs of equal length are cut alike,
// and no worker has pieces of two.
__host__ __device__ constexpr uint32_t used_workers(uint32_t units, uint32_t most, uint32_t pairs) {
  const uint32_t workers = units < most ? units : most;
  if (workers == 0) return 1;
  if (workers <= pairs) return workers;
  const uint32_t odd = workers % pairs;
  return odd * 16 <= workers ? workers - odd : workers;
}

// Part of one pair's keys, and where the parts of the same pair lie in the workspace.
struct Piece {
  int batch;
  int kv_head;
  uint32_t first_unit;  // of the pair's units
  uint32_t end_unit;
  uint32_t pair_units;
  int own_slot;
  int group_slot;  // of the pair's first piece
  int group_step;
  int group_size;  // pieces of the pair; 1: nothing to merge

  // Slot of the pair's i-th piece. The first piece of a pair cut by WorkSplit has an odd slot 2 w +
  // 1, the others 2 (w + i).
  __host__ __device__ constexpr int slot(int i) const {
    return group_slot + i * group_step - (i > 0 ? group_step - 1 : 0);
  }
};

struct RequestStart {
  int batch;
  uint32_t unit;  // of the kv head's units, where the request begins
};

// Walks over the pieces of one worker, in order. units_of(b) gives a request's units, find(unit)
// the request that has a unit of a kv head.
struct WorkWalk {
  WorkSplit split;
  uint32_t head_units;  // of all requests, for one kv head
  int batches;
  int worker;
  uint32_t unit;  // next one to take
  uint32_t end;
  int kv_head;
  int batch;
  uint32_t pair_unit;  // where (kv_head, batch) begins

  template <typename Find>
  static __host__ __device__ WorkWalk begin(WorkSplit split, uint32_t head_units, int batches,
                                            int worker, Find find) {
    WorkWalk walk = {split, head_units, batches, worker, 0, 0, 0, 0, 0};
    const uint32_t w = static_cast<uint32_t>(worker);
    if (split.units == 0 || w >= split.workers) return walk;
    walk.unit = split.first_unit(w);
    walk.end = split.first_unit(w + 1);
    const uint32_t head = walk.unit / head_units;
    const RequestStart start = find(walk.unit - head * head_units);
    walk.kv_head = static_cast<int>(head);
    walk.batch = start.batch;
    walk.pair_unit = head * head_units + start.unit;
    return walk;
  }

  template <typename UnitsOf>
  __host__ __device__ bool next(Piece* piece, UnitsOf units_of) {
    if (unit >= end) return false;
    uint32_t pair_units = units_of(batch);
    while (unit >= pair_unit + pair_units) {
      pair_unit += pair_units;
      if (++batch == batches) {
        batch = 0;
        ++kv_head;
      }
      pair_units = units_of(batch);
    }
    const uint32_t pair_end = pair_unit + pair_units;
    const uint32_t piece_end = end < pair_end ? end : pair_end;
    piece->batch = batch;
    piece->kv_head = kv_head;
    piece->first_unit = unit - pair_unit;
    piece->end_unit = piece_end - pair_unit;
    piece->pair_units = pair_units;
    piece->own_slot = 2 * worker + (unit == pair_unit ? 1 : 0);
    piece->group_slot = piece->own_slot;
    piece->group_step = 2;
    piece->group_size = 1;
    if (unit != pair_unit || piece_end != pair_end) {
      const int first = unit == pair_unit ? worker : static_cast<int>(split.owner(pair_unit));
      const int last = piece_end == pair_end ? worker : static_cast<int>(split.owner(pair_end - 1));
      piece->group_slot = 2 * first + 1;
      piece->group_size = last - first + 1;
    }
    unit = piece_end;
    return true;
  }
};

// Deterministic launches cut each pair for itself: the keys of a split follow from the pair's
// visible keys alone.
inline constexpr int kMostFixedSplits = 16;
inline constexpr int kLeastFixedSplitKeys = 512;

__host__ __device__ constexpr int fixed_split_keys(int visible_keys) {
  const int even = visible_keys / kMostFixedSplits + (visible_keys % kMostFixedSplits != 0);
  const int whole = even / 64 * 64 + (even % 64 != 0 ? 64 : 0);
  return whole > kLeastFixedSplitKeys ? whole : kLeastFixedSplitKeys;
}

// The most splits of any pair with up to `keys` visible ones. (More keys may have fewer splits.)
__host__ __device__ constexpr int most_fixed_splits(int keys) {
  const int splits = keys / kLeastFixedSplitKeys + (keys % kLeastFixedSplitKeys != 0);
  return splits < 1 ? 1 : splits > kMostFixedSplits ? kMostFixedSplits : splits;
}

// Splits of a pair, at least one.
__host__ __device__ constexpr int fixed_splits(int visible_keys) {
  const int keys = fixed_split_keys(visible_keys);
  return visible_keys <= keys ? 1 : visible_keys / keys + (visible_keys % keys != 0);
}

}  // namespace astrai::attention
