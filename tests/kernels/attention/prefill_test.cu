// launch_prefill against an fp64 reference. Needs a GPU.
#include <utility>
#include <vector>

#include "tests/kernels/attention/attention_case.h"

namespace astrai::attention {
namespace {

const std::vector<int> kHeadDims = {64, 128, 256};
const std::vector<int> kTileRows = {0, kPrefillSmallRows, kPrefillLargeRows};
const std::vector<MaskKind> kMasks = {MaskKind::kNone, MaskKind::kBatchKv, MaskKind::kBatchQKv,
                                      MaskKind::kBatchHeads1Kv, MaskKind::kFull};
const std::vector<Layout> kLayouts = {Layout::kContiguous, Layout::kHeadsFirst,
                                      Layout::kInterleaved, Layout::kPadded};

// cases.md C8: causal is aligned to the bottom right, also where the first rows see no key.
ASTRAI_TEST(case_c8_causal_pairs) {
  Rng rng;
  const std::vector<std::pair<int, int>> pairs = {{3, 128}, {128, 3},   {1, 1},     {5, 5},
                                                  {65, 64}, {200, 257}, {300, 100}, {129, 129}};
  for (const int head_dim : kHeadDims) {
    for (const int tile_rows : kTileRows) {
      for (const auto& [q_len, kv_len] : pairs) {
        for (const bool causal : {true, false}) {
          Options options;
          options.causal = causal;
          options.tile_rows = tile_rows;
          run_both(rng, {2, q_len, kv_len, 4, 2, head_dim}, options);
        }
      }
    }
  }
}

ASTRAI_TEST(every_group_size) {
  Rng rng;
  for (const int head_dim : kHeadDims) {
    for (const int group : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 33, 64}) {
      Options options;
      options.causal = rng.coin();
      options.tile_rows = rng.pick(kTileRows);
      const int kv_heads = group > 8 ? 1 : 2;
      run_both(rng, {2, 45, 133, group * kv_heads, kv_heads, head_dim}, options);
    }
  }
}

ASTRAI_TEST(masks_of_every_rank_combine_with_causal) {
  Rng rng;
  for (const int head_dim : kHeadDims) {
    for (const MaskKind mask : kMasks) {
      for (const bool causal : {false, true}) {
        for (const bool aligned : {false, true}) {
          Options options;
          options.mask = mask;
          options.mask_rows_aligned = aligned;
          options.causal = causal;
          options.tile_rows = rng.pick(kTileRows);
          const int q_len = static_cast<int>(rng.integer(1, 150));
          run_both(rng, {2, q_len, static_cast<int>(rng.integer(1, 300)), 6, 2, head_dim}, options);
        }
      }
    }
  }
}

ASTRAI_TEST(strided_and_interleaved_views) {
  Rng rng;
  for (const int head_dim : kHeadDims) {
    for (const Layout layout : kLayouts) {
      for (const int tile_rows : kTileRows) {
        Options options;
        options.layout = layout;
        options.causal = true;
        options.tile_rows = tile_rows;
        run_both(rng, {3, 70, 190, 8, 4, head_dim}, options);
      }
    }
  }
}

// Rows that are not 16-byte aligned take the scalar kernel.
ASTRAI_TEST(misaligned_rows_give_the_right_result) {
  Rng rng;
  for (const int head_dim : kHeadDims) {
    for (const int shift : {1, 3, 4}) {
      Options options;
      options.shift = shift;
      options.causal = rng.coin();
      options.mask = rng.pick(kMasks);
      options.layout = rng.pick(kLayouts);
      run_both(rng, {2, 37, 90, 6, 2, head_dim}, options);
    }
  }
}

ASTRAI_TEST(no_keys_give_zero_and_minus_infinity) {
  Rng rng;
  for (const int head_dim : kHeadDims) {
    for (const int tile_rows : kTileRows) {
      for (const bool causal : {false, true}) {
        Options options;
        options.tile_rows = tile_rows;
        options.causal = causal;
        run_both(rng, {2, 70, 0, 8, 2, head_dim}, options);
      }
    }
    Options options;
    options.shift = 1;
    run_both(rng, {2, 70, 0, 8, 2, head_dim}, options);
  }
}

ASTRAI_TEST(long_sequences) {
  Rng rng;
  for (const int head_dim : kHeadDims) {
    for (const bool causal : {false, true}) {
      Options options;
      options.causal = causal;
      run_both(rng, {1, 1024, 1024, 32, 8, head_dim}, options);
      run_both(rng, {4, 513, 2000, 8, 8, head_dim}, options);
      run_both(rng, {1, 16, 8192, 8, 2, head_dim}, options);
    }
  }
}

// More (batch, kv head) pairs than share one section of the schedule.
ASTRAI_TEST(schedule_with_several_sections) {
  Rng rng;
  Options options;
  options.causal = true;
  run_case<__nv_bfloat16>(rng, {5, 200, 8000, 6, 6, 128}, options);
}

ASTRAI_TEST(many_batches) {
  Rng rng;
  Options options;
  options.causal = true;
  run_case<__nv_bfloat16>(rng, {8300, 2, 3, 2, 2, 64}, options);
  run_case<__nv_bfloat16>(rng, {70000, 1, 2, 2, 1, 64}, options);
}

ASTRAI_TEST(scale_of_any_sign) {
  Rng rng;
  for (const double scale : {-0.2, 1e-30, 0.9}) {
    for (const int shift : {0, 1}) {
      Options options;
      options.scale = scale;
      options.shift = shift;
      options.causal = true;
      run_both(rng, {2, 100, 150, 8, 2, 128}, options);
    }
  }
}

ASTRAI_TEST(random_shapes) {
  Rng rng;
  for (int n = 0; n < 80; ++n) {
    Options options;
    options.mask = rng.pick(kMasks);
    options.mask_rows_aligned = rng.coin();
    options.layout = rng.pick(kLayouts);
    options.lse = rng.coin();
    options.causal = rng.coin();
    options.shift = rng.integer(0, 7) == 0 ? 1 : 0;
    options.tile_rows = options.shift == 0 ? rng.pick(kTileRows) : 0;
    const int kv_heads = static_cast<int>(rng.integer(1, 4));
    const int group = static_cast<int>(rng.integer(1, 9));
    run_both(
        rng,
        {static_cast<int>(rng.integer(1, 3)), static_cast<int>(rng.integer(1, 200)),
         static_cast<int>(rng.integer(0, 400)), kv_heads * group, kv_heads, rng.pick(kHeadDims)},
        options);
  }
}

}  // namespace
}  // namespace astrai::attention
