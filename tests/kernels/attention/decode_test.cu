// launch_decode against an fp64 reference, feature by feature. Needs a GPU.
#include <vector>

#include "tests/kernels/attention/decode_run.h"
#include "tests/kernels/attention/random_problem.h"

namespace astrai::attention {
namespace {

ASTRAI_TEST(every_group_size) {
  Rng rng;
  for (const Dims& dims : kKernelDims) {
    for (int group = 1; group <= 16; ++group) {
      Problem p = with_dims(dims);
      p.kv_heads = group > 8 ? 1 : 2;
      p.q_heads = group * p.kv_heads;
      p.kv_lens = {static_cast<int>(rng.integer(100, 300))};
      run_decode_both(rng, p);
    }
  }
}

ASTRAI_TEST(every_head_dim) {
  Rng rng;
  for (int dim = 8; dim <= 256; dim += 8) {
    Problem p;
    p.head_dim = dim;
    p.kv_lens = {70, 33};
    p.packed_kv = true;
    p.fp8 = rng.coin();
    run_decode_both(rng, p);
    p.fp8 = !p.fp8;
    p.page_size = 8;
    run_decode_both(rng, p);
  }
}

ASTRAI_TEST(every_length_near_tile_edges) {
  Rng rng;
  for (const Dims& dims : kKernelDims) {
    Problem p = with_dims(dims);
    for (const int kv_len : {1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 191, 193, 400}) {
      p.kv_lens = {kv_len};
      p.fp8 = rng.coin();
      run_decode_both(rng, p);
    }
  }
}

ASTRAI_TEST(e4m3_keys_and_values) {
  Rng rng;
  for (const Dims& dims : kKernelDims) {
    for (const bool pointers : {false, true}) {
      Problem p = with_dims(dims);
      p.fp8 = true;
      p.kv_lens = {150, 77};
      p.packed_kv = true;
      p.page_size = pointers ? 16 : 0;
      p.k_scale = 0.7f;
      p.v_scale = 1.6f;
      p.scale_pointers = pointers;
      run_decode_both(rng, p);
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
      p.q_lens = std::vector<int>(2, static_cast<int>(rng.integer(1, 5)));
      p.kv_lens = std::vector<int>(2, static_cast<int>(rng.integer(1, 300)));
      p.causal = rng.coin();
      run_decode_both(rng, p);
    }
  }
}

ASTRAI_TEST(windows_hide_keys_on_both_sides) {
  Rng rng;
  for (const int left : {-1, 0, 5, 40, 1000}) {
    for (const int right : {-1, 0, 2}) {
      Problem p;
      p.q_heads = 4;
      p.window_left = left;
      p.window_right = right;
      p.q_lens = {4, 1, 7};
      p.packed_q = true;
      p.kv_lens = {100, 222, 5};
      p.packed_kv = true;
      p.page_size = rng.coin() ? 4 : 0;
      run_decode_both(rng, p);
      run_decode_both(rng, p, {false, 7, 1, true});
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
      p.q_lens = {2, 2};
      p.kv_lens = {130, 0};
      p.packed_kv = true;
      for (const int shift : {0, 1}) {
        p.shift = shift;
        run_decode_both(rng, p);
      }
      p.shift = 0;
      run_decode_both(rng, p, {false, 3, 1, true});
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
    p.kv_lens = {20};
    p.sinks = true;
    p.lse = rng.coin();
    run_decode_both(rng, p);
  }
}

ASTRAI_TEST(strided_and_interleaved_views) {
  Rng rng;
  for (const Layout layout : kLayouts) {
    for (const int page_size : {0, 16}) {
      Problem p;
      p.head_dim = rng.coin() ? 64 : 128;
      p.kv_heads = 4;
      p.layout = layout;
      p.page_size = page_size;
      p.kv_lens = {211, 211};
      p.q_lens = {2, 2};
      run_decode_both(rng, p);
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
      p.mask = MaskKind::kFull;
      p.layout = rng.pick(kLayouts);
      p.q_heads = 6;
      p.q_lens = {2, 1};
      p.packed_q = true;
      p.kv_lens = {60, 31};
      p.packed_kv = true;
      p.page_size = 4;
      p.holes = 0.1;
      p.append = true;
      p.window_left = 40;
      p.sinks = true;
      run_decode_both(rng, p);
    }
  }
}

// cases.md C5: zero-length keys, between others.
ASTRAI_TEST(case_c5_requests_without_keys_or_queries) {
  Rng rng;
  for (const Dims& dims : kKernelDims) {
    for (const bool sinks : {false, true}) {
      Problem p = with_dims(dims);
      p.kv_lens = {5, 0, 7};
      p.packed_kv = true;
      p.sinks = sinks;
      p.q_lens = {1, 1, 1};
      run_decode_both(rng, p);
      run_decode_both(rng, p, {true, 0, 1, true});
      p.q_lens = {2, 0, 1};
      p.packed_q = true;
      run_decode_both(rng, p);
      p.shift = 1;
      run_decode_both(rng, p);
    }
  }
  Problem none;
  none.kv_lens = {0, 0};
  none.q_lens = {1, 1};
  run_decode_both(rng, none);
  none.page_size = 16;
  run_decode_both(rng, none);
}

// cases.md C8: the diagonal is aligned to the bottom right; rows above it see nothing.
ASTRAI_TEST(case_c8_causal_with_any_lengths) {
  Rng rng;
  for (const Dims& lens : std::vector<Dims>{{3, 128}, {16, 3}, {1, 1}, {5, 5}, {8, 65}}) {
    for (const int shift : {0, 1}) {
      Problem p;
      p.q_heads = p.kv_heads = 2;
      p.q_lens = {lens.qk};
      p.kv_lens = {lens.v};
      p.causal = true;
      p.shift = shift;
      run_decode_both(rng, p);
    }
  }
}

// cases.md C13: more workers than units of keys.
ASTRAI_TEST(case_c13_more_workers_than_keys) {
  Rng rng;
  for (const Dims& dims : kKernelDims) {
    for (const int kv_len : {1, 63, 64, 65, 513}) {
      for (const int workers : {1, 2, 5, 128}) {
        Problem p = with_dims(dims);
        p.kv_lens = {kv_len, kv_len};
        p.q_lens = {1, 1};
        p.mask = rng.coin() ? MaskKind::kFull : MaskKind::kNone;
        run_decode<__nv_bfloat16>(rng, p, {false, workers, 1, true});
      }
    }
  }
}

// cases.md C15: split keys for every number of queries.
ASTRAI_TEST(case_c15_several_queries_equal_the_unsplit_result) {
  Rng rng;
  for (const int q_len : {2, 4, 8, 16}) {
    for (const int batch : {1, 2, 9}) {
      Problem p;
      p.kv_heads = 2;
      p.q_heads = 2 * std::max(1, 16 / q_len);
      p.q_lens = std::vector<int>(batch, q_len);
      p.packed_q = true;
      p.kv_lens.clear();
      for (int b = 0; b < batch; ++b) {
        p.kv_lens.push_back(static_cast<int>(rng.integer(q_len, batch == 1 ? 3000 : 700)));
      }
      p.packed_kv = true;
      p.page_size = 16;
      p.causal = true;
      p.append = true;
      run_decode_both(rng, p);
      run_decode_both(rng, p, {false, 5, 1, true});
      run_decode_both(rng, p, {false, 0, 1, false});
    }
  }
}

ASTRAI_TEST(too_little_workspace_means_fewer_splits) {
  Rng rng;
  Problem p;
  p.kv_lens = {3000, 200};
  p.q_lens = {1, 1};
  p.packed_kv = true;
  AttentionProblem<__half> test(rng, p);
  for (const size_t bytes : {size_t{0}, size_t{1000}, size_t{30000}, size_t{100000}}) {
    test.run([&](const AttentionParams& params) {
      DeviceBuffer<uint8_t> workspace(bytes);
      const cudaError_t error = launch_decode(params, bytes == 0 ? nullptr : workspace.data(),
                                              bytes, cudaStream_t{nullptr});
      REQUIRE_CUDA(cudaDeviceSynchronize());
      return error;
    });
    test.check(rng);
  }
  test.run([&](AttentionParams params) {
    if (choose_variant(params) == Variant::kScalar) return cudaSuccess;  // needs no workspace
    params.deterministic = true;
    DeviceBuffer<uint8_t> workspace(1000);
    EXPECT_EQ(launch_decode(params, workspace.data(), 1000, cudaStream_t{nullptr}),
              cudaErrorInvalidValue);
    return cudaSuccess;
  });
}

ASTRAI_TEST(scale_of_any_sign) {
  Rng rng;
  for (const double scale : {-0.2, 1e-30, 0.9}) {
    for (const int shift : {0, 1}) {
      Problem p;
      p.head_dim = 128;
      p.scale = scale;
      p.shift = shift;
      p.kv_lens = {300};
      p.fp8 = rng.coin();
      run_decode_both(rng, p);
    }
  }
}

// cases.md D5 (forward): more (request, head) pairs than fit 16 bits.
ASTRAI_TEST(case_d5_many_requests) {
  Rng rng;
  Problem p;
  p.q_heads = p.kv_heads = 16;
  p.kv_lens = std::vector<int>(5000, 3);
  p.q_lens = std::vector<int>(5000, 1);
  run_decode<__nv_bfloat16>(rng, p);
  p.q_heads = 2;
  p.kv_heads = 1;
  p.kv_lens.assign(3000, 0);
  for (int& length : p.kv_lens) length = static_cast<int>(rng.integer(0, 5));
  p.q_lens.assign(3000, 1);
  for (int& length : p.q_lens) length = static_cast<int>(rng.integer(0, 2));
  p.packed_q = p.packed_kv = true;
  run_decode<__nv_bfloat16>(rng, p);
}

// Clusters of blocks, with more and fewer workers than pairs.
ASTRAI_TEST(clusters_merge_their_blocks_and_each_other) {
  if (!device_has_clusters()) SKIP_CASE("needs sm_90 and code for it");
  Rng rng;
  for (const Dims& dims : kKernelDims) {
    for (const int cluster_blocks : {2, 4, 8, 16}) {
      for (const int workers : {1, 2, 5}) {
        Problem p = with_dims(dims);
        p.q_heads = 2 * static_cast<int>(rng.integer(1, 5));
        p.q_lens = {3, 2};
        p.packed_q = true;
        p.kv_lens = {static_cast<int>(rng.integer(300, 1500)),
                     static_cast<int>(rng.integer(2, 60))};
        p.packed_kv = true;
        p.page_size = rng.coin() ? 16 : 0;
        p.append = p.page_size > 0;
        p.fp8 = rng.coin();
        run_decode_both(rng, p, {false, workers, cluster_blocks, true});
      }
    }
  }
}

Problem random_problem(Rng& rng) {
  Problem p;
  draw_head_dims(rng, &p);
  p.kv_heads = random_int(rng, 1, 4);
  const int group = random_int(rng, 1, 16);
  p.q_heads = p.kv_heads * group;
  const int batch = random_int(rng, 1, 6);
  draw_lengths(rng, &p, batch, 16 / group, rng.pick(std::vector<int>{20, 130, 700}));
  draw_features(rng, &p);
  return p;
}

ASTRAI_TEST(random_problems) {
  Rng rng;
  const bool clusters = device_has_clusters();
  for (int n = 0; n < 150; ++n) {
    const Problem p = random_problem(rng);
    DecodeRun run;
    run.deterministic = rng.integer(0, 4) == 0;
    run.workspace = run.deterministic || rng.integer(0, 4) != 0;
    if (p.shift == 0 && !run.deterministic && rng.coin()) {
      run.workers = static_cast<int>(rng.integer(1, 40));
      if (clusters) run.cluster_blocks = 1 << rng.integer(0, 3);
    }
    if (rng.coin()) {
      run_decode<__nv_bfloat16>(rng, p, run);
    } else {
      run_decode<__half>(rng, p, run);
    }
  }
}

}  // namespace
}  // namespace astrai::attention
