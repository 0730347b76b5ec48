// Times attention with every plan forced: what the constants of kernels/attention/prefill_plan.cc
// and decode_plan.cc are fitted to.
//
//     bazel run //tools/bench:attention_plans [-- prefill | decode]
//
// Each line gives the time of the plan that is chosen, of every other (prefill: tile height x
// splits of the keys; decode: workers x blocks of a cluster), and the regret: chosen time / best
// time. CUDA graph replay, random bf16 data, median of 9; decode inputs above the L2 cache are
// rotated past it.

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/attention/decode_plan.h"
#include "kernels/attention/prefill_plan.h"
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

  AttentionParams params() const {
    const Shape& s = shape_;
    const auto operand = [&](const void* data, int seq, int heads) {
      return Operand{data, int64_t(seq) * heads * s.head_dim, int64_t(heads) * s.head_dim,
                     s.head_dim};
    };
    AttentionParams p;
    p.batch = s.batch;
    p.q_len = s.q_len;
    p.kv_len = s.kv_len;
    p.q_heads = s.q_heads;
    p.kv_heads = s.kv_heads;
    p.head_dim = p.v_head_dim = s.head_dim;
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

class Workspace {
 public:
  static constexpr size_t kBytes = 64 << 20;
  Workspace() { CHECK(cudaMalloc(&data_, kBytes)); }
  ~Workspace() { cudaFree(data_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
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
  const AttentionParams p = tensors.params();
  const double flops = 4.0 * shape.batch * shape.q_heads * double(shape.q_len) * shape.kv_len *
                       shape.head_dim / (shape.causal && shape.q_len == shape.kv_len ? 2 : 1);
  const int calls = std::clamp(static_cast<int>(4e13 / flops), 1, 40);
  const Workspace workspace;
  const auto time = [&](const PrefillPlan& plan) {
    return microseconds(calls, [&](int, cudaStream_t s) {
      CHECK(launch_prefill(p, QWorkMap(), plan, workspace.data(), s));
    });
  };
  const PrefillPlan plan = plan_prefill(p, 0, device, Workspace::kBytes);
  const double chosen = time(plan);
  double best = chosen;
  std::printf("prefill B%d %d/%d D%d q%d kv%d %s: %d rows, %d splits %.2f us %.1f TFLOP/s |",
              shape.batch, shape.q_heads, shape.kv_heads, shape.head_dim, shape.q_len, shape.kv_len,
              shape.causal ? "causal" : "full", plan.tile_rows, plan.splits, chosen,
              flops / chosen / 1e6);
  for (int rows : {kPrefillSmallRows, kPrefillLargeRows}) {
    for (int splits : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48}) {
      const PrefillPlan forced = plan_prefill(p, 0, device, Workspace::kBytes, {rows, splits});
      if (splits > 1 && (forced.blocks > 800 || forced.workspace_bytes > Workspace::kBytes)) break;
      const double us = time(forced);
      best = std::min(best, us);
      std::printf(" %dx%d %.2f", rows, splits, us);
    }
  }
  std::printf(" | regret %.3f\n", chosen / best);
}

// What the device would hold if it had clusters of one size only.
Residency residency_of(const DeviceInfo& device, int cluster_log2) {
  Residency residency;
  residency.clusters[0] = device.sm_count * kDecodeBlocksPerSm;
  if (cluster_log2 > 0) {
    residency.clusters[cluster_log2] = residency.clusters[0] >> cluster_log2;
  }
  return residency;
}

void time_decode(const DeviceInfo& device, const Shape& shape) {
  const double bytes = 4.0 * shape.batch * shape.kv_len * shape.kv_heads * shape.head_dim;
  const int sets = bytes < kL2Bytes ? 1 : std::max(2, static_cast<int>(4.3 * kL2Bytes / bytes) + 1);
  std::vector<std::unique_ptr<Tensors>> tensors;
  for (int i = 0; i < sets; ++i) tensors.push_back(std::make_unique<Tensors>(shape));
  const Workspace workspace;
  const int calls = std::max(sets, std::min(200, static_cast<int>(2e10 / bytes)));
  const double chosen = microseconds(calls, [&](int i, cudaStream_t s) {
    CHECK(launch_decode(tensors[i % sets]->params(), workspace.data(), Workspace::kBytes, s));
  });
  const AttentionParams p = tensors[0]->params();
  double best = chosen;
  std::printf(
      "decode B%d %d/%d D%d kv%d: %.2f us %.2f TB/s | workers x blocks of a cluster:", shape.batch,
      shape.q_heads, shape.kv_heads, shape.head_dim, shape.kv_len, chosen, bytes / chosen / 1e6);
  for (int log2 = 0; log2 < kClusterSizes; ++log2) {
    const Residency residency = residency_of(device, log2);
    const int most = std::min(residency.clusters[log2], kMostWorkers);
    const int pairs = shape.batch * shape.kv_heads;
    std::vector<int> counts = {most, most / 2};  // all workers that fit, and as many for each pair
    for (int each = 1; each * pairs <= std::min(most, 64 * pairs); each *= 2) {
      counts.push_back(each * pairs);
    }
    for (const int workers : counts) {
      const DecodePlan plan = plan_decode(p, residency, Workspace::kBytes, workers);
      if (plan.cluster_blocks != 1 << log2) continue;  // too many for the pairs
      const double us = microseconds(calls, [&](int i, cudaStream_t s) {
        CHECK(launch_decode(tensors[i % sets]->params(), plan, workspace.data(), s));
      });
      best = std::min(best, us);
      std::printf(" %dx%d %.2f", plan.workers, plan.cluster_blocks, us);
    }
  }
  std::printf(" | regret %.3f\n", chosen / best);
}

void time_prefills(const DeviceInfo& device) {
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
  // Few queries and many keys: chunks of a long prompt, and what decode hands over.
  for (int q_len : {4, 16, 64, 256}) {
    for (int kv_len : {2048, 8192, 32768}) {
      time_prefill(device, {1, q_len, kv_len, 64, 8, 128, true});
      time_prefill(device, {4, q_len, kv_len, 32, 8, 128, true});
    }
  }
}

void time_decodes(const DeviceInfo& device) {
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

void run(const std::string& only) {
  DeviceInfo device;
  CHECK(current_device_info(&device));
  if (only != "decode") time_prefills(device);
  if (only != "prefill") time_decodes(device);
}

}  // namespace
}  // namespace astrai::attention

int main(int argc, char** argv) { astrai::attention::run(argc > 1 ? argv[1] : ""); }
