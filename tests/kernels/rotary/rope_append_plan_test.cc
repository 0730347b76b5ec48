// rope_append_plan.h without a GPU: what is refused, which width is chosen, and that the columns of
// a head cover every element once.
#include "kernels/rotary/rope_append_plan.h"

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/kernels/testing/testing.h"

namespace astrai::rotary {
namespace {

using testing::Context;
using testing::Rng;

constexpr int kH200 = 132;  // SMs

// An address that is never read.
template <typename T>
T* address(uintptr_t value) {
  return reinterpret_cast<T*>(value);
}

AppendedOperand appended(uintptr_t at, int heads, int dim, int page_size) {
  AppendedOperand x;
  x.in = address<void>(at);
  x.token_stride = int64_t{heads} * dim;
  x.head_stride = dim;
  x.cache = address<void>(at + 0x100000);
  x.page_stride = int64_t{page_size} * heads * dim;
  x.row_stride = int64_t{heads} * dim;
  x.cache_head_stride = dim;
  return x;
}

// 100 tokens, 8 heads on 2, pages of 16.
RopeAppendParams params(int head_dim = 128, int v_head_dim = 128, int rotary_dim = 128) {
  RopeAppendParams p;
  p.tokens = 100;
  p.kv_heads = 2;
  p.head_dim = head_dim;
  p.v_head_dim = v_head_dim;
  p.rotary_dim = rotary_dim;
  p.q.heads = 8;
  p.q.in = address<void>(0x1000000);
  p.q.out = address<void>(0x2000000);
  p.q.in_token_stride = p.q.out_token_stride = 8 * head_dim;
  p.q.in_head_stride = p.q.out_head_stride = head_dim;
  p.k = appended(0x3000000, 2, head_dim, 16);
  p.v = appended(0x4000000, 2, v_head_dim, 16);
  p.angles = address<float>(0x5000000);
  p.positions = address<int32_t>(0x6000000);
  p.max_pos = 1000;
  p.slots = address<int32_t>(0x7000000);
  p.slot_count = 160;
  p.page_size = 16;
  return p;
}

using Change = std::function<void(RopeAppendParams&)>;

bool takes(const Change& change) {
  RopeAppendParams p = params();
  change(p);
  return can_implement(p);
}

ASTRAI_TEST(what_is_taken_and_what_not) {
  EXPECT_TRUE(takes([](auto&) {}));
  EXPECT_TRUE(takes([](auto& p) { p.cache_dtype = DType::kE4M3; }));
  EXPECT_TRUE(takes([](auto& p) { p.dtype = p.cache_dtype = DType::kFP16; }));
  EXPECT_TRUE(takes([](auto& p) { p.rotary_dim = 64; }));
  EXPECT_TRUE(takes([](auto& p) { p.q.heads = 0; }));
  EXPECT_TRUE(takes([](auto& p) { p.q.out = const_cast<void*>(p.q.in); }));
  EXPECT_TRUE(takes([](auto& p) { p.kv_heads = 0; }));
  EXPECT_TRUE(takes([](auto& p) {  // plain append: neither angles nor positions
    p.rotary_dim = 0;
    p.angles = nullptr;
    p.positions = nullptr;
  }));

  EXPECT_FALSE(takes([](auto& p) { p.dtype = DType::kFP32; }));
  EXPECT_FALSE(takes([](auto& p) { p.cache_dtype = DType::kFP16; }));
  EXPECT_FALSE(takes([](auto& p) { p.cache_dtype = DType::kE5M2; }));
  EXPECT_FALSE(takes([](auto& p) { p.tokens = -1; }));
  EXPECT_FALSE(takes([](auto& p) { p.tokens = int64_t{1} << 31; }));
  EXPECT_FALSE(takes([](auto& p) { p.rotary_dim = 63; }));
  EXPECT_FALSE(takes([](auto& p) { p.rotary_dim = 130; }));
  EXPECT_FALSE(takes([](auto& p) { p.rotary_dim = -2; }));
  EXPECT_FALSE(takes([](auto& p) { p.angles = nullptr; }));
  EXPECT_FALSE(takes([](auto& p) { p.positions = nullptr; }));
  EXPECT_FALSE(takes([](auto& p) { p.positions = address<void>(0x6000002); }));
  EXPECT_FALSE(takes([](auto& p) { p.slots = nullptr; }));
  EXPECT_FALSE(takes([](auto& p) {
    p.slots_are_int64 = true;
    p.slots = address<void>(0x7000004);
  }));
  EXPECT_FALSE(takes([](auto& p) { p.q.in = nullptr; }));
  EXPECT_FALSE(takes([](auto& p) { p.q.out_head_stride = 0; }));
  EXPECT_FALSE(takes([](auto& p) { p.k.in = nullptr; }));
  EXPECT_FALSE(takes([](auto& p) { p.v.cache = nullptr; }));
  EXPECT_FALSE(takes([](auto& p) { p.v.cache = address<void>(0x4100001); }));
  EXPECT_FALSE(takes([](auto& p) { p.k.scale = 0.0f; }));
  EXPECT_FALSE(takes([](auto& p) { p.v.scale = std::numeric_limits<float>::infinity(); }));
  EXPECT_FALSE(takes([](auto& p) { p.page_size = 0; }));
}

ASTRAI_TEST(any_page_size_where_pages_follow_each_other) {
  const auto pages_of = [](int page_size, int64_t gap) {
    return [=](RopeAppendParams& p) {
      p.page_size = page_size;
      p.slot_count = 10 * page_size;
      for (AppendedOperand* x : {&p.k, &p.v}) x->page_stride = page_size * x->row_stride + gap;
    };
  };
  for (const int page_size : {1, 2, 3, 16, 24, 100, 4096}) {
    const Context context("page_size " + std::to_string(page_size));
    EXPECT_TRUE(takes(pages_of(page_size, 0)));
    EXPECT_EQ(takes(pages_of(page_size, 8)), plan_detail::is_power_of_two(page_size));
    RopeAppendParams p = params();
    pages_of(page_size, 0)(p);
    p = plan_detail::collapse_pages(p);
    EXPECT_EQ(p.page_size, 1);
    EXPECT_EQ(p.k.page_stride, 256);
    EXPECT_EQ(make_plan(p, kH200).page_shift, 0);
    pages_of(page_size, 8)(p);
    EXPECT_EQ(plan_detail::collapse_pages(p).page_size, page_size);
  }
  RopeAppendParams p = params();
  pages_of(64, 8)(p);
  EXPECT_EQ(make_plan(p, kH200).page_shift, 6);
  p.slot_count = 64;  // one page: the stride from page to page is never used
  EXPECT_EQ(plan_detail::collapse_pages(p).page_size, 1);
}

int width(const Change& change) {
  RopeAppendParams p = params();
  change(p);
  REQUIRE(can_implement(p));
  return make_plan(p, kH200).rotary.width;
}

ASTRAI_TEST(accesses_are_as_wide_as_everything_allows) {
  EXPECT_EQ(width([](auto&) {}), 8);
  EXPECT_EQ(width([](auto& p) { p.pairing = Pairing::kHalfSplit; }), 8);
  EXPECT_EQ(width([](auto& p) { p.cache_dtype = DType::kE4M3; }), 8);
  EXPECT_EQ(width([](auto& p) { p.rotary_dim = 20; }), 2);
  EXPECT_EQ(width([](auto& p) {
              p.pairing = Pairing::kHalfSplit;
              p.rotary_dim = 24;
            }),
            2);
  EXPECT_EQ(width([](auto& p) {
              p.pairing = Pairing::kHalfSplit;
              p.rotary_dim = 18;
            }),
            1);
  EXPECT_EQ(width([](auto& p) { p.k.row_stride += 2; }), 2);
  EXPECT_EQ(width([](auto& p) { p.v.page_stride += 1; }), 1);
  EXPECT_EQ(width([](auto& p) { p.v.head_stride += 4; }), 2);
  EXPECT_EQ(width([](auto& p) { p.q.in = address<void>(0x1000002); }), 1);
  EXPECT_EQ(width([](auto& p) { p.v.cache = address<void>(0x4100004); }), 2);
  // 8 codes of e4m3 are one 8-byte access.
  EXPECT_EQ(width([](auto& p) {
              p.cache_dtype = DType::kE4M3;
              p.v.cache = address<void>(0x4100008);
            }),
            8);
  EXPECT_EQ(width([](auto& p) {  // strides of one head, of one token
              p.kv_heads = 1;
              p.tokens = 1;
              p.k.head_stride = p.k.cache_head_stride = p.k.token_stride = 7;
            }),
            8);
}

// Columns of one head: every element of `begin .. dim - 1` once, rotated below rotary_dim.
ASTRAI_TEST(columns_cover_every_element_once) {
  Rng rng;
  for (int round = 0; round < 400; ++round) {
    const int head_dim = static_cast<int>(rng.integer(1, 150)) * (rng.coin() ? 2 : 1);
    const int v_head_dim = rng.coin() ? head_dim : static_cast<int>(rng.integer(1, 300));
    const int rotary_dim = rng.coin() && head_dim % 2 == 0
                               ? head_dim
                               : 2 * static_cast<int>(rng.integer(0, head_dim / 2));
    RopeAppendParams p = params(head_dim, v_head_dim, rotary_dim);
    p.pairing = rng.coin() ? Pairing::kInterleaved : Pairing::kHalfSplit;
    p.tokens = rng.integer(1, 5000);
    REQUIRE(can_implement(p));
    const RopeAppendPlan plan = make_plan(p, kH200);
    const RotaryPlan& r = plan.rotary;
    const Context context("head_dim " + std::to_string(head_dim) + " v " +
                          std::to_string(v_head_dim) + " rotary " + std::to_string(rotary_dim) +
                          " width " + std::to_string(r.width));
    EXPECT_LE(r.block_x * r.block_y * r.block_z, plan_detail::kMaxThreads);
    EXPECT_GE(r.grid_x * r.block_z, p.tokens);
    EXPECT_GE(r.grid_y * r.block_y, r.lanes);
    EXPECT_GE(r.lanes * r.heads_per_lane, 12);

    std::vector<int> rotated(head_dim), copied(v_head_dim);
    for (int column = 0; column < r.columns; ++column) {
      const AppendPlace qk = place_rotated(p, r, r.width, r.split_pairs, column);
      const AppendPlace v = place_copied(p, r, r.width, r.split_pairs, column);
      for (int a = 0; a < (r.split_pairs ? 2 : 1); ++a) {
        for (int i = 0; i < r.width; ++i) {
          if (qk.present[a]) {
            REQUIRE(qk.at[a] + i < head_dim);
            EXPECT_EQ(qk.rotated, qk.at[a] + i < rotary_dim);
            ++rotated[qk.at[a] + i];
          }
          if (v.present[a]) {
            REQUIRE(v.at[a] + i < v_head_dim);
            EXPECT_FALSE(v.rotated);
            ++copied[v.at[a] + i];
          }
        }
      }
    }
    for (const int count : rotated) EXPECT_EQ(count, 1);
    for (const int count : copied) EXPECT_EQ(count, 1);
  }
}

}  // namespace
}  // namespace astrai::rotary
