// The launch plans of attention. Needs no GPU.
#include "kernels/attention/plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "tests/kernels/testing/testing.h"

namespace astrai::attention {
namespace {

using namespace astrai::testing;

constexpr DeviceInfo kH200 = {132, 232448, 233472};
constexpr DeviceInfo kA100 = {108, 166912, 167936};
constexpr DeviceInfo kL20 = {92, 101376, 102400};
constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

alignas(16) uint16_t memory[64];

DenseParams make_params(int batch, int q_len, int kv_len, int q_heads, int kv_heads, int head_dim) {
  DenseParams p;
  p.batch = batch;
  p.q_len = q_len;
  p.kv_len = kv_len;
  p.q_heads = q_heads;
  p.kv_heads = kv_heads;
  p.head_dim = head_dim;
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

#ifndef ASTRAI_NO_MMA
constexpr Variant kAligned = Variant::kMma;
#else
constexpr Variant kAligned = Variant::kScalar;
#endif

ASTRAI_TEST(tiles_fit_the_devices) {
  for (const int head_dim : {64, 128, 256}) {
    // A decode block, its static shared memory included, must fit sm_89.
    EXPECT_LE(decode_tile(head_dim).smem_bytes() + 1024, kL20.smem_per_block);
    EXPECT_LE(2 * (decode_tile(head_dim).smem_bytes() + 2048), kH200.smem_per_sm);
    EXPECT_LE(prefill_tile(head_dim, kPrefillSmallRows).all_smem_bytes(), kL20.smem_per_block);
    const PrefillTile large = prefill_tile(head_dim, kPrefillLargeRows);
    EXPECT_LE(large.all_smem_bytes(), kA100.smem_per_block);
    EXPECT_LE(large.blocks_per_sm * (large.all_smem_bytes() + 1024), kH200.smem_per_sm);
    EXPECT_LE(large.blocks_per_sm * (large.all_smem_bytes() + 1024), kA100.smem_per_sm);
  }
}

ASTRAI_TEST(unaligned_rows_take_the_scalar_variant) {
  DenseParams p = make_params(2, 3, 5, 8, 2, 64);
  EXPECT_TRUE(plan_prefill(p, kH200).variant == kAligned);
  DenseParams q = p;
  q.q.data = memory + 1;
  EXPECT_TRUE(plan_prefill(q, kH200).variant == Variant::kScalar);
  q = p;
  q.v.seq_stride += 4;
  EXPECT_TRUE(plan_prefill(q, kH200).variant == Variant::kScalar);
  q = p;
  q.out_head_stride += 1;
  EXPECT_TRUE(plan_prefill(q, kH200).variant == Variant::kScalar);
  EXPECT_EQ(plan_prefill(q, kH200).blocks, int64_t{2} * 2 * 3);  // 12 packed rows by 4, per kv head
}

ASTRAI_TEST(strides_of_size_1_dimensions_do_not_count) {
  DenseParams p = make_params(1, 1, 1, 1, 1, 64);
  p.q.batch_stride = p.q.seq_stride = p.q.head_stride = 7;
  p.k.batch_stride = p.k.seq_stride = p.k.head_stride = 3;
  p.out_batch_stride = p.out_seq_stride = p.out_head_stride = 1;
  EXPECT_TRUE(rows_are_aligned(p));
  p.kv_len = 2;
  EXPECT_FALSE(rows_are_aligned(p));
}

#ifndef ASTRAI_NO_MMA

// Every key lies in one split, and all splits but empty ones at the end are used.
void check_decode_plan(const DenseParams& p, const DecodePlan& plan) {
  EXPECT_GE(plan.splits, 1);
  EXPECT_GE(int64_t{plan.splits} * plan.split_keys, int64_t{p.kv_len});
  EXPECT_EQ(plan.blocks, int64_t{p.batch} * p.kv_heads * plan.passes * plan.splits);
  EXPECT_GE(plan.passes * kMmaRows, p.q_heads / p.kv_heads);
  EXPECT_EQ(plan.workspace_bytes,
            decode_partials_bytes(int64_t{p.batch} * p.q_heads, plan.splits, p.head_dim));
}

ASTRAI_TEST(decode_plans_cover_all_keys_within_the_workspace) {
  Rng rng;
  for (int n = 0; n < 3000; ++n) {
    const int kv_heads = static_cast<int>(rng.integer(1, 32));
    const int group = static_cast<int>(rng.integer(1, 64));
    const DenseParams p = make_params(static_cast<int>(rng.integer(1, 200)), 1,
                                      static_cast<int>(rng.integer(0, 100000)), kv_heads * group,
                                      kv_heads, rng.pick(std::vector<int>{64, 128, 256}));
    const DeviceInfo device = rng.pick(std::vector<DeviceInfo>{kH200, kA100, kL20});
    const Context context("batch " + std::to_string(p.batch) + ", kv " + std::to_string(p.kv_len) +
                          ", heads " + std::to_string(p.q_heads) + "/" +
                          std::to_string(p.kv_heads));
    const size_t query = decode_workspace_bytes(p, device.sm_count);
    const DecodePlan best = plan_decode(p, device, query);
    check_decode_plan(p, best);
    EXPECT_LE(best.workspace_bytes, query);
    EXPECT_LE(query, size_t{20} << 20);
    const size_t limit = static_cast<size_t>(rng.integer(0, 1 << 20));
    const DecodePlan limited = plan_decode(p, device, limit);
    check_decode_plan(p, limited);
    EXPECT_LE(limited.workspace_bytes, limit);
    EXPECT_EQ(plan_decode(p, device, 0).splits, 1);
  }
}

// The fastest of the split counts swept on an H200, within 3 % (kernels/attention/README.md).
ASTRAI_TEST(decode_splits_are_those_measured_best) {
  struct Row {
    int batch, q_heads, kv_heads, head_dim, kv_len, splits;
  };
  for (const Row& r :
       {Row{1, 32, 8, 128, 512, 8}, Row{1, 32, 8, 128, 2048, 16}, Row{1, 32, 8, 128, 8192, 16},
        Row{16, 32, 8, 128, 512, 1}, Row{16, 32, 8, 128, 2048, 1}, Row{16, 32, 8, 128, 8192, 1},
        Row{64, 32, 8, 128, 512, 1}, Row{64, 32, 8, 128, 2048, 1}, Row{1, 16, 2, 256, 512, 16},
        Row{1, 16, 2, 256, 8192, 64}, Row{16, 16, 2, 256, 512, 8}, Row{16, 16, 2, 256, 8192, 8},
        Row{64, 16, 2, 256, 8192, 2}, Row{8, 16, 16, 64, 4096, 1}}) {
    const Context context("batch " + std::to_string(r.batch) + ", head dim " +
                          std::to_string(r.head_dim) + ", kv " + std::to_string(r.kv_len));
    const DenseParams p = make_params(r.batch, 1, r.kv_len, r.q_heads, r.kv_heads, r.head_dim);
    EXPECT_EQ(plan_decode(p, kH200, kNoLimit).splits, r.splits);
  }
}

ASTRAI_TEST(decode_splits_leave_no_gpu_idle_nor_overfull) {
  for (const DeviceInfo& device : {kH200, kA100, kL20}) {
    for (const int head_dim : {64, 128, 256}) {
      const Context context("head dim " + std::to_string(head_dim) + ", " +
                            std::to_string(device.sm_count) + " SMs");
      const DecodePlan one =
          plan_decode(make_params(1, 1, 131072, 32, 8, head_dim), device, kNoLimit);
      EXPECT_GE(one.blocks, device.sm_count * 9 / 10);
      EXPECT_LE(one.blocks, device.sm_count * 4);
      // More blocks than the GPU holds at once need no splits.
      const DecodePlan many =
          plan_decode(make_params(256, 1, 8192, 32, 8, head_dim), device, kNoLimit);
      EXPECT_EQ(many.splits, 1);
      EXPECT_EQ(many.workspace_bytes, size_t{0});
      // Too short for a second launch.
      EXPECT_EQ(plan_decode(make_params(1, 1, 64, 32, 8, head_dim), device, kNoLimit).splits, 1);
    }
  }
}

ASTRAI_TEST(forced_splits_are_taken_as_they_are) {
  for (const int kv_len : {1, 63, 64, 65}) {
    const DenseParams p = make_params(2, 1, kv_len, 8, 2, 128);
    const DecodePlan plan = plan_decode(p, kH200, 0, 128);
    EXPECT_EQ(plan.splits, 128);
    check_decode_plan(p, plan);
  }
}

ASTRAI_TEST(groups_above_16_take_several_passes) {
  EXPECT_EQ(plan_decode(make_params(1, 1, 10, 16, 1, 64), kH200, 0).passes, 1);
  EXPECT_EQ(plan_decode(make_params(1, 1, 10, 17, 1, 64), kH200, 0).passes, 2);
  EXPECT_EQ(plan_decode(make_params(1, 1, 10, 64, 1, 64), kH200, 0).passes, 4);
}

ASTRAI_TEST(prefill_tiles_cover_all_rows) {
  Rng rng;
  for (int n = 0; n < 3000; ++n) {
    const int kv_heads = static_cast<int>(rng.integer(1, 32));
    const int group = static_cast<int>(rng.integer(1, 64));
    const DenseParams p =
        make_params(static_cast<int>(rng.integer(1, 50)), static_cast<int>(rng.integer(1, 20000)),
                    static_cast<int>(rng.integer(0, 20000)), kv_heads * group, kv_heads,
                    rng.pick(std::vector<int>{64, 128, 256}));
    const PrefillPlan plan = plan_prefill(p, kH200);
    const int64_t rows = int64_t{p.q_len} * group, pairs = int64_t{p.batch} * kv_heads;
    EXPECT_GE(plan.row_tiles * plan.tile_rows, rows);
    EXPECT_LT((plan.row_tiles - 1) * plan.tile_rows, rows);
    EXPECT_EQ(plan.blocks, plan.row_tiles * pairs);
    EXPECT_GE(plan.section, int64_t{1});
    EXPECT_LE(plan.section, pairs);
  }
}

// The faster of the two row counts on an H200 (kernels/attention/README.md).
ASTRAI_TEST(prefill_rows_are_those_measured_best) {
  const auto rows = [](int batch, int q_len, int kv_len, int q_heads, int kv_heads, int head_dim,
                       bool causal) {
    DenseParams p = make_params(batch, q_len, kv_len, q_heads, kv_heads, head_dim);
    p.causal = causal;
    return plan_prefill(p, kH200).tile_rows;
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
  EXPECT_EQ(rows(1, 16, 32768, 32, 8, 128, true), 64);
  EXPECT_EQ(rows(1, 16, 32768, 32, 8, 128, false), 64);
}

ASTRAI_TEST(prefill_takes_small_tiles_where_large_ones_do_not_fit) {
  EXPECT_EQ(plan_prefill(make_params(2, 4096, 4096, 16, 4, 256), kH200).tile_rows, 128);
  EXPECT_EQ(plan_prefill(make_params(2, 4096, 4096, 16, 4, 256), kL20).tile_rows, 64);
}

#endif  // ASTRAI_NO_MMA

ASTRAI_TEST(reasons_name_the_argument) {
  const auto reason = [](const DenseParams& p) {
    const char* text = why_not_implemented(p);
    return std::string(text == nullptr ? "" : text);
  };
  const DenseParams good = make_params(2, 3, 5, 8, 2, 64);
  EXPECT_EQ(reason(good), "");
  DenseParams p = good;
  p.head_dim = 80;
  EXPECT_EQ(reason(p), "head_dim must be 64, 128 or 256");
  p = good;
  p.dtype = DType::kFP32;
  EXPECT_EQ(reason(p), "dtype must be bfloat16 or float16");
  p = good;
  p.q_heads = 7;
  EXPECT_EQ(reason(p), "q_heads must be a multiple of kv_heads");
  p = good;
  p.q_heads = 130;
  EXPECT_EQ(reason(p), "q_heads / kv_heads must be at most 64");
  p = good;
  p.scale = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(reason(p), "scale must be finite");
  p = good;
  p.k.data = nullptr;
  EXPECT_EQ(reason(p), "k and v must not be null");
  p.kv_len = 0;
  EXPECT_EQ(reason(p), "");
  p = good;
  p.q_len = 1 << 30;
  EXPECT_NE(reason(p), "");
}

}  // namespace
}  // namespace astrai::attention
