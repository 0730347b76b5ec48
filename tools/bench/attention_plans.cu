// Times attention with every plan forced: what the constants of kernels/attention/cost_model.h were
// fitted to.
//
//     bazel run //tools/bench:attention_plans
//
// Each line gives the time of the plan that plan.cc chooses, of every other split count (decode) or
// tile height (prefill), and the regret: chosen time / best time. CUDA graph replay, random bf16
// data, median of 9; decode inputs above the L2 cache are rotated past it.

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/attention/plan.h"
#include "kernels/common/device.h"

namespace astrai::attention {
namespace {

constexpr double kL2Bytes = 60e6;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, #call)

// Normally distributed values: zeros would run faster than real data.
__global__ void fill_random(__nv_bfloat16* out, size_t count, unsigned seed) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += step) {
    unsigned long long bits = (i + seed * 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
    bits = (bits ^ (bits >> 31)) * 0x94d049bb133111ebull;
    bits ^= bits >> 29;
    const float u1 = ((bits & 0xffffff) + 1) / 16777217.0f;
    const float u2 = ((bits >> 32) & 0xffffff) / 16777216.0f;
    out[i] = __float2bfloat16(sqrtf(-2.0f * logf(u1)) * cospif(2.0f * u2));
  }
}

struct Shape {
  int batch, q_len, kv_len, q_heads, kv_heads, head_dim;
  bool causal;
};

// Device tensors of one call, contiguous [batch, seq, heads, head_dim].
class Tensors {
 public:
  explicit Tensors(const Shape& s) : shape_(s) {
    const size_t q_count = size_t(s.batch) * s.q_len * s.q_heads * s.head_dim;
    const size_t kv_count = size_t(s.batch) * s.kv_len * s.kv_heads * s.head_dim;
    unsigned seed = 1;
    for (auto [pointer, count] :
         {std::pair{&q_, q_count}, {&out_, q_count}, {&k_, kv_count}, {&v_, kv_count}}) {
      CHECK(cudaMalloc(pointer, count * sizeof(__nv_bfloat16)));
      fill_random<<<1024, 256>>>(*pointer, count, seed++);
    }
    CHECK(cudaDeviceSynchronize());
  }
  ~Tensors() {
    for (void* pointer : {q_, out_, k_, v_}) cudaFree(pointer);
  }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  DenseParams params() const {
    const Shape& s = shape_;
    const auto operand = [&](const void* data, int seq, int heads) {
      return Operand{data, int64_t(seq) * heads * s.head_dim, int64_t(heads) * s.head_dim,
                     s.head_dim};
    };
    DenseParams p;
    p.batch = s.batch;
    p.q_len = s.q_len;
    p.kv_len = s.kv_len;
    p.q_heads = s.q_heads;
    p.kv_heads = s.kv_heads;
    p.head_dim = s.head_dim;
    p.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
    p.causal = s.causal;
    p.q = operand(q_, s.q_len, s.q_heads);
    p.k = operand(k_, s.kv_len, s.kv_heads);
    p.v = operand(v_, s.kv_len, s.kv_heads);
    p.out = out_;
    p.out_batch_stride = p.q.batch_stride;
    p.out_seq_stride = p.q.seq_stride;
    p.out_head_stride = p.q.head_stride;
    return p;
  }

 private:
  Shape shape_;
  __nv_bfloat16 *q_ = nullptr, *out_ = nullptr, *k_ = nullptr, *v_ = nullptr;
};

// Microseconds of one of `calls` calls launch(index, stream) in a replayed graph.
template <typename Launch>
double microseconds(int calls, Launch launch) {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  for (int i = 0; i < 3; ++i) launch(i, stream);
  CHECK(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < calls; ++i) launch(i, stream);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&replay, graph, 0));
  CHECK(cudaGraphLaunch(replay, stream));
  CHECK(cudaStreamSynchronize(stream));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times(9);
  for (float& time : times) {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(replay, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&time, begin, end));
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::nth_element(times.begin(), times.begin() + 4, times.end());
  return times[4] * 1e3 / calls;
}

void time_prefill(const DeviceInfo& device, const Shape& shape) {
  const Tensors tensors(shape);
  const DenseParams p = tensors.params();
  const double flops = 4.0 * shape.batch * shape.q_heads * double(shape.q_len) * shape.kv_len *
                       shape.head_dim / (shape.causal ? 2 : 1);
  const int calls = std::clamp(static_cast<int>(4e13 / flops), 1, 40);
  const auto time = [&](int rows) {
    const PrefillPlan plan = plan_prefill(p, device, rows);
    return microseconds(calls, [&](int, cudaStream_t s) { CHECK(launch_prefill(p, plan, s)); });
  };
  const double chosen = time(0);
  const double small = time(kPrefillSmallRows), large = time(kPrefillLargeRows);
  std::printf(
      "prefill B%d %d/%d D%d S%d %s: %d rows %.2f us %.1f TFLOP/s | 64 %.2f 128 %.2f | regret "
      "%.3f\n",
      shape.batch, shape.q_heads, shape.kv_heads, shape.head_dim, shape.q_len,
      shape.causal ? "causal" : "full", plan_prefill(p, device).tile_rows, chosen,
      flops / chosen / 1e6, small, large, chosen / std::min(small, large));
}

void time_decode(const DeviceInfo& device, const Shape& shape) {
  const double bytes = 4.0 * shape.batch * shape.kv_len * shape.kv_heads * shape.head_dim;
  const int sets = bytes < kL2Bytes ? 1 : std::max(2, static_cast<int>(4.3 * kL2Bytes / bytes) + 1);
  std::vector<std::unique_ptr<Tensors>> tensors;
  for (int i = 0; i < sets; ++i) tensors.push_back(std::make_unique<Tensors>(shape));
  constexpr size_t kWorkspace = 64 << 20;
  void* workspace;
  CHECK(cudaMalloc(&workspace, kWorkspace));
  const int calls = std::max(sets, std::min(200, static_cast<int>(2e10 / bytes)));
  const auto time = [&](const DecodePlan& plan) {
    return microseconds(calls, [&](int i, cudaStream_t s) {
      CHECK(launch_decode(tensors[i % sets]->params(), plan, workspace, s));
    });
  };
  const DenseParams p = tensors[0]->params();
  const DecodePlan plan = plan_decode(p, device, kWorkspace);
  const double chosen = time(plan);
  double best = chosen;
  std::printf("decode B%d %d/%d D%d kv%d: %d splits %.2f us %.2f TB/s |", shape.batch,
              shape.q_heads, shape.kv_heads, shape.head_dim, shape.kv_len, plan.splits, chosen,
              bytes / chosen / 1e6);
  for (int splits : {1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 33, 48, 66}) {
    const int64_t blocks = int64_t{splits} * shape.batch * shape.kv_heads;
    if (splits > (shape.kv_len + 31) / 32 || blocks > 1600) continue;
    const DecodePlan forced = plan_decode(p, device, kWorkspace, splits);
    if (forced.workspace_bytes > kWorkspace) continue;
    const double us = time(forced);
    best = std::min(best, us);
    std::printf(" %d %.2f", splits, us);
  }
  std::printf(" | regret %.3f\n", chosen / best);
  cudaFree(workspace);
}

void run() {
  DeviceInfo device;
  CHECK(current_device_info(&device));
  for (const Shape& heads : {Shape{1, 0, 0, 32, 8, 128, false},
                             {4, 0, 0, 32, 8, 128, false},
                             {2, 0, 0, 32, 32, 64, false},
                             {2, 0, 0, 16, 4, 256, false}}) {
    for (int length : {512, 1024, 2048, 4096}) {
      for (bool causal : {true, false}) {
        Shape shape = heads;
        shape.q_len = shape.kv_len = length;
        shape.causal = causal;
        time_prefill(device, shape);
      }
    }
  }
  for (int batch : {1, 2, 4, 8, 16, 20, 24, 32, 40, 64}) {
    for (int length : {512, 2048, 8192}) {
      time_decode(device, {batch, 1, length, 32, 8, 128, false});
    }
  }
  for (int batch : {1, 8, 16, 64}) {
    for (int length : {512, 2048, 8192}) {
      time_decode(device, {batch, 1, length, 16, 2, 256, false});
      time_decode(device, {batch, 1, length, 16, 16, 64, false});
    }
  }
}

}  // namespace
}  // namespace astrai::attention

int main() { astrai::attention::run(); }
