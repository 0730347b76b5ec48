// launch_decode in the ways that its tests need: as a caller would, or with a plan of the test's
// own. The workspace is always poisoned.
#pragma once

#include <memory>
#include <string>

#include "kernels/attention/decode_args.cuh"
#include "kernels/attention/decode_plan.h"
#include "tests/kernels/attention/attention_problem.h"

namespace astrai::attention {

struct DecodeRun {
  bool deterministic = false;
  int workers = 0;         // forced, if not 0
  int cluster_blocks = 1;  // with forced workers
  bool workspace = true;
};

inline std::string describe(const DecodeRun& run) {
  return std::string(run.deterministic ? ", deterministic" : "") +
         (run.workers > 0 ? ", workers " + std::to_string(run.workers) + " of " +
                                std::to_string(run.cluster_blocks) + " blocks"
                          : "") +
         (run.workspace ? "" : ", no workspace");
}

// What a device would hold that has only clusters of this size.
inline Residency residency_of_clusters(int cluster_blocks) {
  Residency residency;
  residency.clusters[0] = 1;
  for (int log2 = 1; log2 < kClusterSizes; ++log2) {
    if (1 << log2 == cluster_blocks) residency.clusters[log2] = 1 << 20;
  }
  return residency;
}

inline cudaError_t launch_decode_run(AttentionParams p, const DecodeRun& run) {
  p.deterministic = run.deterministic;
  DeviceInfo device;
  REQUIRE_CUDA(current_device_info(&device));
  if (run.workers == 0) {
    DeviceBuffer<uint8_t> workspace(run.workspace ? decode_workspace_bytes(p, device.sm_count) : 0);
    const cudaError_t error =
        launch_decode(p, workspace.data(), workspace.size(), cudaStream_t{nullptr});
    REQUIRE_CUDA(cudaDeviceSynchronize());
    return error;
  }
  const DecodePlan plan =
      plan_decode(p, residency_of_clusters(run.cluster_blocks), size_t{1} << 30, run.workers);
  DeviceBuffer<uint8_t> workspace(plan.workspace_bytes);
  const cudaError_t error = launch_decode(p, plan, workspace.data(), nullptr);
  REQUIRE_CUDA(cudaDeviceSynchronize());
  return error;
}

// Whether the device runs clusters, and has been given code for them.
inline bool device_has_clusters() {
  Residency residency;
#ifndef ASTRAI_NO_MMA
  using Kernel = DecodeKernel<__nv_bfloat16, 64, 64, ContigKV<__nv_bfloat16>>;
  REQUIRE_CUDA(Kernel::residency(&residency));
#endif
  return residency.clusters[3] > 0;
}

template <typename T>
void run_decode(Rng& rng, const Problem& problem, const DecodeRun& run = {}) {
  const Context context(describe(problem) + describe(run) +
                        (std::is_same_v<T, __nv_bfloat16> ? ", bf16" : ", fp16"));
  AttentionProblem<T> test(rng, problem);
  test.run([&](const AttentionParams& p) { return launch_decode_run(p, run); });
  test.check(rng);
}

// Both types of q.
inline void run_decode_both(Rng& rng, const Problem& problem, const DecodeRun& run = {}) {
  run_decode<__nv_bfloat16>(rng, problem, run);
  run_decode<__half>(rng, problem, run);
}

}  // namespace astrai::attention
