// launch_quantize against a definition by search over all codes, in fp64.
#include "kernels/fp8/quantize.h"

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/fp8/convert.cuh"
#include "kernels/fp8/formats.h"
#include "kernels/fp8/quantize_plan.h"
#include "tests/kernels/testing/compare.h"
#include "tests/kernels/testing/device_buffer.h"

namespace astrai::fp8 {
namespace {

using testing::DeviceBuffer;
using testing::Rng;

double value_of(DType format, int code) {
  const int mantissa_bits = format == DType::kE4M3 ? 3 : 2, bias = format == DType::kE4M3 ? 7 : 15;
  const int mantissa = code & ((1 << mantissa_bits) - 1), exponent = (code & 0x7f) >> mantissa_bits;
  const double m = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  return std::ldexp(m, std::max(exponent, 1) - bias - mantissa_bits) * (code & 0x80 ? -1 : 1);
}

// -1 stands for NaN of either sign.
int expected_code(DType format, float x) {
  if (std::isnan(x)) return -1;
  const int last = format == DType::kE4M3 ? 0x7e : 0x7b;
  const int sign = std::signbit(x) ? 0x80 : 0;
  const double magnitude = std::abs(static_cast<double>(x));
  if (magnitude >= value_of(format, last)) return sign | last;
  int low = 0, high = last;  // the last code that is not above
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (value_of(format, middle) <= magnitude) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const double below = magnitude - value_of(format, low);
  const double above = value_of(format, low + 1) - magnitude;
  return sign | (above < below || (above == below && low % 2 == 1) ? low + 1 : low);
}

bool is_code(DType format, uint8_t got, int expected) {
  if (expected >= 0) return got == expected;
  return format == DType::kE4M3 ? (got & 0x7f) == 0x7f : (got & 0x7f) > 0x7c;
}

struct Shape {
  int64_t batch, rows, columns;
};

// Runs one call in dual layout over a padded input and checks codes, steps and amax.
template <typename T>
void run(Rng& rng, Shape s, DType format, Scaling scaling, bool column_major, int special) {
  const testing::Context context(testing::show(s.batch) + "x" + testing::show(s.rows) + "x" +
                                 testing::show(s.columns) + " scaling " +
                                 testing::show(static_cast<int>(scaling)) + " special " +
                                 testing::show(special));
  const int64_t pad = rng.pick(std::vector<int64_t>{0, 1, 8});
  QuantizeParams p;
  p.in_type = sizeof(T) == 4                          ? DType::kFP32
              : std::is_same<T, __nv_bfloat16>::value ? DType::kBF16
                                                      : DType::kFP16;
  p.out_type = format;
  p.batch = s.batch;
  p.rows = s.rows;
  p.columns = s.columns;
  p.column_stride = column_major ? s.rows + pad : 1;
  p.row_stride = column_major ? 1 : s.columns + pad;
  p.batch_stride = column_major ? s.columns * p.column_stride : s.rows * p.row_stride;
  const int64_t count = s.batch * s.rows * s.columns;
  std::vector<T> host = testing::random_normal<T>(rng, s.batch * p.batch_stride + 8, 3.0);
  auto at = [&](int64_t i) {
    const int64_t b = i / (s.rows * s.columns), r = i / s.columns % s.rows, c = i % s.columns;
    return b * p.batch_stride + r * p.row_stride + c * p.column_stride;
  };
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  if (special >= 1) host[at(rng.integer(0, count - 1))] = testing::from_double<T>(inf);
  if (special >= 2) host[at(rng.integer(0, count - 1))] = testing::from_double<T>(nan);
  const DeviceBuffer<T> x(host);
  DeviceBuffer<uint8_t> out(count), turned(count);
  const int64_t column_blocks = (s.columns + 127) / 128, row_blocks = (s.rows + 127) / 128;
  const int64_t steps = scaling == Scaling::kDynamic      ? 1
                        : scaling == Scaling::kRowwise    ? s.batch * s.rows
                        : scaling == Scaling::kBlock1x128 ? s.batch * s.rows * column_blocks
                                                          : s.batch * row_blocks * column_blocks;
  DeviceBuffer<float> step(steps), amax(1), finite(1);
  const float given = 7.3f;
  const DeviceBuffer<float> scale(std::vector<float>{given});
  const bool is_given = scaling == Scaling::kMultiplier || scaling == Scaling::kStep;
  p.x = x.data();
  p.out = out.data();
  p.out_transposed = special == 0 && rng.coin() ? nullptr : turned.data();
  p.scaling = scaling;
  p.scale = is_given ? scale.data() : nullptr;
  p.step = is_given ? nullptr : step.data();
  p.amax = amax.data();
  p.finite_amax = finite.data();
  REQUIRE_CUDA(launch_quantize(p, nullptr));
  REQUIRE_CUDA(cudaDeviceSynchronize());

  auto block_of = [&](int64_t i) -> int64_t {
    const int64_t br = i / s.columns, b = br / s.rows, r = br % s.rows, c = i % s.columns;
    if (scaling == Scaling::kRowwise) return br;
    if (scaling == Scaling::kBlock1x128) return br * column_blocks + c / 128;
    if (scaling == Scaling::kBlock128x128) {
      return (b * row_blocks + r / 128) * column_blocks + c / 128;
    }
    return 0;
  };
  std::vector<float> largest(steps, 0.0f);
  float all = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float v = std::abs(static_cast<float>(host[at(i)]));
    if (std::isnan(v) || v > all) all = v;
    if (!is_given && std::isfinite(v)) largest[block_of(i)] = std::max(largest[block_of(i)], v);
  }
  const float got_amax = amax.download()[0];
  EXPECT_TRUE(got_amax == all || (std::isnan(got_amax) && std::isnan(all)));
  if (!is_given) {
    const std::vector<float> got = step.download();
    size_t wrong = 0;
    for (int64_t i = 0; i < steps; ++i) {
      wrong +=
          got[i] != std::max(largest[i] / (format == DType::kE4M3 ? 448.0f : 57344.0f), 1e-12f);
    }
    EXPECT_EQ(wrong, size_t{0});
  }
  const std::vector<uint8_t> codes = out.download(), columns = turned.download();
  const std::vector<float> got_step = step.download();
  size_t wrong = 0, wrong_turned = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float multiplier = scaling == Scaling::kMultiplier ? given
                             : scaling == Scaling::kStep     ? 1.0f / given
                                                             : 1.0f / got_step[block_of(i)];
    const int expected = expected_code(format, static_cast<float>(host[at(i)]) * multiplier);
    const int64_t j = i % s.columns * (s.batch * s.rows) + i / s.columns;
    wrong += !is_code(format, codes[i], expected);
    wrong_turned +=
        p.out_transposed != nullptr ? !is_code(format, columns[j], expected) : columns[j] != 0xff;
  }
  EXPECT_EQ(wrong, size_t{0});
  EXPECT_EQ(wrong_turned, size_t{0});
}

ASTRAI_TEST(all_types_scalings_and_layouts) {
  Rng rng;
  for (const Scaling scaling : {Scaling::kMultiplier, Scaling::kStep, Scaling::kDynamic,
                                Scaling::kRowwise, Scaling::kBlock1x128, Scaling::kBlock128x128}) {
    for (const DType format : {DType::kE4M3, DType::kE5M2}) {
      const Shape small{rng.integer(1, 3), rng.integer(1, 40), rng.integer(1, 70)};
      for (int special = 0; special < 3; ++special) {
        run<__nv_bfloat16>(rng, small, format, scaling, rng.coin(), special);
        run<__half>(rng, small, format, scaling, rng.coin(), special);
        run<float>(rng, small, format, scaling, rng.coin(), special);
      }
      run<__nv_bfloat16>(rng, {2, 144, 272}, format, scaling, false, 1);
    }
  }
}

ASTRAI_TEST(ring_folds_once_and_ignores_what_is_not_finite) {
  for (const float bad : {0.0f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    std::vector<float> host(20000, 1.5f);
    host[17] = -89.6f;
    if (!(bad == 0.0f)) host[19999] = bad;
    const DeviceBuffer<float> x(host), scale(std::vector<float>{2.0f});
    DeviceBuffer<uint8_t> out(host.size());
    DeviceBuffer<float> ring(std::vector<float>{1.0f, 5.0f, 2.0f, 0.25f, 0.0f, 0.0f, 0.0f});
    QuantizeParams p;
    p.in_type = DType::kFP32;
    p.x = x.data();
    p.rows = 1;
    p.columns = static_cast<int64_t>(host.size());
    p.out = out.data();
    p.scale = scale.data();
    p.ring.state = ring.data();
    p.ring.history = 3;
    p.ring.index = 1;
    REQUIRE_CUDA(launch_quantize(p, nullptr));
    const std::vector<float> got = ring.download();
    const bool good = bad == 0.0f;
    EXPECT_EQ(got[1], good ? 89.6f : 5.0f);
    EXPECT_EQ(got[3], good ? 89.6f / 448.0f : 0.25f);
    EXPECT_EQ(got[4], good ? 0.0f : 1.0f);
    EXPECT_EQ(got[5], 0.0f);
    EXPECT_EQ(testing::show(got[6]), std::string("0"));
  }
}

ASTRAI_TEST(nothing_is_launched_for_empty_tensors) {
  DeviceBuffer<float> amax(1);
  QuantizeParams p;
  p.amax = amax.data();
  p.columns = 8;
  REQUIRE_CUDA(launch_quantize(p, nullptr));
  EXPECT_EQ(amax.download()[0], 0.0f);
  p.rows = 1;  // elements, but no x
  EXPECT_EQ(launch_quantize(p, nullptr), cudaErrorInvalidValue);
}

ASTRAI_TEST(host_conversion_agrees_at_boundaries_and_codes) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) < 0x7c) {
      EXPECT_EQ(int{float_to_e5m2(static_cast<float>(value_of(DType::kE5M2, code)))}, code);
    }
  }
  for (const float x : {448.0f, 464.0f, 465.0f, 57344.0f, 61440.0f, 1e-38f, 1e-45f, 0x1p-17f,
                        0x1.8p-16f, 0.0f, -0.0f}) {
    EXPECT_EQ(int{float_to_e5m2(x)}, expected_code(DType::kE5M2, x));
    EXPECT_EQ(int{float_to_e4m3(x)}, expected_code(DType::kE4M3, x));
  }
}

ASTRAI_TEST(steps_of_tiny_amax_have_a_finite_reciprocal) {
  for (const float amax : {0.0f, 1e-45f, 1e-38f}) {
    EXPECT_EQ(step_of(amax, kE4M3Max), kMinStep);
    EXPECT_TRUE(is_finite(multiplier_of(step_of(amax, kE5M2Max))));
  }
  EXPECT_TRUE(!is_finite(std::numeric_limits<float>::infinity()) && !is_finite(std::nanf("")));
}

ASTRAI_TEST(case_d05_offsets_past_2_to_31_elements) {
  const int64_t stride = (int64_t{1} << 31) + 64;
  if (testing::free_device_bytes() < stride * 2 + (size_t{1} << 28)) {
    SKIP_CASE("needs 5 GB of device memory");
  }
  DeviceBuffer<__nv_bfloat16> x(stride + 64);
  const std::vector<__nv_bfloat16> near(64, testing::from_double<__nv_bfloat16>(2.0));
  for (const int64_t at : {int64_t{0}, stride}) {
    REQUIRE_CUDA(cudaMemcpy(x.data() + at, near.data(), 128, cudaMemcpyHostToDevice));
  }
  DeviceBuffer<uint8_t> out(128);
  const DeviceBuffer<float> scale(std::vector<float>{0.5f});
  QuantizeParams p;
  p.x = x.data();
  p.rows = 2;
  p.columns = 64;
  p.row_stride = stride;
  p.out = out.data();
  p.scale = scale.data();
  REQUIRE_CUDA(launch_quantize(p, nullptr));
  EXPECT_TRUE(out.download() == std::vector<uint8_t>(128, 0x38));
}

// A warp that lays words into the tile, and a quarter of one that reads 16 bytes for each lane.
ASTRAI_TEST(transposition_meets_every_bank_once) {
  for (int warp = 0; warp < 8; ++warp) {
    for (int c = 0; c < 16; ++c) {
      uint32_t banks = 0;
      for (int lane = 0; lane < 32; ++lane) {
        const int column = lane % 8 * 16 + c, quad = warp * 4 + lane / 8;
        banks |= 1u << (transposed_word(column, quad) % 32);
      }
      EXPECT_EQ(banks, 0xffffffffu);
      for (int start = 0; start < 32; start += 8) {
        banks = 0;
        for (int lane = start; lane < start + 8; ++lane) {
          const int word = transposed_word(c * 8 + warp, 4 * (lane % 8));
          EXPECT_EQ(word % 4, 0);
          banks |= 0xfu << (word % 32);
        }
        EXPECT_EQ(banks, 0xffffffffu);
      }
    }
  }
}

}  // namespace
}  // namespace astrai::fp8
