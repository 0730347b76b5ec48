// Decode at the edges of its arguments, and across launches: extreme logits, page tables, offsets
// beyond 2^31, lengths that change under a captured graph, reused workspaces, batch invariance.
// Needs a GPU.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/kernels/attention/decode_run.h"

namespace astrai::attention {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// cases.md C1: every logit lies in [-7e4, -6e4]; none of them may be taken for a masked one.
ASTRAI_TEST(case_c1_very_negative_logits_are_exact) {
  Rng rng;
  for (const int workers : {0, 3}) {
    for (const int kv_len : {2, 40, 300}) {
      Problem p;
      p.q_heads = 4;
      p.head_dim = 128;
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
      test.run([&](const AttentionParams& a) {
        return launch_decode_run(a, {false, workers, 1, true});
      });
      test.check(rng);
    }
  }
}

// Logits beyond 1e9, whose rounding in fp32 alone exceeds the range of exp2.
ASTRAI_TEST(huge_logits_do_not_overflow) {
  Rng rng;
  for (const double sign : {-1.0, 1.0}) {
    Problem p;
    p.q_heads = 2;
    p.kv_heads = 1;
    p.kv_lens = {100};
    p.scale = 1.0;
    AttentionProblem<__nv_bfloat16> test(rng, p);
    for (auto& x : test.q()) x = from_double<__nv_bfloat16>(sign * 65536.0);
    for (int j = 0; j < 100; ++j) {
      for (int d = 0; d < 64; ++d) test.k().set(test.k_at(0, j, 0) + d, 65536.0 * (1 + j % 7));
    }
    test.set_lse_tolerance(1e6);  // ulps of 1e12
    test.run([](const AttentionParams& a) { return launch_decode_run(a, {}); });
    test.check(rng);
  }
}

// A row without keys does not read what it must not see.
ASTRAI_TEST(rows_without_keys_ignore_nan_in_v) {
  Rng rng;
  for (const int shift : {0, 1}) {
    for (const bool sinks : {false, true}) {
      Problem p;
      p.head_dim = 128;
      p.kv_lens = {200, 200};
      p.mask = MaskKind::kBatchKv;
      p.sinks = sinks;
      p.shift = shift;
      AttentionProblem<__half> test(rng, p);
      std::fill(test.mask().begin(), test.mask().end(), 0);
      for (auto& byte : test.v().bytes) byte = 0xff;
      test.run([](const AttentionParams& a) { return launch_decode_run(a, {}); });
      for (const auto& x : test.out()) EXPECT_EQ(to_double(x), 0.0);
      for (const float x : test.lse()) EXPECT_TRUE(sinks ? std::isfinite(x) : x == -kInf);
    }
  }
}

// cases.md C7: nothing of a page past the request's length counts, whatever it holds.
ASTRAI_TEST(case_c7_last_pages_are_partly_filled) {
  Rng rng;
  for (const int page_size : {1, 16, 64}) {
    for (const bool fp8 : {false, true}) {
      Problem p;
      p.page_size = page_size;
      p.kv_lens = {page_size - 1, page_size, page_size + 1, 3 * page_size + 2};
      p.packed_kv = true;
      p.fp8 = fp8;
      run_decode_both(rng, p);
    }
  }
}

// cases.md D10: every page size.
ASTRAI_TEST(case_d10_every_page_size) {
  Rng rng;
  for (int page_size = 1; page_size <= 256; page_size *= 2) {
    for (const bool rows : {false, true}) {
      Problem p;
      p.head_dim = 128;
      p.page_size = page_size;
      p.table_rows = rows;
      p.kv_lens = {257, 31, 600};
      p.packed_kv = true;
      p.append = rows;
      run_decode_both(rng, p);
      run_decode_both(rng, p, {false, 5, 1, true});
    }
  }
}

// cases.md D11: entries past the last page are not read (in every paged test they lie far outside
// of the cache), here with a table as wide as its longest request.
ASTRAI_TEST(case_d11_entries_past_the_last_page_are_not_read) {
  Rng rng;
  for (const int page_size : {1, 64}) {
    Problem p;
    p.page_size = page_size;
    p.kv_lens = {257, 128, 5};
    p.packed_kv = true;
    run_decode_both(rng, p);
  }
}

// cases.md D12: negative entries are skipped.
ASTRAI_TEST(case_d12_holes_in_the_table_are_skipped) {
  Rng rng;
  for (const double holes : {0.2, 0.9, 1.0}) {
    for (const int page_size : {1, 4, 32}) {
      for (const int shift : {0, 1}) {
        Problem p;
        p.page_size = page_size;
        p.kv_lens = {200, 77};
        p.packed_kv = true;
        p.holes = holes;
        p.append = true;
        p.q_lens = {2};
        p.shift = shift;
        p.fp8 = rng.coin();
        run_decode_both(rng, p);
      }
    }
  }
}

// New tokens are in the cache and seen, whatever block has them.
ASTRAI_TEST(new_tokens_are_put_and_seen) {
  Rng rng;
  for (const bool fp8 : {false, true}) {
    for (const int window_left : {-1, 0, 3}) {
      for (const int workers : {0, 1, 9}) {
        Problem p;
        p.q_heads = 2;
        p.kv_heads = 2;
        p.head_dim = 96;
        p.page_size = 1 << rng.integer(0, 5);
        p.q_lens = {4, 1, 16, 9};
        p.packed_q = true;
        p.kv_lens = {64, 129, 16, 4};  // the last has more queries than keys
        p.packed_kv = true;
        p.append = true;
        p.causal = rng.coin();
        p.window_left = window_left;
        p.fp8 = fp8;
        p.k_scale = 0.4f;
        p.v_scale = 1.9f;
        run_decode_both(rng, p, {false, workers, 1, true});
        run_decode_both(rng, p, {true, 0, 1, true});
      }
    }
  }
}

// cases.md D1, D2: strides are those of the call, also when shapes repeat.
ASTRAI_TEST(case_d1_strides_of_every_call_are_honoured) {
  Rng rng;
  for (const Layout layout : {Layout::kContiguous, Layout::kHeadsFirst, Layout::kContiguous,
                              Layout::kInterleaved, Layout::kPadded}) {
    Problem p;
    p.q_heads = 24;
    p.kv_heads = 24;
    p.kv_lens = {100};
    p.layout = layout;
    run_decode_both(rng, p);
  }
}

ASTRAI_TEST(case_d2_interleaved_pages) {
  Rng rng;
  for (const bool append : {false, true}) {
    Problem p;
    p.head_dim = 128;
    p.page_size = 16;
    p.layout = Layout::kInterleaved;
    p.kv_lens = {100, 37};
    p.packed_kv = true;
    p.append = append;
    run_decode_both(rng, p);
  }
}

// cases.md D7: page index times stride beyond 2^31. The cache's base lies so far below the memory
// that only pages of high index are in it.
ASTRAI_TEST(case_d7_pages_of_high_index) {
  Rng rng;
  constexpr int kPages = 8, kPageSize = 16, kFirstPage = 300000;
  constexpr int64_t kPageStride = int64_t{kPageSize} * 2 * 128;
  const auto q = random_normal<__nv_bfloat16>(rng, 4 * 128);
  DeviceBuffer<__nv_bfloat16> q_device(q);
  DeviceBuffer<__nv_bfloat16> k(random_normal<__nv_bfloat16>(rng, kPages * kPageStride));
  DeviceBuffer<__nv_bfloat16> v(random_normal<__nv_bfloat16>(rng, kPages * kPageStride));
  std::vector<std::vector<uint16_t>> results;
  for (const int first_page : {0, kFirstPage, 100 * kFirstPage}) {
    std::vector<int32_t> entries;
    for (int i = 0; i < kPages; ++i) entries.push_back(first_page + (i * 3) % kPages);
    DeviceBuffer<int32_t> table(entries);
    DeviceBuffer<__nv_bfloat16> out(4 * 128);
    const auto base = [&](DeviceBuffer<__nv_bfloat16>& cache) {
      return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(cache.data()) -
                                           static_cast<uintptr_t>(first_page * kPageStride * 2));
    };
    AttentionParams a;
    a.batch = 1;
    a.q_len = 1;
    a.q_heads = 4;
    a.kv_heads = 2;
    a.head_dim = a.v_head_dim = 128;
    a.kv_len = kPages * kPageSize - 3;
    a.scale = 0.1f;
    a.q = {q_device.data(), 512, 512, 128};
    a.k = {base(k), kPageStride, 256, 128};
    a.v = {base(v), kPageStride, 256, 128};
    a.pages.entries = table.data();
    a.pages.row_stride = a.pages.width = kPages;
    a.pages.page_size = kPageSize;
    a.out = out.data();
    a.out_batch_stride = a.out_seq_stride = 512;
    a.out_head_stride = 128;
    REQUIRE_CUDA(launch_decode(a, nullptr, 0, cudaStream_t{nullptr}));
    REQUIRE_CUDA(cudaDeviceSynchronize());
    results.push_back(bits_of(out.download()));
  }
  EXPECT_TRUE(results[0] == results[1]);
  EXPECT_TRUE(results[0] == results[2]);
}

// A decode with lengths in device memory, for launches that follow each other.
struct Session {
  static constexpr int kHeads = 4, kKvHeads = 1, kDim = 64;
  int capacity;
  DeviceBuffer<__nv_bfloat16> q, k, v, out;
  DeviceBuffer<float> lse;
  DeviceBuffer<int32_t> kv_indptr;
  AttentionParams a;

  Session(Rng& rng, int batch, int keys)
      : capacity(keys),
        q(random_normal<__nv_bfloat16>(rng, size_t(batch) * kHeads * kDim)),
        k(random_normal<__nv_bfloat16>(rng, size_t(keys) * kDim)),
        v(random_normal<__nv_bfloat16>(rng, size_t(keys) * kDim)),
        out(size_t(batch) * kHeads * kDim),
        lse(size_t(batch) * kHeads),
        kv_indptr(batch + 1) {
    a.batch = batch;
    a.q_len = 1;
    a.q_heads = kHeads;
    a.kv_heads = kKvHeads;
    a.head_dim = a.v_head_dim = kDim;
    a.scale = 0.125f;
    a.q = {q.data(), kHeads * kDim, kHeads * kDim, kDim};
    a.k = {k.data(), 0, kDim, kDim};
    a.v = {v.data(), 0, kDim, kDim};
    a.kv_len = keys;
    a.kv_indptr = kv_indptr.data();
    a.out = out.data();
    a.out_batch_stride = a.out_seq_stride = kHeads * kDim;
    a.out_head_stride = kDim;
    a.lse = lse.data();
  }
  void set_lengths(const std::vector<int>& lengths) {
    std::vector<int32_t> sums = {0};
    for (const int length : lengths) sums.push_back(sums.back() + length);
    REQUIRE(sums.back() <= capacity);
    kv_indptr.upload(sums);
  }
  // The result of a launch of its own, without splits.
  std::vector<double> unsplit() {
    out.poison();
    REQUIRE_CUDA(launch_decode(a, nullptr, 0, cudaStream_t{nullptr}));
    REQUIRE_CUDA(cudaDeviceSynchronize());
    std::vector<double> values;
    for (const auto& x : out.download()) values.push_back(to_double(x));
    return values;
  }
};

// cases.md E1, E4: a graph captured at short lengths follows the lengths of each replay, as often
// as it is replayed.
ASTRAI_TEST(case_e1_captured_launches_follow_the_lengths) {
  Rng rng;
  Session s(rng, 3, 144000 + 200);
  DeviceInfo device;
  REQUIRE_CUDA(current_device_info(&device));
  DeviceBuffer<uint8_t> workspace(decode_workspace_bytes(s.a, device.sm_count));
  cudaStream_t stream;
  REQUIRE_CUDA(cudaStreamCreate(&stream));
  s.set_lengths({128, 128, 128});
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const cudaError_t launched = launch_decode(s.a, workspace.data(), workspace.size(), stream);
  REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
  REQUIRE_CUDA(launched);
  REQUIRE_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (const std::vector<int>& lengths : std::vector<std::vector<int>>{
           {128, 128, 128}, {4096, 1, 77}, {0, 32768, 5}, {9, 0, 144000}}) {
    s.set_lengths(lengths);
    const std::vector<double> expected = s.unsplit();
    for (int round = 0; round < 3; ++round) {
      s.out.poison();
      REQUIRE_CUDA(cudaGraphLaunch(exec, stream));
      REQUIRE_CUDA(cudaStreamSynchronize(stream));
      EXPECT_CLOSE(s.out.download(), expected, 6e-3, 1e-2);
    }
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// cases.md E2, E4: a workspace needs no initialisation, and serves launches of any shapes in turn.
// Each has queries of its own, so that what an earlier one left would show.
ASTRAI_TEST(case_e4_workspaces_are_reused_by_other_shapes) {
  Rng rng;
  Session a(rng, 1, 3000), b(rng, 7, 2000);
  a.set_lengths({3000});
  b.set_lengths({900, 0, 3, 77, 400, 1, 500});
  DeviceInfo device;
  REQUIRE_CUDA(current_device_info(&device));
  const size_t bytes = std::max(decode_workspace_bytes(a.a, device.sm_count),
                                decode_workspace_bytes(b.a, device.sm_count));
  for (const int fill : {0xff, 0x00, 0x5a}) {
    DeviceBuffer<uint8_t> workspace(bytes);
    REQUIRE_CUDA(cudaMemset(workspace.data(), fill, bytes));
    for (int round = 0; round < 20; ++round) {
      Session& s = rng.coin() ? a : b;
      s.q.upload(random_normal<__nv_bfloat16>(rng, s.q.size(), 4.0));
      const std::vector<double> expected = s.unsplit();
      s.out.poison();
      REQUIRE_CUDA(launch_decode(s.a, workspace.data(), rng.coin() ? bytes : bytes / 2,
                                 cudaStream_t{nullptr}));
      REQUIRE_CUDA(cudaDeviceSynchronize());
      EXPECT_CLOSE(s.out.download(), expected, 6e-3, 2e-2);
    }
  }
}

// Nothing that a launch leaves can be taken for a result of the next one: each flag is cleared, or
// was never set.
ASTRAI_TEST(launches_leave_no_flag_set) {
  Rng rng;
  Session s(rng, 3, 3000);
  s.set_lengths({2000, 0, 1000});
  const DecodePlan plan = plan_decode(s.a, residency_of_clusters(1), size_t{1} << 30, 9);
  if (plan.variant == Variant::kScalar) SKIP_CASE("a build without tensor cores splits no keys");
  EXPECT_EQ(plan.workers, 9);
  DeviceBuffer<uint8_t> workspace(plan.workspace_bytes);
  REQUIRE_CUDA(launch_decode(s.a, plan, workspace.data(), nullptr));
  REQUIRE_CUDA(cudaDeviceSynchronize());
  std::vector<uint8_t> bytes = workspace.download();
  const SplitWorkspace parts =
      split_workspace(bytes.data(), plan.workers * 2, kMmaRows, plan.dims.v);
  int cleared = 0;
  for (int slot = 0; slot < plan.workers * 2; ++slot) {
    uint64_t flag;
    std::memcpy(&flag, parts.flags + slot, sizeof(flag));
    EXPECT_TRUE(flag == 0 || flag == ~uint64_t{0});
    cleared += flag == 0;
  }
  EXPECT_GE(cleared, 9);
}

// cases.md E13: in a deterministic launch a row's bits do not depend on its neighbours.
ASTRAI_TEST(case_e13_a_request_alone_equals_itself_in_a_batch) {
  Rng rng;
  Session s(rng, 64, 40000);
  s.a.deterministic = true;
  DeviceInfo device;
  REQUIRE_CUDA(current_device_info(&device));
  DeviceBuffer<uint8_t> workspace(decode_workspace_bytes(s.a, device.sm_count));
  const auto launch = [&](const AttentionParams& a) {
    REQUIRE_CUDA(launch_decode(a, workspace.data(), workspace.size(), cudaStream_t{nullptr}));
    REQUIRE_CUDA(cudaDeviceSynchronize());
  };
  std::vector<int> lengths;
  for (int b = 0; b < 64; ++b) lengths.push_back(static_cast<int>(rng.integer(0, 400)));
  lengths[5] = 8193;
  lengths[6] = 3000;
  lengths[63] = 513;
  s.set_lengths(lengths);
  launch(s.a);
  const auto together = bits_of(s.out.download());
  int start = 0;
  for (int b = 0; b < 64; ++b) {
    if (b < 8 || b == 63) {
      DeviceBuffer<int32_t> indptr(std::vector<int32_t>{start, start + lengths[b]});
      DeviceBuffer<__nv_bfloat16> out(Session::kHeads * Session::kDim);
      AttentionParams alone = s.a;
      alone.batch = 1;
      alone.kv_indptr = indptr.data();
      alone.kv_len = lengths[b] + static_cast<int>(rng.integer(0, 2) * 5000);
      alone.q.data = s.q.data() + b * Session::kHeads * Session::kDim;
      alone.out = out.data();
      launch(alone);
      const auto bits = bits_of(out.download());
      EXPECT_TRUE(std::equal(bits.begin(), bits.end(),
                             together.begin() + b * Session::kHeads * Session::kDim));
    }
    start += lengths[b];
  }
}

ASTRAI_TEST(what_decode_cannot_take_is_refused) {
  Rng rng;
  Session s(rng, 1, 100);
  s.set_lengths({100});
  AttentionParams a = s.a;
  a.q_len = kMaxDecodeQueries + 1;
  EXPECT_EQ(launch_decode(a, nullptr, 0, cudaStream_t{nullptr}), cudaErrorInvalidValue);
  a = s.a;
  a.head_dim = 36;
  EXPECT_EQ(launch_decode(a, nullptr, 0, cudaStream_t{nullptr}), cudaErrorInvalidValue);
  // cases.md C2: nothing is launched, nothing is read.
  a = AttentionParams();
  a.q_heads = a.kv_heads = 1;
  a.head_dim = a.v_head_dim = 64;
  a.scale = 1.0f;
  EXPECT_EQ(launch_decode(a, nullptr, 0, cudaStream_t{nullptr}), cudaSuccess);
  REQUIRE_CUDA(cudaGetLastError());
}

}  // namespace
}  // namespace astrai::attention
