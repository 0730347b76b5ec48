// Prefill at the edges of its arguments, and across launches: extreme logits, page tables, offsets
// beyond 2^31, work maps, lengths that change under a captured graph, reused workspaces, batch
// invariance. Needs a GPU.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/attention/split_merge.cuh"
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

// Every tile of every request stands in a map once, and nothing else but entries without work.
void check_map(const std::vector<int32_t>& qo_indptr, const std::vector<int32_t>& batch,
               const std::vector<int32_t>& tile) {
  std::vector<std::vector<int>> seen(qo_indptr.size() - 1);
  for (size_t b = 0; b < seen.size(); ++b) {
    seen[b].assign((qo_indptr[b + 1] - qo_indptr[b] + kQMapRows - 1) / kQMapRows, 0);
  }
  for (size_t i = 0; i < batch.size(); ++i) {
    if (batch[i] < 0) continue;
    REQUIRE(batch[i] < static_cast<int>(seen.size()));
    REQUIRE(tile[i] >= 0 && tile[i] < static_cast<int>(seen[batch[i]].size()));
    ++seen[batch[i]][tile[i]];
  }
  for (const auto& tiles : seen) {
    for (const int count : tiles) EXPECT_EQ(count, 1);
  }
}

ASTRAI_TEST(work_maps_hold_every_tile_once) {
  Rng rng;
  for (int n = 0; n < 200; ++n) {
    const int batch = n == 0 ? 1 : static_cast<int>(rng.integer(1, n < 100 ? 10 : 400));
    const int most = rng.pick(std::vector<int>{0, 1, 2, 64, 65, 300});
    std::vector<int32_t> indptr = {0};
    for (int b = 0; b < batch; ++b) {
      indptr.push_back(indptr.back() + static_cast<int>(rng.integer(0, most)));
    }
    const int capacity = static_cast<int>(q_work_map_capacity(batch, indptr.back()));
    // Guards stand around the buffers, so an entry too many would show.
    std::vector<int32_t> map_batch(capacity, -1), map_tile(capacity, -1);
    const int used = build_q_work_map(indptr.data(), batch, map_batch.data(), map_tile.data());
    REQUIRE(used <= capacity);
    for (int i = 0; i < used; ++i) EXPECT_GE(map_batch[i], 0);
    check_map(indptr, map_batch, map_tile);
    const int size = capacity + static_cast<int>(rng.integer(0, 2) * 200);
    DeviceBuffer<int32_t> device_indptr(indptr), device_batch(size), device_tile(size);
    REQUIRE_CUDA(launch_q_work_map(device_indptr.data(), batch, device_batch.data(),
                                   device_tile.data(), size, cudaStream_t{nullptr}));
    REQUIRE_CUDA(cudaDeviceSynchronize());
    check_map(indptr, device_batch.download(), device_tile.download());
  }
}

// The lengths of spec.md 3.
ASTRAI_TEST(work_maps_of_the_host_are_in_order) {
  const int32_t indptr[] = {0, 70, 80, 210};
  int32_t batch[6], tile[6];
  EXPECT_EQ(q_work_map_capacity(3, 210), 6);
  EXPECT_EQ(build_q_work_map(indptr, 3, batch, tile), 6);
  EXPECT_TRUE(std::vector<int>(batch, batch + 6) == (std::vector<int>{0, 0, 1, 2, 2, 2}));
  EXPECT_TRUE(std::vector<int>(tile, tile + 6) == (std::vector<int>{0, 1, 0, 0, 1, 2}));
}

// Packed queries over packed keys, with lengths in device memory, for launches that follow each
// other.
struct Session {
  static constexpr int kHeads = 8, kKvHeads = 1, kDim = 64;
  int queries;
  int keys;
  DeviceBuffer<__nv_bfloat16> q, k, v, out;
  DeviceBuffer<int32_t> qo_indptr, kv_indptr, map_batch, map_tile;
  AttentionParams a;

  Session(Rng& rng, int batch, int q_len, int total_q, int total_keys)
      : queries(total_q),
        keys(total_keys),
        q(random_normal<__nv_bfloat16>(rng, size_t(total_q) * kHeads * kDim)),
        k(random_normal<__nv_bfloat16>(rng, size_t(total_keys) * kDim)),
        v(random_normal<__nv_bfloat16>(rng, size_t(total_keys) * kDim)),
        out(size_t(total_q) * kHeads * kDim),
        qo_indptr(batch + 1),
        kv_indptr(batch + 1),
        map_batch(q_work_map_capacity(batch, total_q)),
        map_tile(map_batch.size()) {
    a.batch = batch;
    a.q_len = q_len;
    a.total_q = total_q;
    a.q_heads = kHeads;
    a.kv_heads = kKvHeads;
    a.head_dim = a.v_head_dim = kDim;
    a.scale = 0.125f;
    a.causal = true;
    a.q = {q.data(), 0, kHeads * kDim, kDim};
    a.k = {k.data(), 0, kDim, kDim};
    a.v = {v.data(), 0, kDim, kDim};
    a.kv_len = total_keys;
    a.qo_indptr = qo_indptr.data();
    a.kv_indptr = kv_indptr.data();
    a.out = out.data();
    a.out_seq_stride = kHeads * kDim;
    a.out_head_stride = kDim;
  }
  void set_lengths(const std::vector<int>& q_lens, const std::vector<int>& kv_lens) {
    std::vector<int32_t> q_sums = {0}, kv_sums = {0};
    for (size_t b = 0; b < q_lens.size(); ++b) {
      REQUIRE(q_lens[b] <= a.q_len);
      q_sums.push_back(q_sums.back() + q_lens[b]);
      kv_sums.push_back(kv_sums.back() + kv_lens[b]);
    }
    REQUIRE(q_sums.back() <= queries && kv_sums.back() <= keys);
    qo_indptr.upload(q_sums);
    kv_indptr.upload(kv_sums);
  }
  // The map and the attention over it.
  cudaError_t launch(void* workspace, size_t bytes, cudaStream_t stream) {
    const int size = static_cast<int>(map_batch.size());
    const cudaError_t error = launch_q_work_map(qo_indptr.data(), a.batch, map_batch.data(),
                                                map_tile.data(), size, stream);
    if (error != cudaSuccess) return error;
    return launch_prefill(a, {map_batch.data(), map_tile.data(), size}, workspace, bytes, stream);
  }
  // The result of a launch of its own, without splits.
  std::vector<double> unsplit() {
    out.poison();
    REQUIRE_CUDA(launch(nullptr, 0, nullptr));
    REQUIRE_CUDA(cudaDeviceSynchronize());
    std::vector<double> values;
    for (const auto& x : out.download()) values.push_back(to_double(x));
    return values;
  }
  // Rows that exist; the others keep their poison.
  void expect_equal(const std::vector<double>& expected) {
    const std::vector<__nv_bfloat16> values = out.download();
    std::vector<__nv_bfloat16> rows;
    std::vector<double> expected_rows;
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(std::isnan(to_double(values[i])), std::isnan(expected[i]));
      if (std::isnan(expected[i])) continue;
      rows.push_back(values[i]);
      expected_rows.push_back(expected[i]);
    }
    EXPECT_CLOSE(rows, expected_rows, 6e-3, 2e-2);
  }
};

size_t workspace_bytes(const AttentionParams& a) {
  DeviceInfo device;
  REQUIRE_CUDA(current_device_info(&device));
  return prefill_workspace_bytes(a, device.sm_count);
}

// cases.md E1, E2: a graph captured with padding follows the lengths of each replay; entries that
// are not needed do nothing, and the workspace needs no initialisation.
ASTRAI_TEST(case_e2_captured_launches_follow_the_lengths) {
  Rng rng;
  Session s(rng, 8, 100, 300, 6000);
  DeviceBuffer<uint8_t> workspace(workspace_bytes(s.a));
  EXPECT_EQ(workspace.size() > 0, choose_variant(s.a) == Variant::kMma);
  cudaStream_t stream;
  REQUIRE_CUDA(cudaStreamCreate(&stream));
  s.set_lengths(std::vector<int>(8, 10), std::vector<int>(8, 128));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const cudaError_t launched = s.launch(workspace.data(), workspace.size(), stream);
  REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
  REQUIRE_CUDA(launched);
  REQUIRE_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  struct Lengths {
    std::vector<int> q, kv;
  };
  for (const Lengths& lengths : std::vector<Lengths>{
           {{10, 10, 10, 10, 10, 10, 10, 10}, {128, 128, 128, 128, 128, 128, 128, 128}},
           {{100, 3, 1, 0, 0, 0, 0, 0}, {5000, 3, 900, 0, 0, 0, 0, 0}},
           {{0, 0, 0, 100, 100, 99, 0, 1}, {0, 7, 0, 2000, 100, 3000, 0, 1}}}) {
    s.set_lengths(lengths.q, lengths.kv);
    const std::vector<double> expected = s.unsplit();
    for (int round = 0; round < 2; ++round) {
      s.out.poison();
      REQUIRE_CUDA(cudaGraphLaunch(exec, stream));
      REQUIRE_CUDA(cudaStreamSynchronize(stream));
      s.expect_equal(expected);
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
  Session a(rng, 1, 30, 30, 3000), b(rng, 5, 20, 60, 2000);
  a.set_lengths({30}, {3000});
  b.set_lengths({20, 3, 0, 17, 20}, {900, 3, 0, 77, 600});
  const size_t bytes = std::max(workspace_bytes(a.a), workspace_bytes(b.a));
  for (const int fill : {0xff, 0x00, 0x5a}) {
    DeviceBuffer<uint8_t> workspace(bytes);
    REQUIRE_CUDA(cudaMemset(workspace.data(), fill, bytes));
    for (int round = 0; round < 6; ++round) {
      Session& s = rng.coin() ? a : b;
      s.q.upload(random_normal<__nv_bfloat16>(rng, s.q.size(), 4.0));
      const std::vector<double> expected = s.unsplit();
      s.out.poison();
      REQUIRE_CUDA(s.launch(workspace.data(), rng.coin() ? bytes : bytes / 2, nullptr));
      REQUIRE_CUDA(cudaDeviceSynchronize());
      s.expect_equal(expected);
    }
  }
}

// Nothing that a launch leaves can be taken for a result of the next one: each flag is cleared, or
// was never set.
ASTRAI_TEST(launches_leave_no_flag_set) {
  Rng rng;
  Session s(rng, 3, 16, 40, 3000);
  s.set_lengths({16, 0, 7}, {2000, 0, 1000});
  DeviceInfo device;
  REQUIRE_CUDA(current_device_info(&device));
  const PrefillPlan plan = plan_prefill(s.a, 0, device, size_t{1} << 30, {kPrefillSmallRows, 5});
  if (plan.variant == Variant::kScalar) SKIP_CASE("a build without tensor cores splits no keys");
  DeviceBuffer<uint8_t> workspace(plan.workspace_bytes);
  REQUIRE_CUDA(launch_prefill(s.a, QWorkMap(), plan, workspace.data(), nullptr));
  REQUIRE_CUDA(cudaDeviceSynchronize());
  std::vector<uint8_t> bytes = workspace.download();
  const SplitWorkspace parts =
      split_workspace(bytes.data(), plan.blocks, plan.slot_rows, plan.dims.v);
  int cleared = 0;
  for (int slot = 0; slot < plan.blocks; ++slot) {
    uint64_t flag;
    std::memcpy(&flag, parts.flags + slot, sizeof(flag));
    EXPECT_TRUE(flag == 0 || flag == ~uint64_t{0});
    cleared += flag == 0;
  }
  // 16 queries are two row tiles of 5 parts, 7 are one of 4 (256 keys each).
  EXPECT_EQ(cleared, 14);
}

// cases.md E13: in a deterministic decode a row's bits do not depend on its neighbours, also where
// its rows are so many that they come here.
ASTRAI_TEST(case_e13_a_request_alone_equals_itself_in_a_batch) {
  Rng rng;
  Session s(rng, 5, 16, 60, 20000);
  s.a.deterministic = true;
  const std::vector<int> q_lens = {16, 3, 1, 16, 9}, kv_lens = {3000, 513, 40, 9000, 2049};
  s.set_lengths(q_lens, kv_lens);
  const auto launch = [](const AttentionParams& a) {
    DeviceInfo device;
    REQUIRE_CUDA(current_device_info(&device));
    DeviceBuffer<uint8_t> workspace(decode_workspace_bytes(a, device.sm_count));
    REQUIRE_CUDA(launch_decode(a, workspace.data(), workspace.size(), cudaStream_t{nullptr}));
    REQUIRE_CUDA(cudaDeviceSynchronize());
  };
  launch(s.a);
  const auto together = bits_of(s.out.download());
  int q_start = 0, kv_start = 0;
  for (int b = 0; b < 5; ++b) {
    DeviceBuffer<int32_t> q_indptr(std::vector<int32_t>{q_start, q_start + q_lens[b]});
    DeviceBuffer<int32_t> kv_indptr(std::vector<int32_t>{kv_start, kv_start + kv_lens[b]});
    s.out.poison();
    AttentionParams alone = s.a;
    alone.batch = 1;
    alone.qo_indptr = q_indptr.data();
    alone.kv_indptr = kv_indptr.data();
    alone.kv_len = kv_lens[b] + static_cast<int>(rng.integer(0, 2) * 5000);
    launch(alone);
    const auto bits = bits_of(s.out.download());
    const auto row = [](int token) { return int64_t{token} * Session::kHeads * Session::kDim; };
    EXPECT_TRUE(std::equal(bits.begin() + row(q_start), bits.begin() + row(q_start + q_lens[b]),
                           together.begin() + row(q_start)));
    q_start += q_lens[b];
    kv_start += kv_lens[b];
  }
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

ASTRAI_TEST(what_is_not_implemented_is_refused) {
  Rng rng;
  Session s(rng, 1, 70, 70, 100);
  s.set_lengths({70}, {100});
  const auto launch = [](const AttentionParams& a, const QWorkMap& map) {
    return launch_prefill(a, map, nullptr, 0, nullptr);
  };
  EXPECT_EQ(launch(s.a, QWorkMap()), cudaSuccess);
  AttentionParams a = s.a;
  a.head_dim = 36;
  EXPECT_EQ(launch(a, QWorkMap()), cudaErrorInvalidValue);
  a = s.a;
  a.q.data = nullptr;
  EXPECT_EQ(launch(a, QWorkMap()), cudaErrorInvalidValue);
  a = s.a;
  a.scale = kInf;
  EXPECT_EQ(launch(a, QWorkMap()), cudaErrorInvalidValue);
  EXPECT_EQ(launch(s.a, {nullptr, nullptr, 4}), cudaErrorInvalidValue);
  EXPECT_EQ(launch(s.a, {s.map_batch.data(), s.map_tile.data(), -1}), cudaErrorInvalidValue);
  EXPECT_EQ(launch_q_work_map(nullptr, 1, s.map_batch.data(), s.map_tile.data(), 1, nullptr),
            cudaErrorInvalidValue);
  REQUIRE_CUDA(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace astrai::attention
