// The launch plans of decode. Needs no GPU.
#include "kernels/attention/decode_plan.h"

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

alignas(16) uint16_t memory[64];

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

// As on an H200, if its SMs hold whole clusters only.
Residency residency_with_clusters() {
  Residency residency;
  for (int log2 = 0; log2 < kClusterSizes; ++log2) residency.clusters[log2] = 256 >> log2;
  residency.clusters[0] = 264;
  return residency;
}

Residency residency_without_clusters(int blocks) {
  Residency residency;
  residency.clusters[0] = blocks;
  return residency;
}

const std::vector<HeadDims> kKernelDims = {{64, 64},   {96, 96},   {128, 128},
                                           {192, 128}, {192, 192}, {256, 256}};

ASTRAI_TEST(tiles_fit_the_devices) {
  for (const HeadDims& dims : kKernelDims) {
    for (const int element_bytes : {1, 2}) {
      const DecodeTile tile = decode_tile(dims.qk, dims.v, element_bytes);
      EXPECT_LE(tile.smem_bytes() + tile.static_smem_bytes(), kL20.smem_per_block);
      EXPECT_EQ(resident_decode_blocks(tile, kH200), 2 * kH200.sm_count);
      EXPECT_GE(resident_decode_blocks(tile, kA100), kA100.sm_count);
      EXPECT_EQ(resident_decode_blocks(tile, kL20), kL20.sm_count);
      // Bytes in flight on an SM of the H200, of K and V rows alone.
      EXPECT_GE(
          2 * tile.warps * 16 * (tile.slots * dims.qk + tile.v_slots * dims.v) * element_bytes,
          120 << 10);
    }
  }
}

ASTRAI_TEST(head_dims_run_in_the_next_larger_kernel) {
  for (int dim = 8; dim <= 256; dim += 8) {
    const HeadDims dims = kernel_dims(dim, dim);
    EXPECT_GE(dims.qk, dim);
    EXPECT_EQ(dims.qk, dims.v);
    EXPECT_TRUE(dims.qk == 64 || dim > (dims.qk == 96    ? 64
                                        : dims.qk == 128 ? 96
                                        : dims.qk == 192 ? 128
                                                         : 192));
  }
  EXPECT_EQ(kernel_dims(192, 128).v, 128);
}

#ifndef ASTRAI_NO_MMA

ASTRAI_TEST(unaligned_rows_take_the_scalar_variant) {
  const AttentionParams good = make_params(2, 3, 5, 8, 2, 64);
  EXPECT_TRUE(rows_are_aligned(good));
  const auto scalar = [](const AttentionParams& p) {
    const DecodePlan plan = plan_decode(p, residency_with_clusters(), kNoLimit);
    EXPECT_TRUE(plan.variant == Variant::kScalar);
    EXPECT_EQ(plan.blocks, int64_t{p.batch} * p.q_len * p.q_heads);
    EXPECT_EQ(plan.workspace_bytes, size_t{0});
  };
  AttentionParams p = good;
  p.q.data = memory + 1;
  scalar(p);
  p = good;
  p.v.seq_stride += 4;
  scalar(p);
  p = good;
  p.out_head_stride += 1;
  scalar(p);
  p = good;
  p.new_k = p.new_v = {memory + 1, 0, 128, 64};
  scalar(p);
  p = good;
  p.kv_dtype = DType::kE4M3;  // rows of bytes
  p.k.seq_stride = p.v.seq_stride = 136;
  scalar(p);
  p = make_params(2, 1, 5, 8, 2, 72);  // 72 bytes are no whole 16
  EXPECT_TRUE(rows_are_aligned(p));
  p.kv_dtype = DType::kE4M3;
  scalar(p);
}

ASTRAI_TEST(strides_of_size_1_dimensions_do_not_count) {
  AttentionParams p = make_params(1, 1, 1, 1, 1, 64);
  p.q.batch_stride = p.q.seq_stride = p.q.head_stride = 7;
  p.k.batch_stride = p.k.seq_stride = p.k.head_stride = 3;
  p.out_batch_stride = p.out_seq_stride = p.out_head_stride = 1;
  EXPECT_TRUE(rows_are_aligned(p));
  p.kv_len = 2;
  EXPECT_FALSE(rows_are_aligned(p));
  // Packed tensors have no batch stride, pages always have one.
  const int32_t indptr[2] = {0, 1};
  p = make_params(3, 1, 8, 1, 1, 64);
  p.q.batch_stride = 3;
  EXPECT_FALSE(rows_are_aligned(p));
  p.qo_indptr = indptr;
  p.out_batch_stride = 1;
  EXPECT_TRUE(rows_are_aligned(p));
  p.batch = 1;
  p.pages.entries = indptr;
  p.k.batch_stride = 3;
  EXPECT_FALSE(rows_are_aligned(p));
}

// cases.md E6: the query is enough for every plan, and bounded by the SMs.
ASTRAI_TEST(case_e6_the_workspace_is_bounded_and_enough) {
  Rng rng;
  for (int n = 0; n < 5000; ++n) {
    const int kv_heads = static_cast<int>(rng.integer(1, 32));
    const int group = static_cast<int>(rng.integer(1, 16));
    AttentionParams p = make_params(static_cast<int>(rng.integer(1, 300)),
                                    static_cast<int>(rng.integer(1, 16 / group)),
                                    static_cast<int>(rng.integer(0, 200000)), kv_heads * group,
                                    kv_heads, static_cast<int>(rng.integer(1, 16)) * 16);
    if (rng.coin()) p.kv_dtype = DType::kE4M3;
    const Context context("batch " + std::to_string(p.batch) + ", kv " + std::to_string(p.kv_len) +
                          ", heads " + std::to_string(p.q_heads) + "/" +
                          std::to_string(p.kv_heads) + ", dim " + std::to_string(p.head_dim));
    const size_t query = decode_workspace_bytes(p, 132);
    EXPECT_LE(query, split_workspace_bytes(2 * 2 * 132, kMmaRows, 256));
    for (const Residency& residency : {residency_with_clusters(), residency_without_clusters(264),
                                       residency_without_clusters(132)}) {
      const DecodePlan best = plan_decode(p, residency, kNoLimit);
      EXPECT_LE(best.workspace_bytes, query);
      EXPECT_EQ(plan_decode(p, residency, query).blocks, best.blocks);
      EXPECT_EQ(best.blocks, int64_t{best.workers} * best.cluster_blocks);
      const size_t limit = static_cast<size_t>(rng.integer(0, 1 << 20));
      EXPECT_LE(plan_decode(p, residency, limit).workspace_bytes, limit);
      // Without a workspace nothing is cut, and every pair has a worker.
      const DecodePlan whole = plan_decode(p, residency, 0);
      EXPECT_EQ(whole.workspace_bytes, size_t{0});
      EXPECT_EQ(whole.workers, p.batch * p.kv_heads);
    }
    p.deterministic = true;
    const DecodePlan fixed = plan_decode(p, residency_with_clusters(), 0);
    EXPECT_EQ(fixed.workspace_bytes, decode_workspace_bytes(p, 132));
    EXPECT_EQ(fixed.blocks, int64_t{p.batch} * p.kv_heads * fixed.fixed_splits);
    EXPECT_EQ(fixed.cluster_blocks, 1);
  }
}

// Units of work are counted in 32 bits.
ASTRAI_TEST(units_of_the_largest_launches_fit) {
  for (const int kv_len : {1 << 20, std::numeric_limits<int32_t>::max() - 1024}) {
    const AttentionParams p = make_params(70000, 1, kv_len, 8, 8, 64);
    const DecodePlan plan = plan_decode(p, residency_without_clusters(264), kNoLimit);
    const int64_t units = kv_len / plan.unit_keys + (kv_len % plan.unit_keys != 0);
    EXPECT_LE(units * 70000 * 8, int64_t{std::numeric_limits<int32_t>::max()});
    EXPECT_EQ(plan.workers, 264);
  }
}

// Short keys: merging within a cluster costs least. Long ones: what counts is that all SMs read.
ASTRAI_TEST(few_short_pairs_get_clusters) {
  const auto blocks_of_worker = [](int batch, int kv_heads, int kv_len, const Residency& r) {
    return plan_decode(make_params(batch, 1, kv_len, kv_heads * 4, kv_heads, 128), r, kNoLimit)
        .cluster_blocks;
  };
  const Residency clusters = residency_with_clusters();
  EXPECT_GE(blocks_of_worker(1, 8, 512, clusters), 4);
  EXPECT_EQ(blocks_of_worker(1, 8, 2048, clusters), 16);
  EXPECT_EQ(blocks_of_worker(16, 8, 512, clusters), 2);
  EXPECT_EQ(blocks_of_worker(17, 8, 8192, clusters), 1);
  EXPECT_EQ(blocks_of_worker(1, 8, 32768, clusters), 1);
  EXPECT_EQ(blocks_of_worker(1, 8, 64, clusters), 1);  // keys for one block
  EXPECT_EQ(blocks_of_worker(1, 8, 512, residency_without_clusters(264)), 1);
}

ASTRAI_TEST(launches_fill_the_device_and_not_more) {
  for (const int blocks : {108, 264}) {
    for (const HeadDims& dims : kKernelDims) {
      AttentionParams p = make_params(1, 1, 131072, 32, 8, dims.qk);
      p.v_head_dim = dims.v;
      const Residency residency = residency_without_clusters(blocks);
      EXPECT_GE(plan_decode(p, residency, kNoLimit).blocks, blocks / kDecodeBlocksPerSm * 9 / 10);
      EXPECT_LE(plan_decode(p, residency, kNoLimit).blocks, blocks);
      // Many pairs: each whole, or shared out evenly.
      p.batch = 256;
      const DecodePlan many = plan_decode(p, residency, kNoLimit);
      EXPECT_TRUE(many.blocks == (many.workspace_bytes > 0 ? blocks : 256 * 8));
      // One step of keys is not cut.
      p = make_params(1, 1, 32, 32, 8, dims.qk);
      EXPECT_EQ(plan_decode(p, residency, kNoLimit).blocks, 8);
    }
  }
}

#endif  // ASTRAI_NO_MMA

ASTRAI_TEST(queries_times_group_above_16_are_for_prefill) {
  EXPECT_TRUE(fits_decode(make_params(1, 1, 10, 16, 1, 64)));
  EXPECT_TRUE(fits_decode(make_params(1, 4, 10, 16, 4, 64)));
  EXPECT_FALSE(fits_decode(make_params(1, 1, 10, 17, 1, 64)));
  EXPECT_FALSE(fits_decode(make_params(1, 5, 10, 16, 4, 64)));
}

}  // namespace
}  // namespace astrai::attention
