// How a decode launch shares its keys out: every key once, and all workers agree about the slots.
// Needs no GPU.
#include "kernels/attention/work_split.cuh"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/testing/testing.h"

namespace astrai::attention {
namespace {

using namespace astrai::testing;

struct Batch {
  std::vector<uint32_t> units;  // of each request
  int kv_heads;

  uint32_t head_units() const {
    uint32_t sum = 0;
    for (const uint32_t u : units) sum += u;
    return sum;
  }
  RequestStart find(uint32_t unit) const {
    RequestStart at = {0, 0};
    while (at.unit + units[at.batch] <= unit) at.unit += units[at.batch++];
    return at;
  }
};

// All pieces of all workers.
std::vector<Piece> pieces_of(const Batch& batch, const WorkSplit& split) {
  std::vector<Piece> pieces;
  for (int worker = 0; worker < static_cast<int>(split.workers) + 2; ++worker) {
    WorkWalk walk = WorkWalk::begin(split, batch.head_units(), static_cast<int>(batch.units.size()),
                                    worker, [&](uint32_t unit) { return batch.find(unit); });
    Piece piece;
    int partial = 0;
    std::vector<int> slots;
    while (walk.next(&piece, [&](int b) { return batch.units[b]; })) {
      pieces.push_back(piece);
      if (piece.group_size > 1) {
        ++partial;
        slots.push_back(piece.own_slot);
        EXPECT_TRUE(piece.own_slot == 2 * worker || piece.own_slot == 2 * worker + 1);
      }
    }
    EXPECT_LE(partial, 2);
    EXPECT_TRUE(slots.size() < 2 || slots[0] != slots[1]);
  }
  return pieces;
}

void check(const Batch& batch, const WorkSplit& split) {
  using Pair = std::pair<int, int>;
  std::map<Pair, std::vector<Piece>> by_pair;
  for (const Piece& piece : pieces_of(batch, split)) {
    by_pair[{piece.kv_head, piece.batch}].push_back(piece);
  }
  for (int head = 0; head < batch.kv_heads; ++head) {
    for (int b = 0; b < static_cast<int>(batch.units.size()); ++b) {
      const std::vector<Piece>& pieces = by_pair[{head, b}];
      if (batch.units[b] == 0) {
        EXPECT_TRUE(pieces.empty());
        continue;
      }
      // In order, without gaps, and each names the slots of all of them.
      uint32_t next = 0;
      std::vector<int> slots;
      for (const Piece& piece : pieces) {
        REQUIRE(piece.first_unit == next && piece.end_unit > next);
        next = piece.end_unit;
        slots.push_back(piece.own_slot);
      }
      REQUIRE(next == batch.units[b]);
      for (const Piece& piece : pieces) {
        REQUIRE(piece.pair_units == batch.units[b]);
        REQUIRE(piece.group_size == static_cast<int>(pieces.size()));
        if (piece.group_size == 1) continue;
        for (int i = 0; i < piece.group_size; ++i) REQUIRE(piece.slot(i) == slots[i]);
      }
    }
  }
}

ASTRAI_TEST(every_key_has_one_worker_and_slots_agree) {
  Rng rng;
  for (int n = 0; n < 3000; ++n) {
    Batch batch;
    batch.kv_heads = static_cast<int>(rng.integer(1, 9));
    const int requests = static_cast<int>(rng.integer(1, 40));
    const int64_t longest = rng.pick(std::vector<int64_t>{1, 3, 20, 500});
    for (int b = 0; b < requests; ++b) {
      batch.units.push_back(
          rng.integer(0, 5) == 0 ? 0 : static_cast<uint32_t>(rng.integer(1, longest)));
    }
    const uint32_t units = batch.head_units() * batch.kv_heads;
    if (units == 0) continue;
    const uint32_t most = static_cast<uint32_t>(rng.integer(1, 300));
    const Context context(std::to_string(requests) + " requests, " + std::to_string(units) +
                          " units, at most " + std::to_string(most) + " workers");
    const uint32_t pairs = static_cast<uint32_t>(requests) * batch.kv_heads;
    const WorkSplit split = {units, used_workers(units, most, pairs)};
    EXPECT_LE(split.workers, std::min(most, units));
    EXPECT_GE(split.workers, 1u);
    check(batch, split);
    check(batch, {units, std::min(most, units)});
  }
}

ASTRAI_TEST(first_unit_and_owner_are_inverse_for_the_largest_numbers) {
  Rng rng;
  for (int n = 0; n < 20000; ++n) {
    const WorkSplit split = {static_cast<uint32_t>(rng.integer(65535, 0x7fffffff)),
                             static_cast<uint32_t>(rng.integer(1, 65535))};
    const uint32_t worker = static_cast<uint32_t>(rng.integer(0, split.workers - 1));
    const uint32_t first = split.first_unit(worker);
    REQUIRE(first == static_cast<uint64_t>(worker) * split.units / split.workers);
    REQUIRE(split.first_unit(split.workers) == split.units);
    REQUIRE(split.owner(first) == worker);
    REQUIRE(split.owner(split.first_unit(worker + 1) - 1) == worker);
  }
}

// Load: no worker has more than one unit above the average.
ASTRAI_TEST(workers_have_equal_shares) {
  Rng rng;
  for (int n = 0; n < 1000; ++n) {
    const WorkSplit split = {static_cast<uint32_t>(rng.integer(300, 100000)),
                             static_cast<uint32_t>(rng.integer(1, 300))};
    for (uint32_t w = 0; w < split.workers; ++w) {
      const uint32_t share = split.first_unit(w + 1) - split.first_unit(w);
      REQUIRE(share >= split.units / split.workers && share <= split.units / split.workers + 1);
    }
  }
}

// Pairs of equal length are cut alike if the workers are about a multiple of the pairs.
ASTRAI_TEST(equal_pairs_are_cut_alike) {
  for (const int pairs : {1, 2, 3, 8, 32, 64, 128}) {
    for (const uint32_t length : {64u, 100u, 512u}) {
      const Batch batch = {std::vector<uint32_t>(pairs, length), 1};
      const uint32_t units = batch.head_units();
      const WorkSplit split = {units, used_workers(units, 264, pairs)};
      EXPECT_EQ(split.workers % pairs, 0u);
      std::map<int, std::vector<uint32_t>> cuts;
      for (const Piece& piece : pieces_of(batch, split)) {
        cuts[piece.batch].push_back(piece.first_unit);
      }
      for (const auto& [b, at] : cuts) EXPECT_TRUE(at == cuts[0]);
    }
  }
}

ASTRAI_TEST(workers_are_enough_for_the_pairs_and_worth_their_work) {
  EXPECT_EQ(used_workers(1024, 264, 8), 264u);    // 33 for each pair
  EXPECT_EQ(used_workers(1024, 264, 32), 256u);   // 8 for each, not 8.25
  EXPECT_EQ(used_workers(1024, 264, 180), 264u);  // dropping 84 would cost too much
  EXPECT_EQ(used_workers(5, 264, 8), 5u);         // requests without queries have no pairs
}

ASTRAI_TEST(fixed_splits_cover_the_keys) {
  EXPECT_EQ(fixed_splits(0), 1);
  EXPECT_EQ(fixed_splits(512), 1);
  EXPECT_EQ(fixed_splits(513), 2);
  EXPECT_EQ(fixed_splits(8192), 16);
  EXPECT_EQ(fixed_splits(8193), 15);
  for (int keys = 0; keys < 200000; keys += keys < 20000 ? 1 : 37) {
    const int size = fixed_split_keys(keys), splits = fixed_splits(keys);
    REQUIRE(size % 64 == 0 && size >= kLeastFixedSplitKeys);
    REQUIRE(splits >= 1 && splits <= kMostFixedSplits);
    REQUIRE(static_cast<int64_t>(size) * splits >= keys);
    REQUIRE(splits == 1 || size * (splits - 1) < keys);  // none is empty
    REQUIRE(splits <= most_fixed_splits(keys) && most_fixed_splits(keys) <= kMostFixedSplits);
    REQUIRE(keys == 0 || most_fixed_splits(keys) >= most_fixed_splits(keys - 1));
  }
  EXPECT_EQ(fixed_splits(0x7fffffff - 1024), 16);
}

}  // namespace
}  // namespace astrai::attention
