// Prefill from launch to launch: work maps, lengths that change under a captured graph, reused
// workspaces, batch invariance, arguments that are refused. Needs a GPU.
#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/attention/split_merge.cuh"
#include "tests/kernels/attention/prefill_run.h"

namespace astrai::attention {
namespace {

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
  a.scale = std::numeric_limits<float>::infinity();
  EXPECT_EQ(launch(a, QWorkMap()), cudaErrorInvalidValue);
  EXPECT_EQ(launch(s.a, {nullptr, nullptr, 4}), cudaErrorInvalidValue);
  EXPECT_EQ(launch(s.a, {s.map_batch.data(), s.map_tile.data(), -1}), cudaErrorInvalidValue);
  EXPECT_EQ(launch_q_work_map(nullptr, 1, s.map_batch.data(), s.map_tile.data(), 1, nullptr),
            cudaErrorInvalidValue);
  REQUIRE_CUDA(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace astrai::attention
