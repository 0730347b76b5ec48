// launch_rotary against an fp64 reference. Needs a GPU.
#include "kernels/rotary/rotary.h"

#include <vector>

#include "tests/kernels/rotary/rotary_case.h"

namespace astrai::rotary {
namespace {

const std::vector<Pairing> kPairings = {Pairing::kInterleaved, Pairing::kHalfSplit};
const std::vector<AngleSource> kSources = {AngleSource::kPerToken, AngleSource::kTable};

// Calls f(T{}, options) for both types, pairings and angle sources.
template <typename F>
void for_each_variant(F f) {
  for (const Pairing pairing : kPairings) {
    for (const AngleSource source : kSources) {
      Options options;
      options.pairing = pairing;
      options.source = source;
      f(__nv_bfloat16{}, options);
      f(__half{}, options);
    }
  }
}

template <typename T>
void run(Rng& rng, const Shape& shape, const Options& options) {
  const Context context(describe(shape, options));
  RotaryCase<T>(rng, shape, options).launch_and_check();
}

ASTRAI_TEST(matches_the_fp64_reference_of_common_models) {
  Rng rng;
  for_each_variant([&](auto type, Options options) {
    using T = decltype(type);
    for (const int head_dim : {64, 128, 256}) {
      run<T>(rng, {2, 33, 32, 8, head_dim, head_dim}, options);
      run<T>(rng, {1, 1, 32, 8, head_dim, head_dim}, options);
    }
    run<T>(rng, {1, 3000, 8, 2, 128, 128},
           options);  // enough tokens to take several heads a thread
    run<T>(rng, {1, 1100, 40, 40, 128, 128}, options);
  });
}

// Threads that own more heads than they keep in flight, some of q and some of k.
ASTRAI_TEST(large_calls_match_the_reference) {
  Rng rng;
  for (const Pairing pairing : kPairings) {
    for (const bool in_place : {false, true}) {
      Options options;
      options.pairing = pairing;
      options.in_place = in_place;
      run<__nv_bfloat16>(rng, {2, 2100, 16, 4, 128, 128}, options);
      run<__half>(rng, {2, 2100, 16, 4, 128, 128}, options);
    }
  }
}

ASTRAI_TEST(random_shapes_and_strides) {
  Rng rng;
  for_each_variant([&](auto type, Options options) {
    using T = decltype(type);
    for (int round = 0; round < 60; ++round) {
      Shape shape;
      shape.batch = static_cast<int>(rng.integer(1, 4));
      shape.tokens = rng.integer(1, 40);
      shape.q_heads = static_cast<int>(rng.integer(0, 12));
      shape.k_heads = static_cast<int>(rng.integer(shape.q_heads == 0 ? 1 : 0, 9));
      shape.head_dim = static_cast<int>(rng.coin() ? 8 * rng.integer(1, 34) : rng.integer(2, 260));
      shape.rotary_dim = rng.coin() ? shape.head_dim / 2 * 2
                                    : 2 * static_cast<int>(rng.integer(1, shape.head_dim / 2));
      options.in_place = rng.coin();
      options.positions_are_int64 = rng.coin();
      options.angle_shift = rng.pick(std::vector<int64_t>{0, 0, 1, 2, 4});
      auto layout = [&](int heads) {
        return random_layout(rng, shape, heads, rng.pick(std::vector<int64_t>{8, 8, 4, 2, 1}));
      };
      const Layout q_in = layout(shape.q_heads), q_out = layout(shape.q_heads);
      const Layout k_in = layout(shape.k_heads), k_out = layout(shape.k_heads);
      const Context context(describe(shape, options));
      RotaryCase<T>(rng, shape, options, q_in, q_out, k_in, k_out).launch_and_check();
    }
  });
}

ASTRAI_TEST(every_alignment_of_the_pointers) {
  Rng rng;
  for (const Pairing pairing : kPairings) {
    for (int64_t shift = 0; shift < 9; ++shift) {
      Options options;
      options.pairing = pairing;
      options.angle_shift = shift % 5;
      const Shape shape{1, 7, 3, 1, 64, 64};
      Layout q = dense_layout(shape, shape.q_heads), k = dense_layout(shape, shape.k_heads);
      const Layout q_out = q;
      q.shift = shift;
      k.shift = 8 - shift;
      const Context context(describe(shape, options) + " shift " + std::to_string(shift));
      RotaryCase<__nv_bfloat16>(rng, shape, options, q, q_out, k, k).launch_and_check();
    }
  }
}

ASTRAI_TEST(case_d04_slices_of_a_fused_qkv) {
  Rng rng;
  for_each_variant([&](auto type, Options options) {
    using T = decltype(type);
    const Shape shape{2, 19, 8, 2, 128, 128};
    // q, k and v of a token stand side by side; only the gaps' contents tell if v was touched.
    Layout q = dense_layout(shape, shape.q_heads);
    q.token_stride = (8 + 2 * 2) * 128;
    q.batch_stride = shape.tokens * q.token_stride;
    q.storage = shape.batch * q.batch_stride;
    Layout k = q;
    for (const bool in_place : {false, true}) {
      options.in_place = in_place;
      RotaryCase<T>(rng, shape, options, q, dense_layout(shape, 8), k, dense_layout(shape, 2))
          .launch_and_check();
    }
  });
}

ASTRAI_TEST(case_d03_strides_of_size_1_dimensions_are_ignored) {
  Rng rng;
  const Shape shape{1, 5, 1, 1, 64, 64};
  Layout odd = dense_layout(shape, 1);
  odd.head_stride = 7;
  odd.batch_stride = 3;
  RotaryCase<__nv_bfloat16>(rng, shape, {}, odd, odd, odd, odd).launch_and_check();
}

ASTRAI_TEST(case_d13_one_kv_head) {
  Rng rng;
  for_each_variant([&](auto type, Options options) {
    using T = decltype(type);
    run<T>(rng, {2, 9, 32, 1, 128, 128}, options);
    run<T>(rng, {1, 1, 1, 1, 128, 128}, options);
    run<T>(rng, {1, 4000, 1, 1, 64, 64}, options);
    run<T>(rng, {1, 17, 0, 1, 128, 128}, options);  // k alone
  });
}

ASTRAI_TEST(case_d15_partial_rotary_dim_passes_the_tail_through) {
  Rng rng;
  for_each_variant([&](auto type, Options options) {
    using T = decltype(type);
    for (const int rotary_dim : {2, 6, 12, 20, 32, 64, 96, 126, 128}) {
      for (const bool in_place : {false, true}) {
        options.in_place = in_place;
        run<T>(rng, {2, 11, 6, 2, 128, rotary_dim}, options);
      }
    }
    run<T>(rng, {2, 11, 6, 2, 81, 20}, options);  // an odd head_dim has a tail of its own
  });
}

// The tail is copied as bits: NaN payloads, infinities and -0 arrive as they were.
ASTRAI_TEST(case_d15_tail_keeps_every_bit_pattern) {
  Rng rng;
  for (const Pairing pairing : kPairings) {
    Options options;
    options.pairing = pairing;
    const Shape shape{1, 64, 16, 0, 128, 64};
    RotaryCase<__nv_bfloat16> c(rng, shape, options);
    auto* bits = reinterpret_cast<uint16_t*>(c.host_q().data());
    uint16_t next = 0;
    for (size_t i = 0; i < c.host_q().size(); ++i) {
      if (i % 128 >= 64) bits[i] = next++;  // 64 tokens x 16 heads x 64 elements: all 65536
    }
    c.upload_q();
    c.launch_and_check();
  }
}

ASTRAI_TEST(case_d17_the_pairings_differ) {
  Rng rng;
  const Shape shape{1, 4, 2, 0, 64, 64};
  Options options;
  RotaryCase<__nv_bfloat16> c(rng, shape, options);
  c.launch_and_check();
  const auto interleaved = testing::bits_of(c.result_q());
  RotaryParams p = c.params();
  p.pairing = Pairing::kHalfSplit;
  REQUIRE_CUDA(launch_rotary(p, nullptr));
  EXPECT_TRUE(testing::bits_of(c.result_q()) != interleaved);
}

// RotaryCase compares the input after the launch; here q is in place and k is not.
ASTRAI_TEST(case_d17_only_what_is_in_place_changes) {
  Rng rng;
  const Shape shape{1, 21, 4, 2, 128, 96};
  RotaryCase<__half> c(rng, shape, {});
  c.launch_and_check();
  const auto expected_q = testing::bits_of(c.result_q());
  const auto expected_k = testing::bits_of(c.result_k());
  RotaryParams p = c.params();
  DeviceBuffer<__half> q(c.host_q());
  p.q.in = p.q.out = q.data();
  REQUIRE_CUDA(launch_rotary(p, nullptr));
  EXPECT_TRUE(testing::bits_of(q.download()) == expected_q);
  EXPECT_TRUE(testing::bits_of(c.result_k()) == expected_k);
}

ASTRAI_TEST(an_angle_of_zero_returns_the_input) {
  Rng rng;
  const Shape shape{1, 8, 4, 0, 128, 128};
  RotaryCase<__nv_bfloat16> c(rng, shape, {});
  std::vector<float> identity(8 * 128);
  for (size_t i = 0; i < identity.size(); i += 2) identity[i] = 1.0f;
  const DeviceBuffer<float> angles(identity);
  RotaryParams p = c.params();
  p.angles = angles.data();
  REQUIRE_CUDA(launch_rotary(p, nullptr));
  const std::vector<__nv_bfloat16> result = c.result_q();
  size_t wrong = 0;
  for (size_t i = 0; i < result.size(); ++i) {
    wrong += testing::to_double(result[i]) != testing::to_double(c.host_q()[i]);
  }
  EXPECT_EQ(wrong, size_t{0});
}

ASTRAI_TEST(two_launches_agree_bit_for_bit) {
  Rng rng;
  RotaryCase<__nv_bfloat16> c(rng, {2, 700, 32, 8, 128, 128}, {});
  c.launch();
  const auto first = testing::bits_of(c.result_q());
  c.launch();
  EXPECT_TRUE(testing::bits_of(c.result_q()) == first);
}

}  // namespace
}  // namespace astrai::rotary
