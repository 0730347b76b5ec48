// launch_prefill against an fp64 reference, feature by feature. Needs a GPU.
#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "tests/kernels/attention/prefill_run.h"
#include "tests/kernels/attention/random_problem.h"

namespace astrai::attention {
namespace {

const std::vector<int> kTileRows = {0, kPrefillSmallRows, kPrefillLargeRows};
const std::vector<MapKind> kMaps = {MapKind::kNone, MapKind::kHost, MapKind::kOnDevice};

// `p` over each of the sources, dense, packed and paged, each time with one of both types of q.
void run_sources(Rng& rng, Problem p, PrefillRun run = {}) {
  const bool equal = std::adjacent_find(p.q_lens.begin(), p.q_lens.end(),
                                        std::not_equal_to<int>()) == p.q_lens.end() &&
                     std::adjacent_find(p.kv_lens.begin(), p.kv_lens.end(),
                                        std::not_equal_to<int>()) == p.kv_lens.end();
  if (equal && p.page_size == 0) run_prefill_any(rng, p, run);
  p.packed_q = p.packed_kv = true;
  run.map = rng.pick(kMaps);
  if (p.page_size == 0) run_prefill_any(rng, p, run);
  if (p.page_size == 0) p.page_size = 1 << rng.integer(0, 6);
  run_prefill_any(rng, p, run);
}

// cases.md C8: causal is aligned to the bottom right, also where the first rows see no key.
ASTRAI_TEST(case_c8_causal_pairs) {
  Rng rng;
  const std::vector<std::pair<int, int>> pairs = {{3, 128}, {128, 3},   {1, 1},     {5, 5},
                                                  {65, 64}, {200, 257}, {300, 100}, {129, 129}};
  for (const Dims& dims : kKernelDims) {
    for (const auto& [q_len, kv_len] : pairs) {
      Problem p = with_dims(dims);
      p.q_heads = 4;
      p.q_lens = {q_len, q_len};
      p.kv_lens = {kv_len, kv_len};
      p.causal = true;
      run_sources(rng, p, {rng.pick(kTileRows)});
      p.causal = false;
      run_sources(rng, p, {rng.pick(kTileRows)});
    }
  }
}

ASTRAI_TEST(every_tile_over_every_source) {
  Rng rng;
  for (const Dims& dims : kKernelDims) {
    for (const int tile_rows : {kPrefillSmallRows, kPrefillLargeRows}) {
      Problem p = with_dims(dims);
      p.q_lens = {70, 70};
      p.kv_lens = {231, 231};
      p.causal = rng.coin();
      run_sources(rng, p, {tile_rows});
    }
  }
}

ASTRAI_TEST(every_group_size) {
  Rng rng;
  for (const Dims& dims : kKernelDims) {
    for (const int group : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 33, 64}) {
      Problem p = with_dims(dims);
      p.kv_heads = group > 8 ? 1 : 2;
      p.q_heads = group * p.kv_heads;
      p.q_lens = {45, 45};
      p.kv_lens = {133, 133};
      p.causal = rng.coin();
      run_sources(rng, p, {rng.pick(kTileRows)});
    }
  }
}

// cases.md C9: head dims that are no kernel's own are padded inside.
ASTRAI_TEST(case_c9_every_head_dim) {
  Rng rng;
  for (int dim = 8; dim <= 256; dim += 8) {
    Problem p;
    p.head_dim = dim;
    p.q_lens = {20, 33};
    p.kv_lens = {70, 33};
    p.causal = true;
    p.fp8 = rng.coin();
    run_sources(rng, p, {rng.pick(kTileRows)});
    p.fp8 = !p.fp8;
    run_sources(rng, p, {rng.pick(kTileRows)});
  }
}

ASTRAI_TEST(e4m3_keys_and_values) {
  Rng rng;
  for (const Dims& dims : kKernelDims) {
    for (const bool pointers : {false, true}) {
      Problem p = with_dims(dims);
      p.fp8 = true;
      p.q_lens = {40, 40};
      p.kv_lens = {190, 190};
      p.k_scale = 0.7f;
      p.v_scale = 1.6f;
      p.scale_pointers = pointers;
      p.scale = rng.coin() ? -0.1 : 0.0;
      run_sources(rng, p);
      run_sources(rng, p, {0, 2});
    }
  }
}

ASTRAI_TEST(masks_of_every_rank_combine_with_causal) {
  Rng rng;
  for (const Dims& dims : kKernelDims) {
    for (const MaskKind mask : kMasks) {
      Problem p = with_dims(dims);
      p.q_heads = 6;
      p.mask = mask;
      p.mask_short = rng.coin() ? 0 : static_cast<int>(rng.integer(0, 3));
      p.q_lens = std::vector<int>(2, static_cast<int>(rng.integer(1, 150)));
      p.kv_lens = std::vector<int>(2, static_cast<int>(rng.integer(1, 300)));
      p.causal = rng.coin();
      run_sources(rng, p, {rng.pick(kTileRows), rng.coin() ? 3 : 0});
    }
  }
}

ASTRAI_TEST(windows_hide_keys_on_both_sides) {
  Rng rng;
  for (const int left : {-1, 0, 5, 40, 1000}) {
    for (const int right : {-1, 0, 2, 70}) {
      Problem p;
      p.head_dim = rng.pick(std::vector<int>{64, 128, 256});
      p.q_heads = 4;
      p.window_left = left;
      p.window_right = right;
      p.q_lens = {64, 1, 133, 90};
      p.kv_lens = {100, 222, 500, 20};
      run_sources(rng, p, {rng.pick(kTileRows)});
      run_sources(rng, p, {0, 4});
    }
  }
}

ASTRAI_TEST(softcap_and_sinks) {
  Rng rng;
  for (const float softcap : {0.0f, 1.5f, 30.0f}) {
    for (const bool sinks : {false, true}) {
      Problem p;
      p.softcap = softcap;
      p.sinks = sinks;
      p.q_magnitude = 4.0;
      p.q_lens = {30, 22};
      p.kv_lens = {130, 0};
      for (const int shift : {0, 1}) {
        p.shift = shift;
        run_sources(rng, p);
      }
      p.shift = 0;
      run_sources(rng, p, {0, 3});
    }
  }
}

// cases.md C11: groups that are no power of two.
ASTRAI_TEST(case_c11_sinks_are_those_of_the_query_head) {
  Rng rng;
  for (const int group : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16}) {
    Problem p;
    p.kv_heads = 3;
    p.q_heads = group * 3;
    p.q_lens = {21};
    p.kv_lens = {20};
    p.sinks = true;
    p.lse = rng.coin();
    run_sources(rng, p);
  }
}

// cases.md D1, D2: strides are those of every call; K and V may be parts of one tensor.
ASTRAI_TEST(case_d2_strided_and_interleaved_views) {
  Rng rng;
  for (const Layout layout : kLayouts) {
    for (const int tile_rows : kTileRows) {
      Problem p;
      p.head_dim = rng.coin() ? 64 : 128;
      p.kv_heads = 4;
      p.layout = layout;
      p.q_lens = {70, 70};
      p.kv_lens = {190, 190};
      p.causal = true;
      run_sources(rng, p, {tile_rows});
    }
  }
}

// Rows that are not 16-byte aligned take the scalar kernel, with every feature.
ASTRAI_TEST(misaligned_rows_give_the_right_result) {
  Rng rng;
  for (const int shift : {1, 3, 4}) {
    for (const bool fp8 : {false, true}) {
      Problem p;
      p.head_dim = rng.pick(std::vector<int>{64, 72, 256});
      p.fp8 = fp8;
      p.k_scale = 0.5f;
      p.shift = shift;
      p.mask = rng.pick(kMasks);
      p.layout = rng.pick(kLayouts);
      p.q_heads = 6;
      p.q_lens = {37, 80};
      p.kv_lens = {90, 85};
      p.window_left = 40;
      p.sinks = true;
      run_sources(rng, p);
      p.packed_q = p.packed_kv = true;
      p.page_size = 4;
      p.holes = 0.1;
      p.append = true;
      run_prefill_both(rng, p);
    }
  }
}

// cases.md C5: requests without keys, between others, and without queries.
ASTRAI_TEST(case_c5_requests_without_keys_or_queries) {
  Rng rng;
  for (const Dims& dims : kKernelDims) {
    for (const bool sinks : {false, true}) {
      Problem p = with_dims(dims);
      p.kv_lens = {5, 0, 7, 90};
      p.q_lens = {70, 66, 1, 0};
      p.sinks = sinks;
      run_sources(rng, p, {rng.pick(kTileRows)});
      run_sources(rng, p, {0, 2});
      p.shift = 1;
      run_sources(rng, p);
    }
  }
  Problem none;
  none.kv_lens = {0, 0};
  none.q_lens = {70, 70};
  run_sources(rng, none);
}

// cases.md C3: exactly these lengths.
ASTRAI_TEST(case_c3_single_queries_among_none) {
  Rng rng;
  Problem p;
  p.q_heads = 9;
  p.kv_heads = 3;
  p.q_lens = {0, 1, 0, 1};
  p.kv_lens = {0, 3, 0, 5};
  p.causal = true;
  run_sources(rng, p);
}

// cases.md C6: chunks whose lengths are no multiple of anything.
ASTRAI_TEST(case_c6_ragged_chunks) {
  Rng rng;
  Problem p;
  p.q_heads = p.kv_heads = 2;
  p.q_lens = {127, 129, 3, 64};
  p.kv_lens = {127, 129, 3, 64};
  p.causal = true;
  p.softcap = 20.0f;
  run_sources(rng, p, {kPrefillLargeRows});
  run_sources(rng, p, {kPrefillSmallRows, 2});
}

// More splits than tiles, as many, and fewer; whole rows without keys in some of them.
ASTRAI_TEST(splits_equal_the_whole) {
  Rng rng;
  for (const Dims& dims : kKernelDims) {
    for (const int splits : {2, 3, 7, kMostPrefillSplits}) {
      Problem p = with_dims(dims);
      p.q_heads = 2 * static_cast<int>(rng.integer(1, 9));
      p.q_lens = {20, 20};
      p.kv_lens = std::vector<int>(2, static_cast<int>(rng.integer(1, 1500)));
      p.causal = rng.coin();
      p.sinks = rng.coin();
      p.mask = rng.pick(kMasks);
      p.fp8 = rng.integer(0, 3) == 0;
      run_sources(rng, p, {rng.pick(kTileRows), splits});
    }
  }
}

// What launch_decode hands over: as many as 16 queries a request that come with their keys.
ASTRAI_TEST(new_tokens_are_put_and_seen) {
  Rng rng;
  for (const bool fp8 : {false, true}) {
    for (const int window_left : {-1, 0, 3}) {
      for (const int splits : {0, 3}) {
        Problem p;
        p.q_heads = 16;
        p.head_dim = rng.pick(std::vector<int>{64, 80, 128});
        p.page_size = 1 << rng.integer(0, 5);
        p.q_lens = {4, 1, 16, 9};
        p.packed_q = p.packed_kv = true;
        p.kv_lens = {640, 1290, 16, 4};  // the last has more queries than keys
        p.append = true;
        p.causal = rng.coin();
        p.window_left = window_left;
        p.fp8 = fp8;
        p.k_scale = 0.4f;
        p.v_scale = 1.9f;
        run_prefill_both(rng, p, {0, splits, rng.pick(kMaps)});
      }
    }
  }
  // Many of them are put by a launch of their own.
  Problem many;
  many.page_size = 16;
  many.q_lens = {70, 17};
  many.kv_lens = {100, 17};
  many.packed_q = many.packed_kv = many.append = many.causal = true;
  run_prefill_both(rng, many);
}

// launch_decode with more rows than its own kernel takes, with queries packed and not.
ASTRAI_TEST(decode_with_many_rows) {
  Rng rng;
  for (const bool packed : {false, true}) {
    for (const bool deterministic : {false, true}) {
      Problem p;
      p.q_heads = 16;
      p.q_lens = packed ? std::vector<int>{5, 0, 16} : std::vector<int>{8, 8, 8};
      p.kv_lens = {1000, 30, 2100};
      p.packed_q = packed;
      p.packed_kv = true;
      p.page_size = rng.coin() ? 16 : 0;
      p.append = p.page_size > 0;
      p.causal = true;
      const Context context(describe(p) + (deterministic ? ", deterministic" : ""));
      AttentionProblem<__nv_bfloat16> test(rng, p);
      test.run([&](AttentionParams a) {
        a.deterministic = deterministic;
        DeviceInfo device;
        REQUIRE_CUDA(current_device_info(&device));
        DeviceBuffer<uint8_t> workspace(decode_workspace_bytes(a, device.sm_count));
        EXPECT_EQ(workspace.size() > 0, choose_variant(a) == Variant::kMma);
        const cudaError_t error =
            launch_decode(a, workspace.data(), workspace.size(), cudaStream_t{nullptr});
        REQUIRE_CUDA(cudaDeviceSynchronize());
        return error;
      });
      test.check(rng);
    }
  }
}

ASTRAI_TEST(long_sequences) {
  Rng rng;
  for (const Dims& dims : kKernelDims) {
    for (const bool causal : {false, true}) {
      Problem p = with_dims(dims);
      p.causal = causal;
      p.q_heads = 32;
      p.kv_heads = 8;
      p.q_lens = {1024};
      p.kv_lens = {1024};
      run_sources(rng, p);
      p.q_heads = 8;
      p.kv_heads = 2;
      p.q_lens = {513, 513, 513};
      p.kv_lens = {2000, 2000, 2000};
      run_sources(rng, p);
      p.q_lens = {16};
      p.kv_lens = {8192};
      run_sources(rng, p);
    }
  }
}

// cases.md C4 (forward): exactly these lengths.
ASTRAI_TEST(case_c4_long_ragged_batch_with_empty_requests) {
  Rng rng;
  Problem p;
  p.q_heads = p.kv_heads = 2;
  p.head_dim = 256;
  p.q_lens = {0, 1208, 840, 0};
  p.kv_lens = {2538, 1742, 840, 3072};
  run_sources(rng, p);
  p.causal = true;
  run_sources(rng, p);
}

// More (request, kv head) pairs than share one section of the schedule.
ASTRAI_TEST(schedule_with_several_sections) {
  Rng rng;
  Problem p;
  p.q_heads = p.kv_heads = 6;
  p.head_dim = 128;
  p.q_lens = std::vector<int>(5, 200);
  p.kv_lens = std::vector<int>(5, 8000);
  p.causal = true;
  run_prefill<__nv_bfloat16>(rng, p);
}

// cases.md D5 (forward): more pairs than fit 16 bits.
ASTRAI_TEST(case_d5_many_requests) {
  Rng rng;
  Problem p;
  p.q_heads = p.kv_heads = 2;
  p.q_lens = std::vector<int>(8300, 2);
  p.kv_lens = std::vector<int>(8300, 3);
  p.causal = true;
  run_prefill<__nv_bfloat16>(rng, p);
  p.packed_q = p.packed_kv = true;
  run_prefill<__nv_bfloat16>(rng, p);
}

ASTRAI_TEST(scale_of_any_sign) {
  Rng rng;
  for (const double scale : {-0.2, 1e-30, 0.9, 1e-44}) {
    for (const int shift : {0, 1}) {
      Problem p;
      p.head_dim = 128;
      p.scale = scale;
      p.shift = shift;
      p.causal = true;
      p.q_lens = {100, 100};
      p.kv_lens = {150, 150};
      run_sources(rng, p);
    }
  }
}

Problem random_problem(Rng& rng, int most_q, int most_kv) {
  Problem p;
  draw_head_dims(rng, &p);
  p.kv_heads = random_int(rng, 1, 3);
  p.q_heads = p.kv_heads * random_int(rng, 1, rng.coin() ? 4 : 12);
  const int batch = random_int(rng, 1, 4);
  draw_lengths(rng, &p, batch, most_q, most_kv);
  draw_features(rng, &p);
  return p;
}

PrefillRun random_run(Rng& rng, const Problem& p) {
  PrefillRun run;
  run.map = rng.pick(kMaps);
  run.deterministic = rng.integer(0, 5) == 0;
  run.workspace = run.deterministic || rng.coin();
  if (p.shift == 0 && !run.deterministic && rng.coin()) {
    run.tile_rows = rng.pick(kTileRows);
    run.splits = static_cast<int>(rng.integer(0, 6));
  }
  return run;
}

ASTRAI_TEST(random_problems) {
  Rng rng;
  for (int n = 0; n < 120; ++n) {
    const Problem p = random_problem(rng, 200, 500);
    run_prefill_both(rng, p, random_run(rng, p));
  }
}

ASTRAI_TEST(small_random_problems) {
  Rng rng;
  for (int n = 0; n < 100; ++n) {
    const Problem p = random_problem(rng, rng.coin() ? 8 : 70, rng.coin() ? 40 : 700);
    if (rng.coin()) {
      run_prefill<__nv_bfloat16>(rng, p, random_run(rng, p));
    } else {
      run_prefill<__half>(rng, p, random_run(rng, p));
    }
  }
}

}  // namespace
}  // namespace astrai::attention
