// The launch plans of prefill. Needs no GPU.
#include "kernels/attention/prefill_plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention/split_merge.cuh"
#include "kernels/attention/work_split.cuh"
#include "tests/kernels/testing/testing.h"

namespace astrai::attention {
namespace {

using namespace astrai::testing;

constexpr DeviceInfo kH200 = {132, 232448, 233472};
constexpr DeviceInfo kA100 = {108, 166912, 167936};
constexpr DeviceInfo kL20 = {92, 101376, 102400};
constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

const std::vector<HeadDims> kKernelDims = {{64, 64},   {96, 96},   {128, 128},
                                           {192, 128}, {192, 192}, {256, 256}};

alignas(16) uint16_t memory[64];
const int32_t some_indices[1] = {0};

AttentionParams make_params(int batch, int q_len, int kv_len, int q_heads, int kv_heads,
                            int head_dim) {
  AttentionParams p;
  p.batch = batch;
  p.q_len = q_len;
  p.kv_len = kv_len;
  p.q_heads = q_heads;
  p.kv_heads = kv_heads;
  p.head_dim = p.v_head_dim = head_dim;
  p.scale = 0.1f;
  const int64_t q_seq = int64_t{q_heads} * head_dim, k_seq = int64_t{kv_heads} * head_dim;
  p.q = {memory, q_len * q_seq, q_seq, head_dim};
  p.k = p.v = {memory, kv_len * k_seq, k_seq, head_dim};
  p.out = memory;
  p.out_batch_stride = q_len * q_seq;
  p.out_seq_stride = q_seq;
  p.out_head_stride = head_dim;
  return p;
}

AttentionParams packed(AttentionParams p) {
  p.total_q = p.batch * p.q_len;
  p.qo_indptr = p.kv_indptr = some_indices;
  return p;
}

PrefillPlan plan_of(const AttentionParams& p, const DeviceInfo& device = kH200,
                    size_t limit = kNoLimit) {
  return plan_prefill(p, 0, device, limit);
}

#ifndef ASTRAI_NO_MMA
constexpr Variant kAligned = Variant::kMma;
#else
constexpr Variant kAligned = Variant::kScalar;
#endif

ASTRAI_TEST(tiles_fit_the_devices) {
  for (const HeadDims& dims : kKernelDims) {
    for (const bool paged : {false, true}) {
      for (const int element_bytes : {1, 2}) {
        const PrefillTile tile = prefill_tile(dims, kPrefillSmallRows, element_bytes);
        EXPECT_LE(tile.all_smem_bytes(paged), kL20.smem_per_block);
        EXPECT_LE(tile.blocks_per_sm * (tile.all_smem_bytes(paged) + kReservedSmem),
                  kH200.smem_per_sm);
      }
      if (!has_large_prefill_tile(dims, 2)) continue;
      const PrefillTile large = prefill_tile(dims, kPrefillLargeRows, 2);
      EXPECT_LE(large.all_smem_bytes(paged), kA100.smem_per_block);
      EXPECT_LE(large.blocks_per_sm * (large.all_smem_bytes(paged) + kReservedSmem),
                kH200.smem_per_sm);
      // What tables take leaves one block on an SM of the A100 with head dim 128.
      if (paged && dims.qk == 128) continue;
      EXPECT_LE(large.blocks_per_sm * (large.all_smem_bytes(paged) + kReservedSmem),
                kA100.smem_per_sm);
    }
  }
}

ASTRAI_TEST(unaligned_rows_take_the_scalar_variant) {
  const AttentionParams p = make_params(2, 3, 5, 8, 2, 64);
  EXPECT_TRUE(plan_of(p).variant == kAligned);
  AttentionParams q = p;
  q.q.data = memory + 1;
  EXPECT_TRUE(plan_of(q).variant == Variant::kScalar);
  q = p;
  q.v.seq_stride += 4;
  EXPECT_TRUE(plan_of(q).variant == Variant::kScalar);
  q = p;
  q.out_head_stride += 1;
  EXPECT_TRUE(plan_of(q).variant == Variant::kScalar);
  EXPECT_EQ(plan_of(q).blocks, int64_t{2} * 2 * 3);  // 12 packed rows by 4, per kv head
  EXPECT_EQ(plan_of(packed(q)).blocks, int64_t{2} * 2 * 3);
  EXPECT_EQ(plan_of(q).workspace_bytes, size_t{0});
}

// Blocks that the schedules can number, and rows that none of them misses.
ASTRAI_TEST(plans_cover_all_rows_within_the_workspace) {
  Rng rng;
  for (int n = 0; n < 3000; ++n) {
    const int kv_heads = static_cast<int>(rng.integer(1, 32));
    const int group = static_cast<int>(rng.integer(1, 64));
    const HeadDims dims = rng.pick(kKernelDims);
    AttentionParams p =
        make_params(static_cast<int>(rng.integer(1, 50)),
                    static_cast<int>(rng.integer(1, rng.coin() ? 20 : 20000)),
                    static_cast<int>(rng.integer(0, 20000)), kv_heads * group, kv_heads, dims.qk);
    p.v_head_dim = dims.v;
    p.causal = rng.coin();
    if (rng.coin()) p.window_left = static_cast<int>(rng.integer(0, 1000));
    const bool is_packed = rng.coin();
    if (is_packed) p = packed(p);
    const DeviceInfo device = rng.pick(std::vector<DeviceInfo>{kH200, kA100, kL20});
    const Context context("batch " + std::to_string(p.batch) + ", q " + std::to_string(p.q_len) +
                          ", kv " + std::to_string(p.kv_len) + ", heads " +
                          std::to_string(p.q_heads) + "/" + std::to_string(p.kv_heads) + ", dim " +
                          std::to_string(p.head_dim) + (is_packed ? ", packed" : ""));
    const int map_size =
        is_packed && rng.coin() ? static_cast<int>(q_work_map_capacity(p.batch, p.total_q)) : 0;
    const size_t query = prefill_workspace_bytes(p, device.sm_count);
    const PrefillPlan plan = plan_prefill(p, map_size, device, query);
    EXPECT_LE(plan.workspace_bytes, query);
    EXPECT_LE(query, size_t{40} << 20);
    EXPECT_GE(plan.splits, 1);
    EXPECT_LE(plan.splits, kMostPrefillSplits);
    const int64_t rows = int64_t{p.q_len} * group, pairs = int64_t{p.batch} * kv_heads;
    if (!is_packed) {
      EXPECT_GE(int64_t{plan.row_tiles} * plan.tile_rows, rows);
      EXPECT_LT((int64_t{plan.row_tiles} - 1) * plan.tile_rows, rows);
      EXPECT_EQ(plan.blocks, plan.row_tiles * pairs * plan.splits);
      EXPECT_GE(plan.section, 1);
      EXPECT_LE(plan.section, pairs);
    } else {
      const int64_t entries = plan.use_map ? map_size : int64_t{p.batch} * plan.tiles_per_request;
      EXPECT_EQ(int64_t{plan.entries}, entries);
      EXPECT_GE(int64_t{plan.blocks_per_entry} * plan.tile_rows,
                int64_t{std::min(p.q_len, kQMapRows)} * group);
      EXPECT_GE(plan.tiles_per_request * kQMapRows, p.q_len);
      EXPECT_EQ(plan.blocks, entries * plan.blocks_per_entry * kv_heads * plan.splits);
      // As PackedQSchedule takes them.
      EXPECT_TRUE(plan.tile_rows <= kQMapRows * group || plan.tile_rows % (kQMapRows * group) == 0);
    }
    if (plan.splits > 1) {
      EXPECT_EQ(plan.workspace_bytes,
                split_workspace_bytes(plan.blocks, plan.slot_rows, plan.dims.v));
      EXPECT_GE(int64_t{plan.slot_rows}, std::min<int64_t>(plan.tile_rows, rows));
      EXPECT_EQ(plan.slot_rows % 2, 0);
    }
    const size_t limit = static_cast<size_t>(rng.integer(0, 1 << 20));
    EXPECT_LE(plan_prefill(p, map_size, device, limit).workspace_bytes, limit);
    EXPECT_EQ(plan_prefill(p, map_size, device, 0).splits, 1);
  }
}

#ifndef ASTRAI_NO_MMA

// The faster of the two row counts on an H200 (kernels/attention/README.md).
ASTRAI_TEST(rows_are_those_measured_best) {
  const auto rows = [](int batch, int q_len, int kv_len, int q_heads, int kv_heads, int head_dim,
                       bool causal) {
    AttentionParams p = make_params(batch, q_len, kv_len, q_heads, kv_heads, head_dim);
    p.causal = causal;
    const PrefillPlan plan = plan_of(p);
    EXPECT_EQ(plan.splits, 1);
    return plan.tile_rows;
  };
  EXPECT_EQ(rows(1, 512, 512, 32, 8, 128, true), 64);
  EXPECT_EQ(rows(1, 512, 512, 32, 8, 128, false), 64);
  EXPECT_EQ(rows(1, 1024, 1024, 32, 8, 128, true), 64);
  EXPECT_EQ(rows(1, 1024, 1024, 32, 8, 128, false), 128);
  EXPECT_EQ(rows(1, 2048, 2048, 32, 8, 128, true), 128);
  EXPECT_EQ(rows(1, 2048, 2048, 32, 8, 128, false), 128);
  EXPECT_EQ(rows(2, 512, 512, 32, 32, 64, true), 64);
  EXPECT_EQ(rows(2, 512, 512, 32, 32, 64, false), 128);
  EXPECT_EQ(rows(2, 512, 512, 16, 4, 256, true), 64);
  EXPECT_EQ(rows(2, 512, 512, 16, 4, 256, false), 128);
  EXPECT_EQ(rows(2, 2048, 2048, 16, 4, 256, true), 128);
  // A chunk of few rows against a long past: all its rows see almost all keys, so it runs like one
  // without the causal mask.
  EXPECT_EQ(rows(1, 1024, 32768, 32, 8, 128, true), 128);
}

ASTRAI_TEST(small_tiles_where_large_ones_do_not_fit) {
  EXPECT_EQ(plan_of(make_params(2, 4096, 4096, 16, 4, 256)).tile_rows, 128);
  EXPECT_EQ(plan_of(make_params(2, 4096, 4096, 16, 4, 256), kL20).tile_rows, 64);
  EXPECT_EQ(plan_of(make_params(2, 4096, 4096, 16, 4, 192)).tile_rows, 64);
  AttentionParams fp8 = make_params(2, 4096, 4096, 16, 4, 128);
  EXPECT_EQ(plan_of(fp8).tile_rows, 128);
  fp8.kv_dtype = DType::kE4M3;
  EXPECT_EQ(plan_of(fp8).tile_rows, 64);
}

// Where row tiles are too few for the SMs and keys are many.
ASTRAI_TEST(long_keys_of_few_rows_are_split) {
  for (const DeviceInfo& device : {kH200, kA100, kL20}) {
    for (const bool is_packed : {false, true}) {
      const auto plan = [&](int batch, int q_len, int kv_len) {
        AttentionParams p = make_params(batch, q_len, kv_len, 64, 8, 128);
        p.causal = true;
        return plan_of(is_packed ? packed(p) : p, device);
      };
      // One wave of blocks and not more; no split below 256 keys.
      const PrefillPlan few = plan(1, 16, 32768);
      EXPECT_GE(few.splits, 4);
      EXPECT_GE(few.blocks, int64_t{device.sm_count} / 2);
      EXPECT_LE(few.blocks, int64_t{device.sm_count} * 3);
      EXPECT_LE(plan(1, 16, 1024).splits, 4);
      EXPECT_EQ(plan(1, 16, 256).splits, 1);
      EXPECT_EQ(plan(1, 4096, 32768).splits, 1);
      EXPECT_EQ(plan(64, 16, 32768).splits, 1);
    }
  }
  const AttentionParams chunk = make_params(1, 256, 32768, 32, 8, 128);
  EXPECT_GE(plan_of(chunk).splits, 2);
}

// A window that is shorter than the keys leaves less to split.
ASTRAI_TEST(windows_are_not_split_below_their_width) {
  AttentionParams p = make_params(1, 16, 32768, 64, 8, 128);
  p.causal = true;
  p.window_left = 500;
  EXPECT_EQ(plan_of(p).splits, 1);
  p.window_left = 4000;
  EXPECT_LE(plan_of(p).splits, 16);
}

ASTRAI_TEST(work_maps_are_used_where_requests_have_several_tiles) {
  const AttentionParams few = packed(make_params(3, kQMapRows, 500, 8, 2, 64));
  EXPECT_FALSE(plan_prefill(few, 100, kH200, 0).use_map);
  EXPECT_EQ(plan_prefill(few, 100, kH200, 0).entries, 3);
  const AttentionParams many = packed(make_params(3, kQMapRows + 1, 500, 8, 2, 64));
  EXPECT_TRUE(plan_prefill(many, 100, kH200, 0).use_map);
  EXPECT_EQ(plan_prefill(many, 100, kH200, 0).entries, 100);
  EXPECT_EQ(plan_prefill(many, 0, kH200, 0).entries, 6);
}

// With few queries: as many splits as any length up to kv_len may have, and more tiles of them if
// there are more requests. With many: none, as the splits of long prompts would fill the memory.
ASTRAI_TEST(deterministic_plans_follow_from_the_length_alone) {
  for (const int kv_len : {1, 512, 513, 5000, 100000}) {
    for (const int batch : {1, 64}) {
      AttentionParams p = packed(make_params(batch, 16, kv_len, 64, 8, 128));
      p.deterministic = true;
      const PrefillPlan plan = plan_of(p, kH200, 0);
      EXPECT_EQ(plan.tile_rows, kPrefillSmallRows);
      EXPECT_TRUE(plan.fixed_splits);
      EXPECT_GE(plan.splits, most_fixed_splits(kv_len));
      EXPECT_EQ(plan.blocks, int64_t{batch} * 8 * 2 * plan.splits);
      EXPECT_EQ(plan.workspace_bytes, prefill_workspace_bytes(p, kH200.sm_count));
      EXPECT_EQ(plan.workspace_bytes, decode_workspace_bytes(p, kA100.sm_count));
    }
  }
  AttentionParams p = make_params(1, 17, 100000, 64, 8, 128);
  p.deterministic = true;
  EXPECT_EQ(plan_of(p).splits, 1);
  EXPECT_EQ(plan_of(p).tile_rows, kPrefillSmallRows);
}

ASTRAI_TEST(forced_choices_are_taken_as_they_are) {
  const AttentionParams p = make_params(2, 100, 63, 8, 2, 128);
  for (const int tile_rows : {kPrefillSmallRows, kPrefillLargeRows}) {
    const PrefillPlan plan = plan_prefill(p, 0, kH200, 0, {tile_rows, 7});
    EXPECT_EQ(plan.splits, 7);
    EXPECT_EQ(plan.tile_rows, tile_rows);
    EXPECT_EQ(plan_prefill(p, 0, kH200, 0, {tile_rows, 0}).tile_rows, tile_rows);
  }
}

#endif  // ASTRAI_NO_MMA

ASTRAI_TEST(nothing_to_split_needs_no_workspace) {
  EXPECT_EQ(prefill_workspace_bytes(AttentionParams(), 132), size_t{0});
  EXPECT_EQ(prefill_workspace_bytes(make_params(4, 4096, 4096, 32, 8, 128), 132), size_t{0});
  EXPECT_EQ(prefill_workspace_bytes(make_params(1, 16, 100, 32, 8, 128), 132), size_t{0});
}

}  // namespace
}  // namespace astrai::attention
