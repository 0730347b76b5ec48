// The layout of operand tiles: banks, and the base formula against the direct address.
#include "kernels/fp8/tile_layout.h"

#include <cstdint>
#include <set>

#include "tests/kernels/testing/testing.h"

namespace astrai::fp8 {
namespace {

template <int kK>
void check() {
  std::set<int> seen;
  for (int row = 0; row < 128; ++row) {
    for (int chunk = 0; chunk < kK / 16; ++chunk) seen.insert(tile_at<kK>(row, chunk));
  }
  EXPECT_EQ(seen.size(), size_t{128 * kK / 16});
  EXPECT_EQ(*seen.rbegin(), 128 * kK - 16);

  for (const bool is_a : {true, false}) {
    for (int first = 0; first < 128; first += 16) {
      for (int step = 0; step < (128 - first) / 16; ++step) {
        for (int segment = 0; segment < kK / 32; ++segment) {
          uint32_t banks = 0;
          for (int lane = 0; lane < 32; ++lane) {
            const int row = first + (is_a ? a_lane_row(lane) : b_lane_row(lane));
            const int chunk = is_a ? a_lane_chunk(lane) : b_lane_chunk(lane);
            const int direct = tile_at<kK>(row + 16 * step, chunk + 2 * segment);
            EXPECT_EQ(fragment_at<kK>(tile_at<kK>(row, chunk), step, segment), direct);
            if (lane % 8 == 0) banks = 0;
            banks |= 0xfu << (direct / 4 % 32);
            if (lane % 8 == 7) EXPECT_EQ(banks, 0xffffffffu);
          }
        }
      }
    }
  }
}

ASTRAI_TEST(rows_of_32_codes) { check<32>(); }
ASTRAI_TEST(rows_of_64_codes) { check<64>(); }
ASTRAI_TEST(rows_of_128_codes) { check<128>(); }

}  // namespace
}  // namespace astrai::fp8
