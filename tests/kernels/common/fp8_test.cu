// Conversions of e4m3: all codes, and all places where rounding changes.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/common/fp8.cuh"
#include "kernels/common/launch.h"
#include "tests/kernels/testing/device_buffer.h"
#include "tests/kernels/testing/testing.h"

namespace astrai {
namespace {

using namespace astrai::testing;

// The definition: (-1)^s 2^(e - 7) (1 + m / 8), or (-1)^s 2^-6 m / 8 for e = 0.
double value_of(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

// Floats at, below and above each value and each middle between two values, and the extremes; with
// the codes that they round to.
struct Rounding {
  std::vector<float> x;
  std::vector<uint8_t> code;

  void add(float magnitude, int expected) {
    x.push_back(magnitude);
    code.push_back(static_cast<uint8_t>(expected));
    x.push_back(-magnitude);
    code.push_back(static_cast<uint8_t>(expected | 0x80));
  }
};

Rounding roundings() {
  const float inf = std::numeric_limits<float>::infinity();
  Rounding r;
  for (int code = 0; code < 0x7e; ++code) {
    const float low = static_cast<float>(value_of(code));
    const float high = static_cast<float>(value_of(code + 1));
    const float middle = (low + high) / 2;  // exact
    r.add(low, code);
    r.add(std::nextafter(low, inf), code);
    r.add(std::nextafter(middle, 0.0f), code);
    r.add(middle, code % 2 == 0 ? code : code + 1);
    r.add(std::nextafter(middle, inf), code + 1);
    r.add(std::nextafter(high, 0.0f), code + 1);
  }
  for (const float x : {448.0f, 449.0f, 463.99f, 464.0f, 480.0f, 1e30f, inf}) r.add(x, 0x7e);
  r.add(1e-45f, 0);
  return r;
}

ASTRAI_TEST(every_code_has_its_value) {
  for (int code = 0; code < 256; ++code) {
    const Context context("code " + std::to_string(code));
    EXPECT_TRUE(same(e4m3_to_float(static_cast<uint8_t>(code)), value_of(code)));
  }
}

ASTRAI_TEST(rounding_to_nearest_even_saturates) {
  const Rounding r = roundings();
  for (size_t i = 0; i < r.x.size(); ++i) {
    const Context context("x " + show(r.x[i]));
    EXPECT_EQ(int{float_to_e4m3(r.x[i])}, int{r.code[i]});
  }
  EXPECT_EQ(float_to_e4m3(std::nanf("")) & 0x7f, 0x7f);
}

// The path that the device takes, and the one by bits that devices below sm_89 take.
template <typename T>
__global__ void widen_kernel(const uint32_t* codes, uint2* out, uint2* out_by_bits) {
  const int i = static_cast<int>(threadIdx.x);
  uint2 pair;
  from_e4m3x4<T>(codes[i], pair.x, pair.y);
  out[i] = pair;
  fp8_detail::from_e4m3x4_by_bits<T>(codes[i], pair.x, pair.y);
  out_by_bits[i] = pair;
}

template <typename T>
void test_widening() {
  std::vector<uint32_t> codes;
  for (uint32_t i = 0; i < 64; ++i) {  // each code in each of the four bytes
    for (uint32_t shift = 0; shift < 32; shift += 8) {
      const uint32_t four = (4 * i) | (4 * i + 1) << 8 | (4 * i + 2) << 16 | (4 * i + 3) << 24;
      codes.push_back(four << shift | (shift == 0 ? 0 : four >> (32 - shift)));
    }
  }
  DeviceBuffer<uint32_t> in(codes);
  DeviceBuffer<uint2> out(codes.size()), out_by_bits(codes.size());
  LaunchConfig config;
  config.block = dim3(static_cast<unsigned>(codes.size()));
  REQUIRE_CUDA(launch<widen_kernel<T>>(config, in.data(), out.data(), out_by_bits.data()));
  REQUIRE_CUDA(cudaDeviceSynchronize());
  for (const std::vector<uint2>& results : {out.download(), out_by_bits.download()}) {
    const auto* elements = reinterpret_cast<const T*>(results.data());
    for (size_t i = 0; i < codes.size() * 4; ++i) {
      const int code = static_cast<int>(codes[i / 4] >> (i % 4 * 8) & 0xff);
      const Context context("code " + std::to_string(code) + " in byte " + std::to_string(i % 4));
      EXPECT_TRUE(same(static_cast<float>(elements[i]), value_of(code)));
    }
  }
}

ASTRAI_TEST(every_code_becomes_bf16) { test_widening<__nv_bfloat16>(); }
ASTRAI_TEST(every_code_becomes_fp16) { test_widening<__half>(); }

template <int kWidth>
__global__ void narrow_kernel(const float* x, __nv_fp8_e4m3* out) {
  const int i = static_cast<int>(blockIdx.x * kWidth);
  float values[kWidth];
  for (int j = 0; j < kWidth; ++j) values[j] = x[i + j];
  store_e4m3<kWidth>(values, out + i);
}

template <int kWidth>
void test_narrowing() {
  const Context context("width " + std::to_string(kWidth));
  Rounding r = roundings();
  const size_t nan_at = r.x.size();
  r.x.push_back(std::nanf(""));
  r.code.push_back(0x7f);
  while (r.x.size() % kWidth != 0) {
    r.x.push_back(1.0f);
    r.code.push_back(0x38);
  }
  DeviceBuffer<float> in(r.x);
  DeviceBuffer<__nv_fp8_e4m3> out(r.x.size());
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(r.x.size() / kWidth));
  REQUIRE_CUDA(launch<narrow_kernel<kWidth>>(config, in.data(), out.data()));
  REQUIRE_CUDA(cudaDeviceSynchronize());
  const std::vector<__nv_fp8_e4m3> codes = out.download();
  for (size_t i = 0; i < r.x.size(); ++i) {
    const Context x("x " + show(r.x[i]));
    const int sign = i == nan_at ? 0x7f : 0xff;  // the sign of NaN is open
    EXPECT_EQ(codes[i].__x & sign, int{r.code[i]});
  }
}

ASTRAI_TEST(stores_of_every_width_round) {
  test_narrowing<1>();
  test_narrowing<2>();
  test_narrowing<4>();
  test_narrowing<8>();
}

}  // namespace
}  // namespace astrai
