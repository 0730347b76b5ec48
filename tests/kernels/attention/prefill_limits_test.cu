// Prefill at the edges of its arguments: extreme logits, page tables, offsets beyond 2^31, empty
// inputs. Needs a GPU.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/attention/prefill_run.h"

namespace astrai::attention {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// cases.md C1: every logit lies in [-7e4, -6e4]; none of them may be taken for a masked one.
ASTRAI_TEST(case_c1_very_negative_logits_are_exact) {
  Rng rng;
  for (const int splits : {0, 2}) {
    for (const int kv_len : {2, 40, 600}) {
      Problem p;
      p.q_heads = 4;
      p.head_dim = 128;
      p.q_lens = {70};
      p.kv_lens = {kv_len};
      p.scale = 1.0;
      AttentionProblem<__nv_bfloat16> test(rng, p);
      // q = -23 in every element, k between 20.5 and 23.5 in steps of 1/8: logits are exact in
      // fp32.
      for (auto& x : test.q()) x = from_double<__nv_bfloat16>(-23.0);
      for (int j = 0; j < kv_len; ++j) {
        for (int h = 0; h < p.kv_heads; ++h) {
          for (int d = 0; d < 128; ++d) {
            test.k().set(test.k_at(0, j, h) + d, 22.0 + (d < 8 ? rng.integer(-1, 1) * 0.125 : 0.0));
          }
        }
      }
      test.set_lse_tolerance(0.05);  // half an ulp of fp32 at 7e4 is 0.004, in base 2 as in base e
      test.run([&](const AttentionParams& a) { return launch_prefill_run(rng, a, {0, splits}); });
      test.check(rng);
    }
  }
}

// Logits beyond 1e9, whose rounding in fp32 alone exceeds the range of exp2.
ASTRAI_TEST(huge_logits_do_not_overflow) {
  Rng rng;
  for (const double sign : {-1.0, 1.0}) {
    for (const int splits : {0, 2}) {
      Problem p;
      p.q_heads = 2;
      p.kv_heads = 1;
      p.q_lens = {20};
      p.kv_lens = {600};
      p.scale = 1.0;
      AttentionProblem<__nv_bfloat16> test(rng, p);
      for (auto& x : test.q()) x = from_double<__nv_bfloat16>(sign * 65536.0);
      for (int j = 0; j < 600; ++j) {
        for (int d = 0; d < 64; ++d) test.k().set(test.k_at(0, j, 0) + d, 65536.0 * (1 + j % 7));
      }
      test.set_lse_tolerance(1e6);  // ulps of 1e12
      test.run([&](const AttentionParams& a) { return launch_prefill_run(rng, a, {0, splits}); });
      test.check(rng);
    }
  }
}

// A NaN in a visible key reaches the rows that see it, and only those.
ASTRAI_TEST(nan_in_a_visible_key_is_not_lost) {
  Rng rng;
  for (const float softcap : {0.0f, 10.0f}) {
    Problem p;
    p.q_heads = 2;
    p.kv_heads = 1;
    p.q_lens = {100};
    p.kv_lens = {100};
    p.causal = true;
    p.softcap = softcap;
    AttentionProblem<__nv_bfloat16> test(rng, p);
    const int poisoned = 64;
    test.k().set(test.k_at(0, poisoned, 0), std::numeric_limits<double>::quiet_NaN());
    test.run([&](const AttentionParams& a) { return launch_prefill_run(rng, a, {}); });
    for (int i = 0; i < 100; ++i) {
      for (int h = 0; h < 2; ++h) {
        EXPECT_EQ(std::isnan(to_double(test.out()[test.out_at(0, i, h)])), i >= poisoned);
        EXPECT_EQ(std::isnan(test.lse()[test.lse_at(0, i, h)]), i >= poisoned);
      }
    }
  }
}

// A row without keys does not read what it must not see.
ASTRAI_TEST(rows_without_keys_ignore_nan_in_v) {
  Rng rng;
  for (const int shift : {0, 1}) {
    for (const bool sinks : {false, true}) {
      for (const int splits : {0, 2}) {
        Problem p;
        p.head_dim = 128;
        p.q_lens = {90, 90};
        p.kv_lens = {600, 600};
        p.mask = MaskKind::kBatchKv;
        p.sinks = sinks;
        p.shift = shift;
        AttentionProblem<__half> test(rng, p);
        std::fill(test.mask().begin(), test.mask().end(), 0);
        for (auto& byte : test.v().bytes) byte = 0xff;
        test.run([&](const AttentionParams& a) {
          return launch_prefill_run(rng, a, {0, shift == 0 ? splits : 0});
        });
        for (const auto& x : test.out()) EXPECT_EQ(to_double(x), 0.0);
        for (const float x : test.lse()) EXPECT_TRUE(sinks ? std::isfinite(x) : x == -kInf);
      }
    }
  }
}

Problem paged_problem(int page_size, const std::vector<int>& kv_lens) {
  Problem p;
  p.page_size = page_size;
  p.kv_lens = kv_lens;
  p.q_lens.assign(kv_lens.size(), 0);
  for (size_t b = 0; b < kv_lens.size(); ++b) p.q_lens[b] = 20 + static_cast<int>(b) * 31;
  p.packed_q = p.packed_kv = true;
  return p;
}

// cases.md C7: nothing of a page past the request's length counts, whatever it holds.
ASTRAI_TEST(case_c7_last_pages_are_partly_filled) {
  Rng rng;
  for (const int page_size : {1, 16, 64}) {
    for (const bool fp8 : {false, true}) {
      Problem p =
          paged_problem(page_size, {page_size - 1, page_size, page_size + 1, 3 * page_size + 2});
      p.fp8 = fp8;
      run_prefill_both(rng, p);
    }
  }
}

// cases.md D10: every page size.
ASTRAI_TEST(case_d10_every_page_size) {
  Rng rng;
  for (int page_size = 1; page_size <= 256; page_size *= 2) {
    Problem p = paged_problem(page_size, {257, 31, 600});
    p.head_dim = rng.pick(std::vector<int>{64, 128, 192, 256});
    p.table_rows = rng.coin();
    p.causal = rng.coin();
    run_prefill_both(rng, p);
    run_prefill_both(rng, p, {rng.coin() ? kPrefillLargeRows : kPrefillSmallRows, 2});
  }
}

// cases.md D11: entries past the last page are not read (in every paged test they lie far outside
// of the cache), here with a table as wide as its longest request.
ASTRAI_TEST(case_d11_entries_past_the_last_page_are_not_read) {
  Rng rng;
  for (const int page_size : {1, 64}) {
    run_prefill_both(rng, paged_problem(page_size, {257, 128, 5}));
  }
}

// cases.md D12: negative entries are skipped.
ASTRAI_TEST(case_d12_holes_in_the_table_are_skipped) {
  Rng rng;
  for (const double holes : {0.2, 0.9, 1.0}) {
    for (const int page_size : {1, 4, 32}) {
      for (const int shift : {0, 1}) {
        Problem p = paged_problem(page_size, {200, 77});
        p.head_dim = rng.pick(std::vector<int>{64, 96, 256});
        p.holes = holes;
        p.append = true;
        p.shift = shift;
        p.causal = rng.coin();
        p.fp8 = rng.coin();
        run_prefill_both(rng, p);
      }
    }
  }
}

// cases.md D7: page index times stride beyond 2^31. The cache's base lies so far below the memory
// that only pages of high index are in it.
ASTRAI_TEST(case_d7_pages_of_high_index) {
  Rng rng;
  constexpr int kPages = 8, kPageSize = 16, kFirstPage = 300000, kQueries = 70;
  constexpr int64_t kPageStride = int64_t{kPageSize} * 2 * 128;
  DeviceBuffer<__nv_bfloat16> q(random_normal<__nv_bfloat16>(rng, kQueries * 4 * 128));
  DeviceBuffer<__nv_bfloat16> k(random_normal<__nv_bfloat16>(rng, kPages * kPageStride));
  DeviceBuffer<__nv_bfloat16> v(random_normal<__nv_bfloat16>(rng, kPages * kPageStride));
  std::vector<std::vector<uint16_t>> results;
  for (const int first_page : {0, kFirstPage, 100 * kFirstPage}) {
    std::vector<int32_t> entries;
    for (int i = 0; i < kPages; ++i) entries.push_back(first_page + (i * 3) % kPages);
    DeviceBuffer<int32_t> table(entries);
    DeviceBuffer<__nv_bfloat16> out(kQueries * 4 * 128);
    const auto base = [&](DeviceBuffer<__nv_bfloat16>& cache) {
      return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(cache.data()) -
                                           static_cast<uintptr_t>(first_page * kPageStride * 2));
    };
    AttentionParams a;
    a.batch = 1;
    a.q_len = kQueries;
    a.q_heads = 4;
    a.kv_heads = 2;
    a.head_dim = a.v_head_dim = 128;
    a.kv_len = kPages * kPageSize - 3;
    a.scale = 0.1f;
    a.q = {q.data(), 0, 512, 128};
    a.k = {base(k), kPageStride, 256, 128};
    a.v = {base(v), kPageStride, 256, 128};
    a.pages.entries = table.data();
    a.pages.row_stride = a.pages.width = kPages;
    a.pages.page_size = kPageSize;
    a.out = out.data();
    a.out_seq_stride = 512;
    a.out_head_stride = 128;
    REQUIRE_CUDA(launch_prefill(a, QWorkMap(), nullptr, 0, cudaStream_t{nullptr}));
    REQUIRE_CUDA(cudaDeviceSynchronize());
    results.push_back(bits_of(out.download()));
  }
  EXPECT_TRUE(results[0] == results[1]);
  EXPECT_TRUE(results[0] == results[2]);
}

// cases.md D7: keys whose element offset does not fit 32 bits.
ASTRAI_TEST(case_d7_offsets_beyond_2_to_the_31) {
  constexpr int kKeys = 40;
  constexpr int64_t kSeqStride = int64_t{1} << 27;  // 40 keys span 5.4e9 elements
  const size_t elements = static_cast<size_t>(kSeqStride) * kKeys;
  if (free_device_bytes() < elements * 2 + (size_t{1} << 30)) {
    SKIP_CASE("needs 12 GB of GPU memory");
  }
  Rng rng;
  const auto k = random_normal<__nv_bfloat16>(rng, kKeys * 128);
  const auto v = random_normal<__nv_bfloat16>(rng, kKeys * 128);
  DeviceBuffer<__nv_bfloat16> q(random_normal<__nv_bfloat16>(rng, 2 * 128));
  DeviceBuffer<__nv_bfloat16> k_device(k), v_device(v), wide(elements);
  for (int j = 0; j < kKeys; ++j) {
    __nv_bfloat16* row = wide.data() + j * kSeqStride;
    REQUIRE_CUDA(cudaMemcpy(row, k.data() + j * 128, 256, cudaMemcpyHostToDevice));
    REQUIRE_CUDA(cudaMemcpy(row + 128, v.data() + j * 128, 256, cudaMemcpyHostToDevice));
  }
  std::vector<std::vector<uint16_t>> results;
  for (const bool far : {false, true}) {
    DeviceBuffer<__nv_bfloat16> out(256);
    AttentionParams a;
    a.batch = a.q_len = a.kv_heads = 1;
    a.q_heads = 2;
    a.head_dim = a.v_head_dim = 128;
    a.kv_len = kKeys;
    a.scale = 0.1f;
    a.q = {q.data(), 256, 256, 128};
    a.k = {far ? wide.data() : k_device.data(), 0, far ? kSeqStride : 128, 0};
    a.v = {far ? wide.data() + 128 : v_device.data(), 0, far ? kSeqStride : 128, 0};
    a.out = out.data();
    a.out_batch_stride = a.out_seq_stride = 256;
    a.out_head_stride = 128;
    REQUIRE_CUDA(launch_prefill(a, QWorkMap(), nullptr, 0, cudaStream_t{nullptr}));
    REQUIRE_CUDA(cudaDeviceSynchronize());
    results.push_back(bits_of(out.download()));
  }
  EXPECT_TRUE(results[0] == results[1]);
}

// cases.md D3: the stride of a dimension of size 1 is arbitrary.
ASTRAI_TEST(case_d3_strides_of_size_1_dimensions_do_not_matter) {
  Rng rng;
  DeviceBuffer<__nv_bfloat16> q(random_normal<__nv_bfloat16>(rng, 128));
  DeviceBuffer<__nv_bfloat16> kv(random_normal<__nv_bfloat16>(rng, 128 * 50));
  std::vector<std::vector<uint16_t>> results;
  for (const int64_t stride : {int64_t{128}, int64_t{7}}) {
    DeviceBuffer<__nv_bfloat16> out(128);
    AttentionParams a;
    a.batch = a.q_len = a.q_heads = a.kv_heads = 1;
    a.head_dim = a.v_head_dim = 128;
    a.kv_len = 50;
    a.scale = 0.1f;
    a.q = {q.data(), stride, stride, stride};
    a.k = a.v = {kv.data(), stride, 128, stride};
    a.out = out.data();
    a.out_batch_stride = a.out_seq_stride = a.out_head_stride = stride;
    EXPECT_TRUE(rows_are_aligned(a));
    REQUIRE_CUDA(launch_prefill(a, QWorkMap(), nullptr, 0, cudaStream_t{nullptr}));
    REQUIRE_CUDA(cudaDeviceSynchronize());
    results.push_back(bits_of(out.download()));
  }
  EXPECT_TRUE(results[0] == results[1]);
}

// cases.md C2: nothing is launched, nothing is read.
ASTRAI_TEST(case_c2_empty_inputs_return_at_once) {
  AttentionParams a;
  a.q_heads = a.kv_heads = 1;
  a.head_dim = a.v_head_dim = 64;
  a.scale = 1.0f;
  a.kv_len = 8;
  const auto launch = [&] { return launch_prefill(a, QWorkMap(), nullptr, 0, nullptr); };
  EXPECT_EQ(launch(), cudaSuccess);  // no requests
  a.batch = 2;
  EXPECT_EQ(launch(), cudaSuccess);  // no queries
  const int32_t indptr[3] = {0, 0, 0};
  a.qo_indptr = indptr;
  a.q_len = 5;
  EXPECT_EQ(launch(), cudaSuccess);  // total_q = 0
  EXPECT_EQ(launch_q_work_map(nullptr, 0, nullptr, nullptr, 0, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace astrai::attention
