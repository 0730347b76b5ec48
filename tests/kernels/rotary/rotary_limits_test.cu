// launch_rotary at its limits: bad positions, empty and refused calls, 64-bit offsets, streams and
// graphs. Needs a GPU.
#include <cstdint>
#include <vector>

#include "kernels/rotary/rotary.h"
#include "tests/kernels/rotary/rotary_case.h"

namespace astrai::rotary {
namespace {

Options table_options(Pairing pairing, bool int64) {
  Options options;
  options.pairing = pairing;
  options.source = AngleSource::kTable;
  options.positions_are_int64 = int64;
  return options;
}

// RotaryCase expects NaN where the position is outside and right results everywhere else. The table
// ends at the end of its buffer, so memcheck sees a read past it.
ASTRAI_TEST(positions_out_of_range_give_nan_and_read_nothing) {
  Rng rng;
  for (const Pairing pairing : {Pairing::kInterleaved, Pairing::kHalfSplit}) {
    for (const int rotary_dim : {128, 64, 6}) {
      for (const bool int64 : {false, true}) {
        Options options = table_options(pairing, int64);
        options.max_pos = 10;
        RotaryCase<__nv_bfloat16> c(rng, {1, 10, 4, 2, 128, rotary_dim}, options);
        std::vector<int64_t> positions = {0, 9, 10, -1, 5, 1 << 30, INT32_MIN, INT32_MAX, 3, 9};
        if (int64) {
          // Values that a 32-bit position would take for 3 and -1 or for 0.
          positions[5] = (int64_t{1} << 32) + 3;
          positions[6] = INT64_MIN;
          positions[7] = INT64_MAX;
        }
        c.set_positions(positions);
        const Context context("rotary_dim " + std::to_string(rotary_dim));
        c.launch_and_check();
      }
    }
  }
}

ASTRAI_TEST(an_empty_table_gives_nan) {
  Rng rng;
  RotaryCase<__half> c(rng, {1, 3, 2, 0, 64, 64}, table_options(Pairing::kHalfSplit, false));
  RotaryParams p = c.params();
  p.max_pos = 0;
  REQUIRE_CUDA(launch_rotary(p, nullptr));
  for (const __half value : c.result_q()) EXPECT_TRUE(std::isnan(testing::to_double(value)));
}

ASTRAI_TEST(empty_calls_succeed_without_a_launch) {
  Rng rng;
  RotaryCase<__nv_bfloat16> c(rng, {2, 3, 2, 1, 64, 64}, {});
  for (int which = 0; which < 3; ++which) {
    RotaryParams p = c.params();
    if (which == 0) p.batch = 0;
    if (which == 1) p.tokens = 0;
    if (which == 2) p.q.heads = p.k.heads = 0;
    EXPECT_EQ(launch_rotary(p, nullptr), cudaSuccess);
    p.angles = nullptr;
    p.q.in = p.k.in = nullptr;
    p.q.out = p.k.out = nullptr;
    EXPECT_EQ(launch_rotary(p, nullptr), cudaSuccess);
  }
  REQUIRE_CUDA(cudaDeviceSynchronize());
  for (const uint16_t bits : testing::bits_of(c.result_q())) EXPECT_EQ(bits, uint16_t{0xffff});
}

ASTRAI_TEST(refused_calls_write_nothing) {
  Rng rng;
  RotaryCase<__nv_bfloat16> c(rng, {2, 3, 2, 1, 64, 64}, {});
  auto refused = [&](auto change) {
    RotaryParams p = c.params();
    change(p);
    EXPECT_EQ(launch_rotary(p, nullptr), cudaErrorInvalidValue);
  };
  refused([](RotaryParams& p) { p.dtype = DType::kFP32; });
  refused([](RotaryParams& p) { p.rotary_dim = 63; });
  refused([](RotaryParams& p) { p.rotary_dim = 66; });
  refused([](RotaryParams& p) { p.q.out = nullptr; });
  refused([](RotaryParams& p) { p.angles = nullptr; });
  refused([](RotaryParams& p) { p.q.out = static_cast<char*>(p.q.out) + 1; });
  refused([](RotaryParams& p) { p.source = AngleSource::kTable; });
  REQUIRE_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  for (const uint16_t bits : testing::bits_of(c.result_q())) EXPECT_EQ(bits, uint16_t{0xffff});
}

ASTRAI_TEST(heads_wider_than_a_block) {
  Rng rng;
  for (const Pairing pairing : {Pairing::kInterleaved, Pairing::kHalfSplit}) {
    Options options;
    options.pairing = pairing;
    RotaryCase<__nv_bfloat16>(rng, {1, 5, 2, 1, 1201, 1198}, options).launch_and_check();
    RotaryCase<__nv_bfloat16>(rng, {1, 5, 2, 1, 8192, 8192}, options).launch_and_check();
  }
}

ASTRAI_TEST(many_heads_and_few_tokens) {
  Rng rng;
  RotaryCase<__nv_bfloat16>(rng, {1, 2, 200, 100, 64, 64}, {}).launch_and_check();
  RotaryCase<__nv_bfloat16>(rng, {1, 1200, 300, 1, 16, 16}, {}).launch_and_check();
}

// A batch above the grid's 65535 that cannot be merged into the tokens.
ASTRAI_TEST(batch_above_the_grid_limit) {
  Rng rng;
  const Shape shape{70001, 2, 1, 1, 8, 8};
  Layout gapped = dense_layout(shape, 1);
  gapped.batch_stride += 8;
  gapped.storage = shape.batch * gapped.batch_stride;
  RotaryCase<__nv_bfloat16>(rng, shape, {}, gapped, gapped, gapped, gapped).launch_and_check();
}

// Three tokens that lie 2^30 elements apart: the last one starts past 2^31 elements.
template <typename T>
void check_far_tokens(Rng& rng, int64_t batch_stride, int64_t token_stride, int batch,
                      int64_t tokens) {
  constexpr int kDim = 64;
  const int64_t last = (batch - 1) * batch_stride + (tokens - 1) * token_stride;
  REQUIRE(last > (int64_t{1} << 31));
  const size_t elements = static_cast<size_t>(last + kDim);
  if (testing::free_device_bytes() < elements * sizeof(T) + (size_t{1} << 28)) {
    SKIP_CASE("needs 5 GB of device memory");
  }
  DeviceBuffer<T> far(elements);
  const Shape shape{batch, tokens, 1, 0, kDim, kDim};
  RotaryCase<T> near(rng, shape, {});
  near.launch_and_check();
  const std::vector<T> expected = near.result_q();

  RotaryParams p = near.params();
  auto place = [&](int64_t b, int64_t t) {
    return far.data() + b * batch_stride + t * token_stride;
  };
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < tokens; ++t) {
      REQUIRE_CUDA(cudaMemcpy(place(b, t), near.host_q().data() + (b * tokens + t) * kDim,
                              kDim * sizeof(T), cudaMemcpyHostToDevice));
    }
  }
  p.q.in = p.q.out = far.data();
  p.q.in_batch_stride = p.q.out_batch_stride = batch_stride;
  p.q.in_token_stride = p.q.out_token_stride = token_stride;
  REQUIRE_CUDA(launch_rotary(p, nullptr));
  std::vector<T> result(expected.size());
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < tokens; ++t) {
      REQUIRE_CUDA(cudaMemcpy(result.data() + (b * tokens + t) * kDim, place(b, t),
                              kDim * sizeof(T), cudaMemcpyDeviceToHost));
    }
  }
  EXPECT_TRUE(testing::bits_of(result) == testing::bits_of(expected));
}

ASTRAI_TEST(case_d05_token_offsets_past_2_to_31_elements) {
  Rng rng;
  check_far_tokens<__nv_bfloat16>(rng, 0, (int64_t{1} << 30) + 64, 1, 3);
}

ASTRAI_TEST(case_d05_batch_offsets_past_2_to_31_elements) {
  Rng rng;
  check_far_tokens<__nv_bfloat16>(rng, (int64_t{1} << 30) + 8, 72, 3, 2);
}

ASTRAI_TEST(case_d05_table_rows_past_2_to_31_floats) {
  Rng rng;
  constexpr int kDim = 128;
  constexpr int64_t kRows = (int64_t{1} << 24) + 3;
  if (testing::free_device_bytes() < kRows * kDim * sizeof(float) + (size_t{1} << 28)) {
    SKIP_CASE("needs 9 GB of device memory");
  }
  DeviceBuffer<float> table(static_cast<size_t>(kRows * kDim));
  Options options = table_options(Pairing::kHalfSplit, true);
  options.max_pos = 2;
  RotaryCase<__nv_bfloat16> c(rng, {1, 2, 2, 1, kDim, kDim}, options);
  c.set_positions({0, 1});
  c.launch_and_check();
  const auto expected = testing::bits_of(c.result_q());
  RotaryParams p = c.params();
  REQUIRE_CUDA(cudaMemcpy(table.data() + (kRows - 2) * kDim, p.angles, 2 * kDim * sizeof(float),
                          cudaMemcpyDeviceToDevice));
  c.set_positions({kRows - 2, kRows - 1});
  p.angles = table.data();
  p.max_pos = kRows;
  REQUIRE_CUDA(launch_rotary(p, nullptr));
  EXPECT_TRUE(testing::bits_of(c.result_q()) == expected);
}

ASTRAI_TEST(runs_on_the_given_stream) {
  Rng rng;
  cudaStream_t stream;
  REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  RotaryCase<__nv_bfloat16> c(rng, {2, 50, 8, 2, 128, 128}, {});
  c.launch(stream);
  c.check();
  REQUIRE_CUDA(cudaStreamDestroy(stream));
}

// A captured call reads its inputs and positions anew at every replay.
ASTRAI_TEST(graph_replay_follows_changed_positions) {
  Rng rng;
  Options options = table_options(Pairing::kInterleaved, true);
  options.max_pos = 100;
  RotaryCase<__nv_bfloat16> c(rng, {1, 24, 8, 2, 128, 128}, options);
  cudaStream_t stream;
  REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const cudaError_t captured = launch_rotary(c.params(), stream);
  cudaGraph_t graph;
  REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
  REQUIRE_CUDA(captured);
  cudaGraphExec_t exec;
  REQUIRE_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int round = 0; round < 5; ++round) {
    std::vector<int64_t> positions(24);
    for (int64_t& position : positions) position = rng.integer(0, 99);
    c.set_positions(positions);
    REQUIRE_CUDA(cudaGraphLaunch(exec, stream));
    REQUIRE_CUDA(cudaStreamSynchronize(stream));
    c.check();
  }
  REQUIRE_CUDA(cudaGraphExecDestroy(exec));
  REQUIRE_CUDA(cudaGraphDestroy(graph));
  REQUIRE_CUDA(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace astrai::rotary
