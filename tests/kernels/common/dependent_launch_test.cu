// Programmatic dependent launch: kernels that overlap still see what the one before wrote, and do
// not overwrite what it reads. Below sm_90 the launches do not overlap.
#include <cstdint>
#include <vector>

#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/launch.h"
#include "kernels/common/ptx.cuh"
#include "tests/kernels/testing/device_buffer.h"
#include "tests/kernels/testing/testing.h"

namespace astrai {
namespace {

using namespace astrai::testing;

constexpr int kThreads = 128;

// A number that takes longer to compute in some blocks than in others.
__host__ __device__ uint32_t next_value(uint32_t value, int i) {
  const uint32_t rounds = value % 61 * (static_cast<uint32_t>(i) / kThreads % 7);
  for (uint32_t round = 0; round < rounds; ++round) value = value * 1664525u + 1013904223u;
  return value + static_cast<uint32_t>(i);
}

// out[i] follows from in[n - 1 - i]: blocks read what others wrote.
__global__ void step_kernel(const uint32_t* in, uint32_t* out, int n, bool let_next) {
  if (let_next) let_next_kernel_start();
  wait_for_previous_kernel();
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  uint32_t value[1];
  ptx::ld_global(value, in + (n - 1 - i));
  const uint32_t next[1] = {next_value(value[0], i)};
  ptx::st_global(out + i, next);
}

struct Chain {
  explicit Chain(const std::vector<uint32_t>& start)
      : values(start), a(start), b(start.size()), n(static_cast<int>(start.size())) {
    REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  ~Chain() { cudaStreamDestroy(stream); }

  // The same step on the host and on the device, between two buffers in turn.
  void step(bool let_next) {
    std::vector<uint32_t> next(values.size());
    for (int i = 0; i < n; ++i) next[i] = next_value(values[n - 1 - i], i);
    values = next;
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(ceil_div(n, kThreads)));
    config.block = dim3(kThreads);
    config.stream = stream;
    config.overlaps_previous = true;
    const uint32_t* in = in_a ? a.data() : b.data();
    uint32_t* out = in_a ? b.data() : a.data();
    REQUIRE_CUDA(launch<step_kernel>(config, in, out, n, let_next));
    in_a = !in_a;
  }
  void check() {
    REQUIRE_CUDA(cudaStreamSynchronize(stream));
    EXPECT_TRUE((in_a ? a : b).download() == values);
  }

  std::vector<uint32_t> values;
  DeviceBuffer<uint32_t> a, b;
  int n;
  bool in_a = true;
  cudaStream_t stream = nullptr;
};

std::vector<uint32_t> random_values(Rng& rng, int n) {
  std::vector<uint32_t> values(static_cast<size_t>(n));
  for (uint32_t& value : values) value = static_cast<uint32_t>(rng.integer(0, 1 << 30));
  return values;
}

ASTRAI_TEST(case_b4_a_thousand_launches_on_two_streams) {
  Rng rng;
  Chain small(random_values(rng, 70)), large(random_values(rng, 5000));
  for (int i = 0; i < 1000; ++i) {
    small.step(rng.coin());
    large.step(rng.coin());
  }
  small.check();
  large.check();
}

ASTRAI_TEST(captured_launches_overlap_as_well) {
  Rng rng;
  Chain chain(random_values(rng, 3000));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  REQUIRE_CUDA(cudaStreamBeginCapture(chain.stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < 40; ++i) chain.step(i % 3 != 0);
  REQUIRE_CUDA(cudaStreamEndCapture(chain.stream, &graph));
  REQUIRE_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  REQUIRE_CUDA(cudaGraphLaunch(exec, chain.stream));
  chain.check();
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

}  // namespace
}  // namespace astrai
