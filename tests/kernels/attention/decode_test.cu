// launch_decode against an fp64 reference. Needs a GPU.
#include <vector>

#include "tests/kernels/attention/attention_case.h"

namespace astrai::attention {
namespace {

const std::vector<int> kHeadDims = {64, 128, 256};
const std::vector<MaskKind> kMasks = {MaskKind::kNone, MaskKind::kBatchKv, MaskKind::kBatchQKv,
                                      MaskKind::kBatchHeads1Kv, MaskKind::kFull};
const std::vector<Layout> kLayouts = {Layout::kContiguous, Layout::kHeadsFirst,
                                      Layout::kInterleaved, Layout::kPadded};

Options decode_options() {
  Options options;
  options.decode = true;
  return options;
}

ASTRAI_TEST(every_group_size) {
  Rng rng;
  for (const int head_dim : kHeadDims) {
    for (const int group : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 33, 64}) {
      const int kv_heads = group > 16 ? 1 : 2;
      run_both(rng, {2, 1, 333, group * kv_heads, kv_heads, head_dim}, decode_options());
    }
  }
}

ASTRAI_TEST(every_length_near_tile_edges) {
  Rng rng;
  for (const int head_dim : kHeadDims) {
    for (const int kv_len :
         {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 193, 1000}) {
      run_both(rng, {2, 1, kv_len, 8, 2, head_dim}, decode_options());
    }
  }
}

ASTRAI_TEST(masks_of_every_rank_combine_with_causal) {
  Rng rng;
  for (const int head_dim : kHeadDims) {
    for (const MaskKind mask : kMasks) {
      for (const bool aligned : {false, true}) {
        Options options = decode_options();
        options.mask = mask;
        options.mask_rows_aligned = aligned;
        options.causal = rng.coin();  // no effect on the last position
        run_both(rng, {3, 1, static_cast<int>(rng.integer(1, 700)), 12, 3, head_dim}, options);
      }
    }
  }
}

ASTRAI_TEST(strided_and_interleaved_views) {
  Rng rng;
  for (const int head_dim : kHeadDims) {
    for (const Layout layout : kLayouts) {
      Options options = decode_options();
      options.layout = layout;
      run_both(rng, {3, 1, 211, 8, 4, head_dim}, options);
    }
  }
}

// Rows that are not 16-byte aligned take the scalar kernel.
ASTRAI_TEST(misaligned_rows_give_the_right_result) {
  Rng rng;
  for (const int head_dim : kHeadDims) {
    for (const int shift : {1, 3, 4}) {
      Options options = decode_options();
      options.shift = shift;
      options.mask = MaskKind::kFull;
      options.layout = rng.pick(kLayouts);
      run_both(rng, {2, 1, 150, 6, 2, head_dim}, options);
    }
  }
}

// cases.md C13: more splits than key tiles leave empty partial results.
ASTRAI_TEST(case_c13_empty_splits_have_no_weight) {
  Rng rng;
  for (const int head_dim : kHeadDims) {
    for (const int kv_len : {1, 63, 64, 65, 1025}) {
      for (const int splits : {2, 3, 128, 200}) {
        Options options = decode_options();
        options.splits = splits;
        run_both(rng, {2, 1, kv_len, 8, 2, head_dim}, options);
        options.mask = MaskKind::kFull;
        run_both(rng, {2, 1, kv_len, 8, 2, head_dim}, options);
      }
    }
  }
}

ASTRAI_TEST(no_keys_give_zero_and_minus_infinity) {
  Rng rng;
  for (const int head_dim : kHeadDims) {
    run_both(rng, {3, 1, 0, 8, 2, head_dim}, decode_options());
    Options options = decode_options();
    options.splits = 4;
    run_both(rng, {3, 1, 0, 8, 2, head_dim}, options);
    options.shift = 1;
    options.splits = 0;
    run_both(rng, {3, 1, 0, 8, 2, head_dim}, options);
  }
}

ASTRAI_TEST(long_keys_with_planned_splits) {
  Rng rng;
  for (const int head_dim : kHeadDims) {
    run_both(rng, {1, 1, 5000, 8, 1, head_dim}, decode_options());
    run_both(rng, {1, 1, static_cast<int>(rng.integer(8000, 20000)), 4, 2, head_dim},
             decode_options());
    run_both(rng, {40, 1, 700, 16, 8, head_dim}, decode_options());
  }
}

// cases.md D5 (forward): more (batch, head) pairs than fit 16 bits.
ASTRAI_TEST(case_d5_many_batches) {
  Rng rng;
  Options options = decode_options();
  run_case<__nv_bfloat16>(rng, {8300, 1, 3, 16, 16, 64}, options);
  run_case<__nv_bfloat16>(rng, {70000, 1, 2, 2, 1, 64}, options);
}

ASTRAI_TEST(scale_of_any_sign) {
  Rng rng;
  for (const double scale : {-0.2, 1e-30, 0.9}) {
    for (const int shift : {0, 1}) {
      Options options = decode_options();
      options.scale = scale;
      options.shift = shift;
      options.mask = MaskKind::kBatchKv;
      run_both(rng, {2, 1, 300, 8, 2, 128}, options);
    }
  }
}

ASTRAI_TEST(random_shapes) {
  Rng rng;
  for (int n = 0; n < 60; ++n) {
    Options options = decode_options();
    options.mask = rng.pick(kMasks);
    options.mask_rows_aligned = rng.coin();
    options.layout = rng.pick(kLayouts);
    options.lse = rng.coin();
    options.causal = rng.coin();
    options.shift = rng.integer(0, 5) == 0 ? 1 : 0;
    options.splits = rng.coin() ? 0 : static_cast<int>(rng.integer(1, 20));
    if (options.shift != 0) options.splits = 0;
    const int kv_heads = static_cast<int>(rng.integer(1, 5));
    const int group = static_cast<int>(rng.integer(1, 20));
    run_both(rng,
             {static_cast<int>(rng.integer(1, 6)), 1, static_cast<int>(rng.integer(0, 900)),
              kv_heads * group, kv_heads, rng.pick(kHeadDims)},
             options);
  }
}

ASTRAI_TEST(too_little_workspace_means_fewer_splits) {
  Rng rng;
  const Shape shape = {1, 1, 4096, 8, 1, 128};
  DeviceInfo device;
  REQUIRE_CUDA(current_device_info(&device));
  DenseParams p;
  p.batch = 1;
  p.q_len = 1;
  p.kv_len = shape.kv_len;
  p.q_heads = shape.q_heads;
  p.kv_heads = shape.kv_heads;
  p.head_dim = shape.head_dim;
  p.scale = 0.1f;
  p.q = p.k = p.v = {nullptr, 0, shape.head_dim, shape.head_dim};
  p.out_head_stride = shape.head_dim;
  DeviceBuffer<__nv_bfloat16> q(random_normal<__nv_bfloat16>(rng, 8 * 128));
  DeviceBuffer<__nv_bfloat16> k(random_normal<__nv_bfloat16>(rng, 4096 * 128));
  DeviceBuffer<__nv_bfloat16> v(random_normal<__nv_bfloat16>(rng, 4096 * 128));
  p.q.data = q.data();
  p.k.data = k.data();
  p.v.data = v.data();
  std::vector<double> first;
  const size_t best = 1 << 20;
  for (const size_t bytes : {size_t{0}, size_t{5000}, size_t{20000}, best}) {
    DeviceBuffer<uint8_t> workspace(bytes);
    DeviceBuffer<__nv_bfloat16> out(8 * 128);
    p.out = out.data();
    REQUIRE_CUDA(launch_decode(p, bytes == 0 ? nullptr : workspace.data(), bytes, nullptr));
    REQUIRE_CUDA(cudaDeviceSynchronize());
    const std::vector<__nv_bfloat16> result = out.download();
    if (first.empty()) {
      for (const __nv_bfloat16 x : result) first.push_back(to_double(x));
    }
    EXPECT_CLOSE(result, first, 8e-3, 1e-2);
  }
}

}  // namespace
}  // namespace astrai::attention
