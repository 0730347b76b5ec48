// Attention at the edges of its arguments: extreme logits, empty inputs, offsets beyond 2^31, graph
// capture, and what is refused. Needs a GPU.
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/attention/attention_case.h"

namespace astrai::attention {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// cases.md C1: every logit lies in [-7e4, -6e4]; none of them may be taken for a masked one.
ASTRAI_TEST(case_c1_very_negative_logits_are_exact) {
  Rng rng;
  for (const bool decode : {true, false}) {
    for (const int splits : {0, 2}) {
      if (!decode && splits != 0) continue;
      for (const int kv_len : {2, 40, 300}) {
        Options options;
        options.decode = decode;
        options.splits = splits;
        options.scale = 1.0;
        const Shape shape = {1, decode ? 1 : 70, kv_len, 4, 2, 128};
        const Context context(describe(shape, options));
        AttentionCase<__nv_bfloat16> test(rng, shape, options);
        // q = -23 in every element, k between 20.5 and 23.5 in steps of 1/8: logits are exact in
        // fp32.
        for (auto& x : test.q()) {
          if (!std::isnan(to_double(x))) x = from_double<__nv_bfloat16>(-23.0);
        }
        for (int j = 0; j < kv_len; ++j) {
          for (int h = 0; h < shape.kv_heads; ++h) {
            auto* row = test.k().data() + test.k_strides().at(0, j, h);
            for (int d = 0; d < 128; ++d) {
              row[d] =
                  from_double<__nv_bfloat16>(22.0 + (d < 8 ? rng.integer(-1, 1) * 0.125 : 0.0));
            }
          }
        }
        test.set_lse_tolerance(
            0.05);  // half an ulp of fp32 at 7e4 is 0.004, in base 2 as in base e
        test.run();
        test.check(rng);
      }
    }
  }
}

// Logits beyond 1e9, whose rounding in fp32 alone exceeds the range of exp2.
ASTRAI_TEST(huge_logits_do_not_overflow) {
  Rng rng;
  for (const double sign : {-1.0, 1.0}) {
    for (const bool decode : {true, false}) {
      Options options;
      options.decode = decode;
      options.scale = 1.0;
      const Shape shape = {1, decode ? 1 : 20, 100, 2, 1, 64};
      AttentionCase<__nv_bfloat16> test(rng, shape, options);
      for (auto& x : test.q()) x = from_double<__nv_bfloat16>(sign * 65536.0);
      for (int j = 0; j < shape.kv_len; ++j) {
        auto* row = test.k().data() + test.k_strides().at(0, j, 0);
        for (int d = 0; d < 64; ++d) row[d] = from_double<__nv_bfloat16>(65536.0 * (1 + j % 7));
      }
      test.set_lse_tolerance(1e6);  // ulps of 1e12
      test.run();
      test.check(rng);
    }
  }
}

// A NaN in a visible key reaches the rows that see it, and only those.
ASTRAI_TEST(nan_in_a_visible_key_is_not_lost) {
  Rng rng;
  Options options;
  options.causal = true;
  const Shape shape = {1, 100, 100, 2, 1, 64};
  AttentionCase<__nv_bfloat16> test(rng, shape, options);
  const int poisoned = 64;
  test.k()[test.k_strides().at(0, poisoned, 0)] =
      from_double<__nv_bfloat16>(std::numeric_limits<double>::quiet_NaN());
  test.run();
  for (int i = 0; i < shape.q_len; ++i) {
    for (int h = 0; h < 2; ++h) {
      const double x = to_double(test.out()[test.q_strides().at(0, i, h)]);
      EXPECT_EQ(std::isnan(x), i >= poisoned);
      EXPECT_EQ(std::isnan(test.lse()[i * 2 + h]), i >= poisoned);
    }
  }
}

// All-false masks, with NaN in V: a row without keys does not read what it must not see.
ASTRAI_TEST(rows_without_keys_ignore_nan_in_v) {
  Rng rng;
  for (const bool decode : {true, false}) {
    for (const int shift : {0, 1}) {
      Options options;
      options.decode = decode;
      options.mask = MaskKind::kBatchKv;
      options.shift = shift;
      const Shape shape = {2, decode ? 1 : 90, 200, 4, 2, 128};
      AttentionCase<__half> test(rng, shape, options);
      std::fill(test.mask().begin(), test.mask().end(), 0);
      for (auto& x : test.v()) x = from_double<__half>(std::numeric_limits<double>::quiet_NaN());
      test.run();
      for (const auto& x : test.out()) EXPECT_EQ(to_double(x), 0.0);
      for (const float x : test.lse()) EXPECT_EQ(x, -kInf);
    }
  }
}

ASTRAI_TEST(a_scale_of_zero_averages_the_values) {
  Rng rng;
  for (const bool decode : {true, false}) {
    Options options;
    options.decode = decode;
    options.scale = 1e-44;  // below the smallest normal number, as good as zero
    run_both(rng, {2, decode ? 1 : 40, 130, 4, 2, 128}, options);
  }
}

DenseParams small_params() {
  DenseParams p;
  p.batch = 1;
  p.q_len = 1;
  p.kv_len = 8;
  p.q_heads = 4;
  p.kv_heads = 2;
  p.head_dim = 64;
  p.scale = 0.125f;
  return p;
}

// cases.md C2: nothing is launched, nothing is read.
ASTRAI_TEST(case_c2_empty_inputs_return_at_once) {
  DenseParams p = small_params();
  p.batch = 0;
  EXPECT_EQ(launch_decode(p, nullptr, 0, nullptr), cudaSuccess);
  EXPECT_EQ(launch_prefill(p, nullptr), cudaSuccess);
  p = small_params();
  p.q_len = 0;
  EXPECT_EQ(launch_prefill(p, nullptr), cudaSuccess);
}

ASTRAI_TEST(what_is_not_implemented_is_refused) {
  const DenseParams null_pointers = small_params();
  EXPECT_EQ(launch_decode(null_pointers, nullptr, 0, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(launch_prefill(null_pointers, nullptr), cudaErrorInvalidValue);
  DeviceBuffer<__nv_bfloat16> data(4096);
  DenseParams good = small_params();
  good.q = good.k = good.v = {data.data(), 512, 256, 64};
  good.out = data.data();
  EXPECT_TRUE(why_not_implemented(good) == nullptr);
  const auto refused = [](const DenseParams& p) {
    EXPECT_EQ(launch_prefill(p, nullptr), cudaErrorInvalidValue);
  };
  DenseParams p = good;
  p.head_dim = 96;
  refused(p);
  p = good;
  p.dtype = DType::kFP32;
  refused(p);
  p = good;
  p.q_heads = 5;
  refused(p);
  p = good;
  p.q_heads = 130;
  refused(p);
  p = good;
  p.scale = kInf;
  refused(p);
  p = good;
  p.q_len = 2;
  EXPECT_EQ(launch_decode(p, nullptr, 0, nullptr), cudaErrorInvalidValue);
  REQUIRE_CUDA(cudaGetLastError());
}

// cases.md D3: the stride of a dimension of size 1 is arbitrary.
ASTRAI_TEST(case_d3_strides_of_size_1_dimensions_do_not_matter) {
  Rng rng;
  DeviceBuffer<__nv_bfloat16> q(random_normal<__nv_bfloat16>(rng, 128));
  DeviceBuffer<__nv_bfloat16> kv(random_normal<__nv_bfloat16>(rng, 128 * 50));
  std::vector<std::vector<uint16_t>> results;
  for (const int64_t stride : {int64_t{128}, int64_t{7}}) {
    DenseParams p = small_params();
    p.q_heads = p.kv_heads = 1;
    p.head_dim = 128;
    p.kv_len = 50;
    p.q = {q.data(), stride, stride, stride};
    p.k = p.v = {kv.data(), stride, 128, stride};
    p.out_batch_stride = p.out_seq_stride = p.out_head_stride = stride;
    EXPECT_TRUE(rows_are_aligned(p));
    for (const bool decode : {true, false}) {
      DeviceBuffer<__nv_bfloat16> out(128);
      p.out = out.data();
      REQUIRE_CUDA(decode ? launch_decode(p, nullptr, 0, nullptr) : launch_prefill(p, nullptr));
      results.push_back(bits_of(out.download()));
    }
  }
  EXPECT_TRUE(results[0] == results[2]);
  EXPECT_TRUE(results[1] == results[3]);
}

// Keys whose element offset does not fit 32 bits.
ASTRAI_TEST(case_d7_offsets_beyond_2_to_the_31) {
  constexpr int kKeys = 40;
  constexpr int64_t kSeqStride = int64_t{1} << 27;  // 40 keys span 5.4e9 elements
  const size_t elements = static_cast<size_t>(kSeqStride) * kKeys;
  if (free_device_bytes() < elements * 2 + (size_t{1} << 30))
    SKIP_CASE("needs 12 GB of GPU memory");
  Rng rng;
  const auto q = random_normal<__nv_bfloat16>(rng, 2 * 128);
  const auto k = random_normal<__nv_bfloat16>(rng, kKeys * 128);
  const auto v = random_normal<__nv_bfloat16>(rng, kKeys * 128);
  DeviceBuffer<__nv_bfloat16> q_device(q), k_device(k), v_device(v);
  DeviceBuffer<__nv_bfloat16> wide(elements);
  for (int j = 0; j < kKeys; ++j) {
    __nv_bfloat16* row = wide.data() + j * kSeqStride;
    REQUIRE_CUDA(cudaMemcpy(row, k.data() + j * 128, 256, cudaMemcpyHostToDevice));
    REQUIRE_CUDA(cudaMemcpy(row + 128, v.data() + j * 128, 256, cudaMemcpyHostToDevice));
  }
  DenseParams p = small_params();
  p.q_heads = 2;
  p.kv_heads = 1;
  p.head_dim = 128;
  p.kv_len = kKeys;
  p.q = {q_device.data(), 256, 256, 128};
  p.out_batch_stride = p.out_seq_stride = 256;
  p.out_head_stride = 128;
  for (const bool decode : {true, false}) {
    std::vector<std::vector<uint16_t>> results;
    for (const bool far : {false, true}) {
      p.k = {far ? wide.data() : k_device.data(), 0, far ? kSeqStride : 128, 0};
      p.v = {far ? wide.data() + 128 : v_device.data(), 0, far ? kSeqStride : 128, 0};
      DeviceBuffer<__nv_bfloat16> out(256);
      p.out = out.data();
      REQUIRE_CUDA(decode ? launch_decode(p, nullptr, 0, nullptr) : launch_prefill(p, nullptr));
      results.push_back(bits_of(out.download()));
    }
    EXPECT_TRUE(results[0] == results[1]);
  }
}

// Launches are captured, and replay on new data in the same buffers.
ASTRAI_TEST(graph_replay_equals_a_launch) {
  Rng rng;
  DenseParams p = small_params();
  p.q_heads = 8;
  p.kv_heads = 2;
  p.head_dim = 128;
  p.kv_len = 3000;
  const size_t kv_elements = 3000 * 2 * 128;
  DeviceBuffer<__nv_bfloat16> q(8 * 128), k(kv_elements), v(kv_elements), out(8 * 128);
  DeviceInfo device;
  REQUIRE_CUDA(current_device_info(&device));
  p.q = {q.data(), 1024, 1024, 128};
  p.k = {k.data(), 0, 256, 128};
  p.v = {v.data(), 0, 256, 128};
  p.out = out.data();
  p.out_head_stride = 128;
  DeviceBuffer<uint8_t> workspace(decode_workspace_bytes(p, device.sm_count));
  for (const bool decode : {true, false}) {
    const auto launch = [&](cudaStream_t stream) {
      return decode ? launch_decode(p, workspace.data(), workspace.size(), stream)
                    : launch_prefill(p, stream);
    };
    cudaStream_t stream;
    REQUIRE_CUDA(cudaStreamCreate(&stream));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    const cudaError_t launched = launch(stream);
    REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
    REQUIRE_CUDA(launched);
    REQUIRE_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int round = 0; round < 3; ++round) {
      q.upload(random_normal<__nv_bfloat16>(rng, 8 * 128));
      k.upload(random_normal<__nv_bfloat16>(rng, kv_elements));
      v.upload(random_normal<__nv_bfloat16>(rng, kv_elements));
      out.poison();
      REQUIRE_CUDA(cudaGraphLaunch(exec, stream));
      REQUIRE_CUDA(cudaStreamSynchronize(stream));
      const auto replayed = bits_of(out.download());
      out.poison();
      REQUIRE_CUDA(launch(stream));
      REQUIRE_CUDA(cudaStreamSynchronize(stream));
      EXPECT_TRUE(replayed == bits_of(out.download()));
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

}  // namespace
}  // namespace astrai::attention
