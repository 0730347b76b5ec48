// launch_merge_states against fp64. Needs a GPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"
#include "tests/kernels/testing/compare.h"
#include "tests/kernels/testing/device_buffer.h"
#include "tests/kernels/testing/testing.h"

namespace astrai::attention {
namespace {

using testing::Context;
using testing::DeviceBuffer;
using testing::Rng;
using testing::to_double;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename T>
struct Bound;
template <>
struct Bound<__nv_bfloat16> {
  static constexpr DType kDType = DType::kBF16;
  static constexpr double kRelative = 0x1p-8;
};
template <>
struct Bound<__half> {
  static constexpr DType kDType = DType::kFP16;
  static constexpr double kRelative = 0x1p-11;
};
template <>
struct Bound<float> {
  static constexpr DType kDType = DType::kFP32;
  static constexpr double kRelative = 1e-6;
};

enum class Target { kNew, kFirst, kSecond };

// Row r of `special` has, by r % 4, keys on both sides, on one only, or on none.
template <typename T>
void run(Rng& rng, int64_t rows, int head_dim, Target target, size_t shift = 0) {
  const Context context("rows " + std::to_string(rows) + " head_dim " + std::to_string(head_dim) +
                        " shift " + std::to_string(shift));
  const size_t count = static_cast<size_t>(rows) * head_dim;
  std::vector<T> a = testing::random_normal<T>(rng, count);
  std::vector<T> b = testing::random_normal<T>(rng, count);
  std::vector<float> lse_a(rows), lse_b(rows);
  std::vector<double> want(count), want_lse(rows);
  for (int64_t r = 0; r < rows; ++r) {
    lse_a[r] = static_cast<float>(rng.uniform(-20, 20));
    lse_b[r] = static_cast<float>(lse_a[r] + rng.uniform(-8, 8));
    if (r % 4 == 1 || r % 4 == 3) lse_a[r] = -kInfinity;
    if (r % 4 == 2 || r % 4 == 3) lse_b[r] = -kInfinity;
    const double sum = std::exp(double{lse_a[r]}) + std::exp(double{lse_b[r]});
    want_lse[r] = std::log(sum);
    for (int i = 0; i < head_dim; ++i) {
      const size_t at = static_cast<size_t>(r) * head_dim + i;
      double value = 0;
      if (lse_a[r] != -kInfinity) value += std::exp(double{lse_a[r]}) / sum * to_double(a[at]);
      if (lse_b[r] != -kInfinity) value += std::exp(double{lse_b[r]}) / sum * to_double(b[at]);
      want[at] = value;
      // A side without keys may hold anything.
      const T nan = testing::from_double<T>(std::numeric_limits<double>::quiet_NaN());
      if (lse_a[r] == -kInfinity) a[at] = nan;
      if (lse_b[r] == -kInfinity) b[at] = nan;
    }
  }
  DeviceBuffer<T> device_a(a, shift), device_b(b, shift), device_out(count, shift);
  DeviceBuffer<float> device_lse_a(lse_a), device_lse_b(lse_b), device_lse(lse_a.size());
  DeviceBuffer<T>& out = target == Target::kNew     ? device_out
                         : target == Target::kFirst ? device_a
                                                    : device_b;
  DeviceBuffer<float>& lse = target == Target::kNew     ? device_lse
                             : target == Target::kFirst ? device_lse_a
                                                        : device_lse_b;
  MergeParams p;
  p.dtype = Bound<T>::kDType;
  p.rows = rows;
  p.head_dim = head_dim;
  p.out_a = device_a.data();
  p.lse_a = device_lse_a.data();
  p.out_b = device_b.data();
  p.lse_b = device_lse_b.data();
  p.out = out.data();
  p.lse = lse.data();
  REQUIRE_CUDA(launch_merge_states(p, nullptr));
  REQUIRE_CUDA(cudaDeviceSynchronize());
  EXPECT_CLOSE(out.download(), want, Bound<T>::kRelative, 0.03);
  EXPECT_CLOSE(lse.download(), want_lse, 1e-6, 1e-5);
}

template <typename T>
void run_all(Rng& rng) {
  for (const Target target : {Target::kNew, Target::kFirst, Target::kSecond}) {
    for (const int head_dim : {1, 3, 8, 64, 72, 128, 256, 2000}) run<T>(rng, 37, head_dim, target);
    run<T>(rng, 1, 128, target);
    run<T>(rng, 9, 128, target, 1);
  }
}

ASTRAI_TEST(case_c13_parts_without_keys_have_no_weight) {
  Rng rng;
  run_all<__nv_bfloat16>(rng);
  run_all<__half>(rng);
  run_all<float>(rng);
}

ASTRAI_TEST(large_logits_do_not_overflow) {
  const std::vector<float> lse_a = {3e4f, -3e4f}, lse_b = {2.9e4f, -3e4f};
  const std::vector<float> a = {2.0f, 2.0f}, b = {4.0f, 4.0f};
  DeviceBuffer<float> device_a(a), device_b(b), out(2), device_lse_a(lse_a), device_lse_b(lse_b),
      lse(2);
  MergeParams p;
  p.dtype = DType::kFP32;
  p.rows = 2;
  p.head_dim = 1;
  p.out_a = device_a.data();
  p.lse_a = device_lse_a.data();
  p.out_b = device_b.data();
  p.lse_b = device_lse_b.data();
  p.out = out.data();
  p.lse = lse.data();
  REQUIRE_CUDA(launch_merge_states(p, nullptr));
  EXPECT_EQ(out.download()[0], 2.0f);
  EXPECT_EQ(out.download()[1], 3.0f);
  EXPECT_EQ(lse.download()[0], 3e4f);
}

ASTRAI_TEST(no_rows_and_bad_params) {
  MergeParams p;
  p.head_dim = 64;
  EXPECT_EQ(launch_merge_states(p, nullptr), cudaSuccess);
  p.rows = 1;
  EXPECT_EQ(launch_merge_states(p, nullptr), cudaErrorInvalidValue);
  p.rows = -1;
  EXPECT_EQ(launch_merge_states(p, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace astrai::attention
