// why_not_implemented and supports_head_dims, and the alignment that the MMA kernels need.
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include "kernels/attention/attention.h"
#include "kernels/attention/variant.h"
#include "tests/kernels/testing/testing.h"

namespace astrai::attention {
namespace {

using testing::Context;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// An address that is never read.
template <typename T>
T* address(uintptr_t value) {
  return reinterpret_cast<T*>(value);
}

Operand contiguous(uintptr_t at, int seq, int heads, int dim) {
  return {address<void>(at), int64_t{seq} * heads * dim, int64_t{heads} * dim, dim};
}

// 3 requests of 5 queries and 40 keys, 8 heads on 2.
AttentionParams dense(int head_dim = 128, int v_head_dim = 128) {
  AttentionParams p;
  p.batch = 3;
  p.q_heads = 8;
  p.kv_heads = 2;
  p.head_dim = head_dim;
  p.v_head_dim = v_head_dim;
  p.q_len = 5;
  p.kv_len = 40;
  p.q = contiguous(0x10000, 5, 8, head_dim);
  p.k = contiguous(0x20000, 40, 2, head_dim);
  p.v = contiguous(0x30000, 40, 2, v_head_dim);
  p.out = address<void>(0x40000);
  p.out_batch_stride = 5 * 8 * v_head_dim;
  p.out_seq_stride = 8 * v_head_dim;
  p.out_head_stride = v_head_dim;
  p.scale = 0.1f;
  return p;
}

// The same, packed, on pages of 16.
AttentionParams paged() {
  AttentionParams p = dense();
  p.qo_indptr = address<int32_t>(0x50000);
  p.total_q = 15;
  p.kv_indptr = address<int32_t>(0x51000);
  p.k = contiguous(0x20000, 16, 2, 128);
  p.v = contiguous(0x30000, 16, 2, 128);
  p.pages = {address<int32_t>(0x52000), 3, 3, nullptr, 16};
  p.new_k = contiguous(0x60000, 1, 2, 128);
  p.new_v = contiguous(0x70000, 1, 2, 128);
  return p;
}

using Change = std::function<void(AttentionParams&)>;

std::string answer(AttentionParams p, const Change& change) {
  change(p);
  const char* reason = why_not_implemented(p);
  return reason == nullptr ? "" : reason;
}

ASTRAI_TEST(good_params_are_taken) {
  EXPECT_EQ(answer(dense(), [](AttentionParams&) {}), "");
  EXPECT_EQ(answer(dense(192, 128), [](AttentionParams&) {}), "");
  EXPECT_EQ(answer(paged(), [](AttentionParams&) {}), "");
  EXPECT_EQ(answer(paged(), [](AttentionParams& p) { p.kv_dtype = DType::kE4M3; }), "");
  EXPECT_EQ(answer(dense(), [](AttentionParams& p) { p.dtype = p.kv_dtype = DType::kFP16; }), "");
  EXPECT_EQ(answer(dense(), [](AttentionParams& p) { p.softcap = 30.0f; }), "");
  EXPECT_EQ(answer(dense(), [](AttentionParams& p) { p.scale = -2.0f; }), "");
  EXPECT_EQ(answer(dense(), [](AttentionParams& p) { p.window_left = p.window_right = -5; }), "");
  for (int page_size = 1; page_size <= kMaxPageSize; page_size *= 2) {
    EXPECT_EQ(answer(paged(),
                     [=](AttentionParams& p) {
                       p.pages.page_size = page_size;
                       p.pages.width = 40;
                     }),
              "");
  }
}

ASTRAI_TEST(case_c09_head_dims) {
  for (int dim = -8; dim <= 520; ++dim) {
    const bool multiple = dim > 0 && dim <= 256 && dim % 8 == 0;
    EXPECT_EQ(supports_head_dims(dim, dim), multiple);
    const std::string reason =
        answer(dense(), [=](AttentionParams& p) { p.head_dim = p.v_head_dim = dim; });
    EXPECT_EQ(reason, multiple ? "" : "head_dim must be a multiple of 8 up to 256");
  }
  EXPECT_TRUE(supports_head_dims(192, 128));
  EXPECT_FALSE(supports_head_dims(128, 192));
  EXPECT_FALSE(supports_head_dims(192, 64));
  EXPECT_FALSE(supports_head_dims(128, 64));
  EXPECT_EQ(answer(dense(), [](AttentionParams& p) { p.v_head_dim = 64; }),
            "v_head_dim must be head_dim, or 128 with head_dim 192");
}

ASTRAI_TEST(what_is_not_taken_is_named) {
  const struct {
    const char* reason;
    Change change;
  } cases[] = {
      {"dtype must be bfloat16 or float16", [](auto& p) { p.dtype = DType::kFP32; }},
      {"dtype must be bfloat16 or float16", [](auto& p) { p.dtype = DType::kE4M3; }},
      {"kv_dtype must be that of q or float8_e4m3fn", [](auto& p) { p.kv_dtype = DType::kFP16; }},
      {"kv_dtype must be that of q or float8_e4m3fn", [](auto& p) { p.kv_dtype = DType::kE5M2; }},
      {"q_heads and kv_heads must be positive", [](auto& p) { p.q_heads = 0; }},
      {"q_heads and kv_heads must be positive", [](auto& p) { p.kv_heads = -2; }},
      {"q_heads must be a multiple of kv_heads", [](auto& p) { p.q_heads = 7; }},
      {"q_heads / kv_heads must be at most 64", [](auto& p) { p.q_heads = 130; }},
      {"sizes must not be negative", [](auto& p) { p.batch = -1; }},
      {"sizes must not be negative", [](auto& p) { p.q_len = -1; }},
      {"sizes must not be negative", [](auto& p) { p.kv_len = -1; }},
      {"sizes must not be negative", [](auto& p) { p.total_q = -1; }},
      {"q_len * q_heads / kv_heads and kv_len must be below 2^31 - 1024",
       [](auto& p) { p.kv_len = std::numeric_limits<int>::max(); }},
      {"q_len * q_heads / kv_heads and kv_len must be below 2^31 - 1024",
       [](auto& p) { p.q_len = 1 << 29; }},
      {"the number of queries times q_heads must be below 2^31",
       [](auto& p) {
         p.q_len = 1 << 20;
         p.batch = 1 << 9;
       }},
      {"scale must be finite", [](auto& p) { p.scale = kInfinity; }},
      {"scale must be finite", [](auto& p) { p.scale = kNaN; }},
      {"softcap must be finite and 0 or more", [](auto& p) { p.softcap = -1.0f; }},
      {"softcap must be finite and 0 or more", [](auto& p) { p.softcap = kInfinity; }},
      {"softcap must be finite and 0 or more", [](auto& p) { p.softcap = kNaN; }},
      {"k_scale and v_scale must be finite and more than 0", [](auto& p) { p.k_scale = 0.0f; }},
      {"k_scale and v_scale must be finite and more than 0", [](auto& p) { p.v_scale = -1.0f; }},
      {"k_scale and v_scale must be finite and more than 0", [](auto& p) { p.k_scale = kNaN; }},
      {"k_scale and v_scale must be finite and more than 0",
       [](auto& p) { p.v_scale = kInfinity; }},
      {"new_k and new_v must come with a page table",
       [](auto& p) { p.new_k = p.new_v = contiguous(0x60000, 1, 2, 128); }},
      {"q and out must not be null", [](auto& p) { p.q.data = nullptr; }},
      {"q and out must not be null", [](auto& p) { p.out = nullptr; }},
      {"k and v must not be null", [](auto& p) { p.v.data = nullptr; }},
      {"rows and width of the mask must not be negative",
       [](auto& p) {
         p.mask.data = address<bool>(0x80000);
         p.mask.width = -1;
       }},
      {"int32 and fp32 arrays must be aligned to 4 bytes",
       [](auto& p) { p.sinks = address<float>(0x80002); }},
      {"int32 and fp32 arrays must be aligned to 4 bytes",
       [](auto& p) { p.lse = address<float>(0x80001); }},
      {"int32 and fp32 arrays must be aligned to 4 bytes",
       [](auto& p) { p.k_scale_pointer = address<float>(0x80001); }},
  };
  for (const auto& c : cases) {
    const Context context(c.reason);
    EXPECT_EQ(answer(dense(), c.change), c.reason);
  }
}

ASTRAI_TEST(page_tables_that_are_not_taken) {
  for (const int page_size : {-1, 0, 3, 24, 100, 257, 512}) {
    EXPECT_EQ(answer(paged(), [=](auto& p) { p.pages.page_size = page_size; }),
              "page_size must be a power of two up to 256");
  }
  const char* width = "kv_len must be at most the width of the page table times page_size";
  EXPECT_EQ(answer(paged(), [](auto& p) { p.pages.width = 2; }), width);
  EXPECT_EQ(answer(paged(), [](auto& p) { p.kv_len = 49; }), width);
  EXPECT_EQ(answer(paged(), [](auto& p) { p.pages.width = -1; }), width);
  EXPECT_EQ(answer(paged(), [](auto& p) { p.kv_len = 48; }), "");
  const char* both = "new_k and new_v must be given both or not at all";
  EXPECT_EQ(answer(paged(), [](auto& p) { p.new_v = {}; }), both);
  EXPECT_EQ(answer(paged(), [](auto& p) { p.new_k = {}; }), both);
  EXPECT_EQ(answer(paged(), [](auto& p) { p.new_k = p.new_v = {}; }), "");
}

// A bound for all requests together says nothing about one, nor the other way round.
ASTRAI_TEST(limits_of_packed_queries_follow_their_number) {
  EXPECT_EQ(answer(paged(),
                   [](auto& p) {
                     p.batch = 4096;
                     p.q_len = p.total_q = 1 << 20;
                   }),
            "");
  EXPECT_EQ(answer(paged(), [](auto& p) { p.total_q = 1 << 29; }),
            "the number of queries times q_heads must be below 2^31");
}

ASTRAI_TEST(case_c02_empty_params_need_no_pointers) {
  const auto no_pointers = [](AttentionParams& p) { p.q.data = p.k.data = p.out = nullptr; };
  for (int which = 0; which < 3; ++which) {
    AttentionParams p = which == 2 ? paged() : dense();
    if (which == 0) p.batch = 0;
    if (which == 1) p.q_len = 0;
    if (which == 2) p.total_q = 0;
    EXPECT_EQ(answer(p, no_pointers), "");
    EXPECT_EQ(answer(p, [](AttentionParams& q) { q.head_dim = 12; }),
              "head_dim must be a multiple of 8 up to 256");
  }
  EXPECT_EQ(answer(dense(),
                   [](AttentionParams& p) {
                     p.kv_len = 0;
                     p.k.data = p.v.data = nullptr;
                   }),
            "");
}

bool aligned(AttentionParams p, const Change& change) {
  change(p);
  return rows_are_aligned(p);
}

ASTRAI_TEST(every_row_must_start_at_16_bytes) {
  EXPECT_TRUE(aligned(dense(), [](auto&) {}));
  EXPECT_TRUE(aligned(paged(), [](auto&) {}));
  for (const uintptr_t offset : {2u, 8u}) {
    const auto shift = [=](const void* p) {
      return address<void>(reinterpret_cast<uintptr_t>(p) + offset);
    };
    EXPECT_FALSE(aligned(dense(), [&](auto& p) { p.q.data = shift(p.q.data); }));
    EXPECT_FALSE(aligned(dense(), [&](auto& p) { p.k.data = shift(p.k.data); }));
    EXPECT_FALSE(aligned(dense(), [&](auto& p) { p.v.data = shift(p.v.data); }));
    EXPECT_FALSE(aligned(dense(), [&](auto& p) { p.out = shift(p.out); }));
    EXPECT_FALSE(aligned(paged(), [&](auto& p) { p.new_k.data = shift(p.new_k.data); }));
    EXPECT_FALSE(aligned(paged(), [&](auto& p) { p.new_v.data = shift(p.new_v.data); }));
  }
  EXPECT_FALSE(aligned(dense(), [](auto& p) { p.k.seq_stride += 4; }));
  EXPECT_FALSE(aligned(dense(), [](auto& p) { p.v.head_stride += 1; }));
  EXPECT_FALSE(aligned(dense(), [](auto& p) { p.q.batch_stride += 2; }));
  EXPECT_FALSE(aligned(dense(), [](auto& p) { p.out_head_stride += 4; }));
  EXPECT_FALSE(aligned(paged(), [](auto& p) { p.new_k.seq_stride += 4; }));
  EXPECT_FALSE(aligned(paged(), [](auto& p) { p.k.batch_stride += 4; }));
}

ASTRAI_TEST(rows_of_e4m3_must_start_at_16_bytes_too) {
  const auto e4m3 = [](AttentionParams& p) { p.kv_dtype = DType::kE4M3; };
  EXPECT_TRUE(aligned(dense(), e4m3));
  EXPECT_FALSE(aligned(dense(), [&](auto& p) {
    e4m3(p);
    p.k.seq_stride += 8;
  }));
  // 72 elements of one byte are no multiple of 16 bytes; of two bytes they are.
  EXPECT_FALSE(aligned(dense(72, 72), e4m3));
  EXPECT_TRUE(aligned(dense(72, 72), [](auto&) {}));
}

ASTRAI_TEST(case_d03_strides_that_are_never_multiplied_do_not_matter) {
  EXPECT_TRUE(aligned(dense(), [](auto& p) {
    p.batch = 1;
    p.q.batch_stride = p.k.batch_stride = p.out_batch_stride = 7;
  }));
  EXPECT_TRUE(aligned(dense(), [](auto& p) {
    p.kv_heads = 1;
    p.k.head_stride = p.v.head_stride = 7;
  }));
  EXPECT_TRUE(aligned(paged(), [](auto& p) { p.q.batch_stride = 7; }));  // packed: not looked at
  EXPECT_TRUE(aligned(paged(), [](auto& p) {
    p.pages.page_size = 1;
    p.k.seq_stride = 7;
  }));
}

}  // namespace
}  // namespace astrai::attention
