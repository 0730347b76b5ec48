// plan.h without a GPU: what is refused, which width is chosen, and that the launch it describes
// touches every element exactly once with aligned accesses.
#include "kernels/rotary/plan.h"

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/kernels/testing/testing.h"

namespace astrai::rotary {
namespace {

using testing::Context;
using testing::Rng;

constexpr int kH200 = 132;  // SMs

// An address that is never read; planning only looks at its alignment.
template <typename T>
T* address(int64_t element, int64_t base = int64_t{1} << 40) {
  return reinterpret_cast<T*>(base + element * static_cast<int64_t>(sizeof(T)));
}

void set_contiguous(RotaryOperand& x, int64_t tokens, int heads, int head_dim) {
  x.heads = heads;
  x.in = address<uint16_t>(0);
  x.out = address<uint16_t>(0, int64_t{1} << 41);
  x.in_head_stride = x.out_head_stride = head_dim;
  x.in_token_stride = x.out_token_stride = int64_t{heads} * head_dim;
  x.in_batch_stride = x.out_batch_stride = tokens * heads * head_dim;
}

RotaryParams params(int batch, int64_t tokens, int q_heads, int k_heads, int head_dim,
                    int rotary_dim, Pairing pairing = Pairing::kInterleaved) {
  RotaryParams p;
  p.batch = batch;
  p.tokens = tokens;
  p.head_dim = head_dim;
  p.rotary_dim = rotary_dim;
  p.pairing = pairing;
  set_contiguous(p.q, tokens, q_heads, head_dim);
  if (k_heads > 0) set_contiguous(p.k, tokens, k_heads, head_dim);
  p.angles = address<float>(0, int64_t{1} << 42);
  return p;
}

RotaryPlan plan_of(const RotaryParams& p, int sm_count = kH200) {
  return make_plan(plan_detail::collapse_batch(p), sm_count);
}

// Walks over every thread of the launch as the kernel does and counts the touched elements.
// Expects the params that collapse_batch returned.
void expect_full_cover(const RotaryParams& p, const RotaryPlan& plan) {
  REQUIRE(plan.block_x >= 1 && plan.block_y >= 1 && plan.block_z >= 1);
  EXPECT_LE(plan.block_x * plan.block_y * plan.block_z, plan_detail::kMaxThreads);
  EXPECT_LE(plan.block_z, 64);
  EXPECT_LE(plan.grid_x, int64_t{2147483647});
  EXPECT_LE(plan.grid_y, 65535);
  EXPECT_LE(plan.grid_z, 65535);
  EXPECT_EQ(plan.split_pairs, p.pairing == Pairing::kHalfSplit || plan.width == 1);

  const bool tail_wanted =
      (p.q.heads > 0 && p.q.in != p.q.out) || (p.k.heads > 0 && p.k.in != p.k.out);
  const int dims = tail_wanted ? p.head_dim : p.rotary_dim;
  const int heads = p.q.heads + p.k.heads;
  std::vector<uint8_t> seen(static_cast<size_t>(p.batch * p.tokens * heads * dims));
  auto touch = [&](int64_t row, int head, int at) {
    for (int i = 0; i < plan.width; ++i) {
      REQUIRE(at + i < dims);
      ++seen[static_cast<size_t>((row * heads + head) * dims + at + i)];
    }
    const RotaryOperand& x = head < p.q.heads ? p.q : p.k;
    const int64_t local = head < p.q.heads ? head : head - p.q.heads;
    const int64_t b = row / p.tokens, t = row % p.tokens;
    const int64_t in = b * x.in_batch_stride + t * x.in_token_stride + local * x.in_head_stride;
    const int64_t out = b * x.out_batch_stride + t * x.out_token_stride + local * x.out_head_stride;
    const int64_t bytes = 2 * plan.width;
    EXPECT_EQ((reinterpret_cast<int64_t>(x.in) + 2 * (in + at)) % bytes, int64_t{0});
    EXPECT_EQ((reinterpret_cast<int64_t>(x.out) + 2 * (out + at)) % bytes, int64_t{0});
  };

  for (int64_t tile = 0; tile < plan.grid_x; ++tile) {
    for (int z = 0; z < plan.block_z; ++z) {
      const int64_t t = tile * plan.block_z + z;
      if (t >= p.tokens) continue;
      for (int lane = 0; lane < plan.grid_y * plan.block_y; ++lane) {
        if (lane >= plan.lanes) continue;
        int count = 0;
        for (int head = lane; head < heads; head += plan.lanes) {
          ++count;
          for (int b = 0; b < p.batch; ++b) {
            for (int c = 0; c < plan.columns; ++c) {
              const ColumnPlace place = place_column(p, plan, plan.width, plan.split_pairs, c);
              touch(b * p.tokens + t, head, place.first);
              if (place.has_second) touch(b * p.tokens + t, head, place.second);
              if (!place.rotated) continue;
              EXPECT_LE(place.first + plan.width, p.rotary_dim);
              if (place.has_second) EXPECT_LE(place.second + plan.width, p.rotary_dim);
            }
          }
        }
        EXPECT_TRUE(count == plan.heads_per_lane || count == plan.heads_per_lane - 1);
      }
    }
  }
  if (plan.single) {  // what rotary_single_kernel counts on
    EXPECT_EQ(plan.heads_per_lane, 1);
    EXPECT_EQ(plan.columns, plan.rotated_columns);
    EXPECT_EQ(plan.columns, plan.block_x);
    EXPECT_EQ(p.batch, 1);
    EXPECT_TRUE(plan.wide_angles);
    EXPECT_EQ(plan.width, plan.split_pairs ? 4 : 8);
  }
  size_t wrong = 0;
  for (const uint8_t count : seen) wrong += count != 1;
  EXPECT_EQ(wrong, size_t{0});
}

ASTRAI_TEST(contiguous_heads_take_16_byte_accesses) {
  for (const Pairing pairing : {Pairing::kInterleaved, Pairing::kHalfSplit}) {
    for (const int head_dim : {64, 128, 256}) {
      const RotaryPlan plan = plan_of(params(1, 2048, 32, 8, head_dim, head_dim, pairing));
      EXPECT_EQ(plan.width, 8);
      EXPECT_EQ(plan.columns, head_dim / (pairing == Pairing::kHalfSplit ? 16 : 8));
      EXPECT_TRUE(plan.wide_angles);
    }
  }
}

ASTRAI_TEST(width_follows_alignment) {
  RotaryParams p = params(1, 64, 4, 2, 128, 128);
  EXPECT_EQ(plan_of(p).width, 8);
  for (const auto& [shift, width] : {std::pair{4, 4}, {2, 2}, {1, 1}, {6, 2}, {8, 8}}) {
    RotaryParams q = p;
    q.q.in = address<uint16_t>(shift);
    EXPECT_EQ(plan_of(q).width, width);
    q = p;
    q.k.out = address<uint16_t>(shift, int64_t{1} << 41);
    EXPECT_EQ(plan_of(q).width, width);
    q = p;
    q.q.in_token_stride += shift;
    EXPECT_EQ(plan_of(q).width, width);
    q = p;
    q.k.out_head_stride += shift;
    EXPECT_EQ(plan_of(q).width, width);
  }
}

ASTRAI_TEST(width_never_straddles_a_half_or_the_tail) {
  EXPECT_EQ(plan_of(params(1, 65536, 4, 2, 80, 80, Pairing::kHalfSplit)).width, 8);
  EXPECT_EQ(plan_of(params(1, 65536, 4, 2, 80, 20, Pairing::kHalfSplit)).width, 2);
  EXPECT_EQ(plan_of(params(1, 65536, 4, 2, 80, 20)).width, 4);
  EXPECT_EQ(plan_of(params(1, 65536, 4, 2, 80, 6, Pairing::kHalfSplit)).width, 1);
  EXPECT_EQ(plan_of(params(1, 65536, 4, 2, 80, 2)).width, 2);
}

ASTRAI_TEST(case_d03_stride_of_a_size_1_dimension_is_ignored) {
  RotaryParams p = params(1, 64, 1, 1, 128, 128);
  for (RotaryOperand* x : {&p.q, &p.k}) {
    x->in_head_stride = 7;
    x->in_batch_stride = 3;
    x->out_batch_stride = 0;
  }
  EXPECT_TRUE(can_implement(p));
  EXPECT_EQ(plan_of(p).width, 8);
}

ASTRAI_TEST(in_place_leaves_the_tail_alone) {
  RotaryParams p = params(2, 16, 4, 2, 128, 64);
  EXPECT_EQ(plan_of(p).columns, 16);
  p.q.out = const_cast<void*>(p.q.in);
  EXPECT_EQ(plan_of(p).columns, 16);  // k is not in place
  p.k.out = const_cast<void*>(p.k.in);
  EXPECT_EQ(plan_of(p).columns, 8);
}

ASTRAI_TEST(dense_batch_is_merged_into_the_tokens) {
  const RotaryParams dense = plan_detail::collapse_batch(params(4, 512, 32, 8, 128, 128));
  EXPECT_EQ(dense.batch, 1);
  EXPECT_EQ(dense.tokens, int64_t{2048});
  RotaryParams p = params(4, 512, 32, 8, 128, 128);
  p.k.in_batch_stride += 8;
  EXPECT_EQ(plan_detail::collapse_batch(p).batch, 4);
  // One token per batch element (decode): the batch stride takes the token's place.
  p = params(64, 1, 32, 8, 128, 128);
  p.q.in_batch_stride = 6144;
  const RotaryParams decode = plan_detail::collapse_batch(p);
  EXPECT_EQ(decode.batch, 1);
  EXPECT_EQ(decode.tokens, int64_t{64});
  EXPECT_EQ(decode.q.in_token_stride, int64_t{6144});
}

ASTRAI_TEST(what_the_kernel_cannot_take_is_refused) {
  const RotaryParams good = params(2, 16, 4, 2, 128, 64);
  EXPECT_TRUE(can_implement(good));
  auto refuses = [&](auto change) {
    RotaryParams p = good;
    change(p);
    return !can_implement(p);
  };
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.dtype = DType::kFP32; }));
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.dtype = DType::kE4M3; }));
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.batch = -1; }));
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.tokens = -1; }));
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.tokens = int64_t{1} << 40; }));
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.q.heads = -1; }));
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.rotary_dim = 0; }));
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.rotary_dim = 63; }));
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.rotary_dim = 130; }));
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.angles = nullptr; }));
  EXPECT_TRUE(refuses([](RotaryParams& p) {
    p.angles = reinterpret_cast<const float*>(reinterpret_cast<const char*>(p.angles) + 2);
  }));
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.q.in = nullptr; }));
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.k.out = nullptr; }));
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.q.in = static_cast<const char*>(p.q.in) + 1; }));
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.q.out_head_stride = 0; }));
  EXPECT_TRUE(refuses([](RotaryParams& p) { p.source = AngleSource::kTable; }));  // no positions
  EXPECT_TRUE(refuses([](RotaryParams& p) {
    p.source = AngleSource::kTable;
    p.max_pos = 8;
    p.positions = address<int32_t>(1);
    p.positions_are_int64 = true;  // 4-byte aligned only
  }));
  EXPECT_TRUE(refuses([](RotaryParams& p) {
    p.q.out = const_cast<void*>(p.q.in);
    p.q.out_token_stride += 8;
  }));
  // An expanded input is fine, and so is the absence of k or q.
  EXPECT_FALSE(refuses([](RotaryParams& p) { p.q.in_token_stride = 0; }));
  EXPECT_FALSE(refuses([](RotaryParams& p) { p.k = {}; }));
  EXPECT_FALSE(refuses([](RotaryParams& p) { p.q = {}; }));
}

ASTRAI_TEST(nothing_to_do_is_accepted_with_null_pointers) {
  for (const auto& [batch, tokens, heads] :
       {std::tuple{0, int64_t{4}, 2}, {2, int64_t{0}, 2}, {2, int64_t{4}, 0}}) {
    RotaryParams p;
    p.batch = batch;
    p.tokens = tokens;
    p.q.heads = heads;
    p.head_dim = p.rotary_dim = 64;
    EXPECT_TRUE(is_empty(p));
    EXPECT_TRUE(can_implement(p));
  }
}

ASTRAI_TEST(few_tokens_spread_heads_over_threads) {
  for (const Pairing pairing : {Pairing::kInterleaved, Pairing::kHalfSplit}) {
    for (const int64_t tokens : {int64_t{1}, int64_t{16}, int64_t{64}}) {
      const RotaryPlan few = plan_of(params(1, tokens, 32, 8, 128, 128, pairing));
      EXPECT_EQ(few.lanes, 40);
      EXPECT_EQ(few.heads_per_lane, 1);
      EXPECT_TRUE(few.single);
      EXPECT_EQ(few.width, pairing == Pairing::kHalfSplit ? 4 : 8);
    }
    const RotaryPlan many = plan_of(params(1, 8192, 32, 8, 128, 128, pairing));
    EXPECT_EQ(many.heads_per_lane, pairing == Pairing::kHalfSplit ? 4 : 8);
    EXPECT_FALSE(many.single);
    EXPECT_EQ(many.width, 8);
  }
}

ASTRAI_TEST(the_single_kernel_takes_plain_calls_only) {
  auto is_single = [](auto change) {
    RotaryParams p = params(2, 4, 32, 8, 128, 128);
    change(p);
    return plan_of(p).single;
  };
  EXPECT_TRUE(is_single([](RotaryParams&) {}));
  EXPECT_FALSE(is_single([](RotaryParams& p) { p.rotary_dim = 64; }));         // a tail
  EXPECT_FALSE(is_single([](RotaryParams& p) { p.q.in_batch_stride += 8; }));  // two batch elements
  EXPECT_FALSE(is_single([](RotaryParams& p) { p.q.in_token_stride += 4; }));  // narrow accesses
  EXPECT_FALSE(is_single([](RotaryParams& p) { p.angles = address<float>(1); }));
}

// Heads of q and k share lanes, so that none is left with a few only.
ASTRAI_TEST(lanes_and_blocks_are_even) {
  for (const auto& [q_heads, k_heads] :
       {std::pair{8, 1}, {32, 8}, {32, 32}, {128, 8}, {71, 1}, {16, 2}, {3, 3}}) {
    for (const Pairing pairing : {Pairing::kInterleaved, Pairing::kHalfSplit}) {
      const RotaryPlan plan = plan_of(params(1, 65536, q_heads, k_heads, 128, 128, pairing));
      const Context context(std::to_string(q_heads) + "+" + std::to_string(k_heads));
      EXPECT_LE(plan.lanes * plan.heads_per_lane - (q_heads + k_heads), plan.lanes - 1);
      EXPECT_LE(plan.grid_y * plan.block_y - plan.lanes, plan.grid_y - 1);
    }
  }
}

ASTRAI_TEST(every_element_is_touched_once) {
  Rng rng;
  int single = 0, shared_lanes = 0, uneven_lanes = 0;
  for (int round = 0; round < 400; ++round) {
    const Pairing pairing = rng.coin() ? Pairing::kInterleaved : Pairing::kHalfSplit;
    // One in four is as models call it: aligned, without a tail.
    const bool plain = rng.integer(0, 3) == 0;
    const int head_dim =
        static_cast<int>(plain        ? 16 * rng.integer(1, 20)
                         : rng.coin() ? 8 * rng.integer(1, 40)
                                      : rng.integer(2, round % 50 == 0 ? 1200 : 130));
    const int rotary_dim = plain ? head_dim : 2 * static_cast<int>(rng.integer(1, head_dim / 2));
    const int q_heads = static_cast<int>(rng.integer(0, 9));
    const int k_heads = static_cast<int>(rng.integer(q_heads == 0 ? 1 : 0, 5));
    RotaryParams p = params(static_cast<int>(rng.integer(1, 3)), rng.integer(1, 9), q_heads,
                            k_heads, head_dim, rotary_dim, pairing);
    for (RotaryOperand* x : {&p.q, &p.k}) {
      // Pad strides by whole vectors or by odd numbers of elements.
      const int64_t unit = plain ? 8 : rng.pick(std::vector<int64_t>{8, 4, 2, 1});
      x->in_head_stride += unit * rng.integer(0, 2);
      x->in_token_stride = x->heads * x->in_head_stride + unit * rng.integer(0, 2);
      x->in_batch_stride = p.tokens * x->in_token_stride + unit * rng.integer(0, 2);
      x->in = address<uint16_t>(unit * rng.integer(0, 3));
      if (x->heads > 0 && rng.integer(0, 3) == 0) {
        x->out = const_cast<void*>(x->in);
        x->out_head_stride = x->in_head_stride;
        x->out_token_stride = x->in_token_stride;
        x->out_batch_stride = x->in_batch_stride;
      }
    }
    const int sm_count = static_cast<int>(rng.pick(std::vector<int64_t>{1, 16, 108, 132}));
    const Context context("head_dim " + std::to_string(head_dim) + " rotary_dim " +
                          std::to_string(rotary_dim) + " heads " + std::to_string(q_heads) + "+" +
                          std::to_string(k_heads) + " sms " + std::to_string(sm_count));
    REQUIRE(can_implement(p));
    const RotaryParams collapsed = plan_detail::collapse_batch(p);
    const RotaryPlan plan = make_plan(collapsed, sm_count);
    expect_full_cover(collapsed, plan);
    single += plan.single;
    shared_lanes += plan.heads_per_lane > 1;
    uneven_lanes += plan.lanes * plan.heads_per_lane > q_heads + k_heads;
  }
  // The cases drawn met every kind of layout.
  EXPECT_GE(single, 1);
  EXPECT_GE(shared_lanes, 1);
  EXPECT_GE(uneven_lanes, 1);
}

}  // namespace
}  // namespace astrai::rotary
