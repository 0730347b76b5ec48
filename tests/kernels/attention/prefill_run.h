// launch_prefill in the ways that its tests need: as a caller would, or with a plan of the test's
// own. The workspace is always poisoned.
#pragma once

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention/prefill_plan.h"
#include "tests/kernels/attention/attention_problem.h"

namespace astrai::attention {

enum class MapKind {
  kNone,
  kHost,      // the entries of build_q_work_map in random order, among some without work
  kOnDevice,  // launch_q_work_map
};

struct PrefillRun {
  int tile_rows = 0;  // forced, if not 0, where the kernel has such tiles
  int splits = 0;     // forced, if not 0
  MapKind map = MapKind::kHost;
  bool workspace = true;
  bool deterministic = false;
};

inline std::string describe(const PrefillRun& run) {
  return ", tile rows " + std::to_string(run.tile_rows) + ", splits " + std::to_string(run.splits) +
         ", map " + std::to_string(static_cast<int>(run.map)) +
         (run.workspace ? "" : ", no workspace") + (run.deterministic ? ", deterministic" : "");
}

// A work map for the queries of `p`, in device memory.
class TestMap {
 public:
  TestMap(Rng& rng, const AttentionParams& p, MapKind kind)
      : size_(kind == MapKind::kNone || p.qo_indptr == nullptr
                  ? 0
                  : static_cast<int>(q_work_map_capacity(p.batch, p.total_q)) + 3),
        batch_(size_),
        tile_(size_) {
    if (size_ == 0) return;
    if (kind == MapKind::kOnDevice) {
      REQUIRE_CUDA(launch_q_work_map(p.qo_indptr, p.batch, batch_.data(), tile_.data(), size_,
                                     cudaStream_t{nullptr}));
      return;
    }
    std::vector<int32_t> indptr(p.batch + 1), batch(size_, -1), tile(size_, -1);
    REQUIRE_CUDA(cudaMemcpy(indptr.data(), p.qo_indptr, indptr.size() * sizeof(int32_t),
                            cudaMemcpyDeviceToHost));
    build_q_work_map(indptr.data(), p.batch, batch.data(), tile.data());
    for (int i = size_ - 1; i > 0; --i) {
      const int j = static_cast<int>(rng.integer(0, i));
      std::swap(batch[i], batch[j]);
      std::swap(tile[i], tile[j]);
    }
    batch_.upload(batch);
    tile_.upload(tile);
  }
  QWorkMap view() const { return {batch_.data(), tile_.data(), size_}; }

 private:
  int size_;
  DeviceBuffer<int32_t> batch_, tile_;
};

inline cudaError_t launch_prefill_run(Rng& rng, AttentionParams p, const PrefillRun& run) {
  p.deterministic = run.deterministic;
  DeviceInfo device;
  REQUIRE_CUDA(current_device_info(&device));
  const TestMap map(rng, p, run.map);
  cudaError_t error;
  if (run.splits == 0 && run.tile_rows == 0) {
    DeviceBuffer<uint8_t> workspace(run.workspace ? prefill_workspace_bytes(p, device.sm_count)
                                                  : 0);
    error = launch_prefill(p, map.view(), workspace.data(), workspace.size(), nullptr);
    REQUIRE_CUDA(cudaDeviceSynchronize());
  } else {
    PrefillChoice choice = {run.tile_rows, run.splits};
    if (!has_large_prefill_tile(kernel_dims(p.head_dim, p.v_head_dim),
                                static_cast<int>(size_of(p.kv_dtype)))) {
      choice.tile_rows = kPrefillSmallRows;
    }
    const PrefillPlan plan = plan_prefill(p, map.view().size, device, size_t{1} << 32, choice);
    DeviceBuffer<uint8_t> workspace(plan.workspace_bytes);
    error = launch_prefill(p, map.view(), plan, workspace.data(), nullptr);
    REQUIRE_CUDA(cudaDeviceSynchronize());
  }
  return error;
}

template <typename T>
void run_prefill(Rng& rng, const Problem& problem, const PrefillRun& run = {}) {
  const Context context(describe(problem) + describe(run) +
                        (std::is_same_v<T, __nv_bfloat16> ? ", bf16" : ", fp16"));
  AttentionProblem<T> test(rng, problem);
  test.run([&](const AttentionParams& p) { return launch_prefill_run(rng, p, run); });
  test.check(rng);
}

// One of both types of q.
inline void run_prefill_any(Rng& rng, const Problem& problem, const PrefillRun& run = {}) {
  if (rng.coin()) {
    run_prefill<__nv_bfloat16>(rng, problem, run);
  } else {
    run_prefill<__half>(rng, problem, run);
  }
}

// Both types of q.
inline void run_prefill_both(Rng& rng, const Problem& problem, const PrefillRun& run = {}) {
  run_prefill<__nv_bfloat16>(rng, problem, run);
  run_prefill<__half>(rng, problem, run);
}

}  // namespace astrai::attention
