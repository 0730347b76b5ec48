// The test helpers themselves: a comparison that cannot fail would make every kernel test empty.
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/testing/compare.h"
#include "tests/kernels/testing/testing.h"

namespace astrai::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

ASTRAI_TEST(compare_measures_relative_and_max_error) {
  const Error error = compare(std::vector<float>{3.0f, 4.0f, 0.5f}, {3.0, 4.0, 0.0});
  EXPECT_EQ(error.mismatches, size_t{0});
  EXPECT_EQ(error.max_abs, 0.5);
  EXPECT_EQ(error.worst, size_t{2});
  EXPECT_EQ(error.relative, 0.1);
}

ASTRAI_TEST(compare_of_zeros_is_absolute) {
  EXPECT_EQ(compare(std::vector<float>{0.25f}, {0.0}).relative, 0.25);
  EXPECT_EQ(compare(std::vector<float>{0.0f}, {0.0}).relative, 0.0);
}

ASTRAI_TEST(compare_wants_nan_and_infinity_in_the_same_places) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(compare(std::vector<float>{nan, inf, -inf}, {kNaN, kInf, -kInf}).mismatches, size_t{0});
  EXPECT_EQ(compare(std::vector<float>{1.0f, nan}, {1.0, 1.0}).mismatches, size_t{1});
  EXPECT_EQ(compare(std::vector<float>{1.0f, nan}, {1.0, 1.0}).first_mismatch, size_t{1});
  EXPECT_EQ(compare(std::vector<float>{1.0f}, {kNaN}).mismatches, size_t{1});
  EXPECT_EQ(compare(std::vector<float>{inf}, {-kInf}).mismatches, size_t{1});
}

ASTRAI_TEST(compare_refuses_sizes_that_differ) {
  bool refused = false;
  try {
    compare(std::vector<float>{1.0f}, {1.0, 2.0});
  } catch (const Abort&) {
    refused = true;
  }
  EXPECT_TRUE(refused);
}

ASTRAI_TEST(random_numbers_repeat_within_a_case) {
  Rng a, b;
  for (int i = 0; i < 100; ++i) {
    const int64_t value = a.integer(-3, 3);
    EXPECT_GE(value, -3);
    EXPECT_LE(value, 3);
    EXPECT_EQ(b.integer(-3, 3), value);
  }
}

}  // namespace
}  // namespace astrai::testing
