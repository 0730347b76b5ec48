// What the emulator is for: kernels that are wrong, and what it makes of them. Every case runs in a
// process of its own, since most end it.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/common/cluster.cuh"
#include "kernels/common/cp_async.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/launch.h"
#include "kernels/common/ldmatrix.cuh"
#include "kernels/common/smem.cuh"
#include "tests/kernels/testing/device_buffer.h"
#include "tests/kernels/testing/testing.h"

namespace astrai {
namespace {

using namespace astrai::testing;

constexpr int kThreads = 64;

struct Ended {
  bool aborted;
  std::string output;
};

// Runs body in a child process.
template <typename Body>
Ended run_apart(Body body) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    body();
    std::fflush(nullptr);
    _exit(0);
  }
  close(ends[1]);
  Ended ended;
  char buffer[4096];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) {
    ended.output.append(buffer, static_cast<size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  ended.aborted = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
  return ended;
}

template <auto kKernel, typename... Args>
void run(LaunchConfig config, Args... args) {
  if (launch<kKernel>(config, args...) != cudaSuccess) std::printf("launch failed\n");
  cudaDeviceSynchronize();
}

LaunchConfig one_block(size_t smem_bytes = 0, int threads = kThreads) {
  LaunchConfig config;
  config.block = dim3(static_cast<unsigned>(threads));
  config.smem_bytes = smem_bytes;
  return config;
}

// The kernel ends the process, and the message says what, where and how to repeat it.
template <auto kKernel, typename... Args>
void expect_message(const std::vector<std::string>& texts, LaunchConfig config, Args... args) {
  const Ended ended = run_apart([&] { run<kKernel>(config, args...); });
  EXPECT_TRUE(ended.aborted);
  for (const std::string& text : texts) {
    if (ended.output.find(text) != std::string::npos) continue;
    add_failure(__FILE__, __LINE__, "no \"" + text + "\" in: " + ended.output);
  }
  EXPECT_TRUE(ended.output.find("repeat with ASTRAI_EMU_SEED=") != std::string::npos);
}

// kKernel(wrong, in, out) copies n floats. Without the fault it does so in every launch, with it
// one of ten launches shows it.
template <auto kKernel>
void expect_wrong_result(LaunchConfig config, size_t n) {
  for (const bool wrong : {false, true}) {
    const Ended ended = run_apart([&] {
      std::vector<float> numbers(n);
      for (size_t i = 0; i < n; ++i) numbers[i] = static_cast<float>(i + 1);
      int bad = 0;
      for (int launches = 0; launches < 10; ++launches) {
        DeviceBuffer<float> in(numbers), out(n);
        run<kKernel>(config, wrong, in.data(), out.data());
        bad += out.download() != numbers;
      }
      std::printf(bad > 0 ? "bad" : "good");
    });
    EXPECT_FALSE(ended.aborted);
    if (ended.output.find(wrong ? "bad" : "good") == std::string::npos) {
      add_failure(__FILE__, __LINE__,
                  (wrong ? "fault not noticed: " : "false alarm: ") + ended.output);
    }
  }
}

// ---- Races --------------------------------------------------------------------------------------

__global__ void missing_barrier_kernel(bool wrong, const float* in, float* out) {
  __shared__ float values[kThreads];
  const int i = static_cast<int>(threadIdx.x);
  values[i] = in[i];
  if (!wrong) __syncthreads();
  const int other = kThreads - 1 - i;
  out[other] = values[other];
}

ASTRAI_TEST(a_missing_block_barrier) {
  expect_wrong_result<missing_barrier_kernel>(one_block(), kThreads);
}

__global__ void missing_warp_barrier_kernel(bool wrong, const float* in, float* out) {
  __shared__ float values[kThreads];
  const int i = static_cast<int>(threadIdx.x);
  values[i] = in[i];
  if (!wrong) __syncwarp();
  out[i ^ 1] = values[i ^ 1];
}

ASTRAI_TEST(a_missing_warp_barrier) {
  expect_wrong_result<missing_warp_barrier_kernel>(one_block(), kThreads);
}

// Copies 4 floats a thread through shared memory.
__device__ void start_copy(const float* in, int slot) {
  const int at = slot * kThreads * 4 + static_cast<int>(threadIdx.x) * 4;
  cp_async_16(shared_address(dynamic_smem) + static_cast<uint32_t>(at) * 4, in + at, true);
  cp_async_commit();
}
__device__ void write_out(float* out, int slot, int thread) {
  const int at = slot * kThreads * 4 + thread * 4;
  for (int i = at; i < at + 4; ++i) out[i] = reinterpret_cast<float*>(dynamic_smem)[i];
}

__global__ void missing_wait_kernel(bool wrong, const float* in, float* out) {
  start_copy(in, 0);
  if (!wrong) cp_async_wait<0>();
  __syncthreads();
  write_out(out, 0, static_cast<int>(threadIdx.x));
}

ASTRAI_TEST(a_missing_wait_for_asynchronous_copies) {
  expect_wrong_result<missing_wait_kernel>(one_block(kThreads * 16), kThreads * 4);
}

__global__ void wait_for_too_few_kernel(bool wrong, const float* in, float* out) {
  start_copy(in, 0);
  start_copy(in, 1);
  if (wrong) {
    cp_async_wait<1>();  // the second may still be on its way
  } else {
    cp_async_wait<0>();
  }
  __syncthreads();
  write_out(out, 0, static_cast<int>(threadIdx.x));
  write_out(out, 1, static_cast<int>(threadIdx.x));
}

ASTRAI_TEST(a_wait_that_covers_too_few_groups) {
  expect_wrong_result<wait_for_too_few_kernel>(one_block(kThreads * 32), kThreads * 8);
}

__global__ void missing_barrier_after_wait_kernel(bool wrong, const float* in, float* out) {
  start_copy(in, 0);
  cp_async_wait<0>();
  if (!wrong) __syncthreads();
  write_out(out, 0, kThreads - 1 - static_cast<int>(threadIdx.x));
}

ASTRAI_TEST(a_wait_without_a_barrier_for_what_others_copied) {
  expect_wrong_result<missing_barrier_after_wait_kernel>(one_block(kThreads * 16), kThreads * 4);
}

__global__ void slot_in_use_kernel(bool wrong, const float* in, float* out) {
  start_copy(in, 0);
  cp_async_wait<0>();
  __syncthreads();
  write_out(out, 0, kThreads - 1 - static_cast<int>(threadIdx.x));
  if (!wrong) __syncthreads();
  cp_async_16(shared_address(dynamic_smem) + threadIdx.x * 16, nullptr, false);
  cp_async_wait<0>();
}

ASTRAI_TEST(a_copy_into_what_is_still_read) {
  expect_wrong_result<slot_in_use_kernel>(one_block(kThreads * 16), kThreads * 4);
}

// The source of a copy may not change until it has landed.
__global__ void source_changes_kernel(bool wrong, const float* in, float* out) {
  const int at = static_cast<int>(threadIdx.x) * 4;
  for (int i = at; i < at + 4; ++i) out[i] = in[i];
  start_copy(out, 0);
  if (!wrong) cp_async_wait<0>();
  for (int i = at; i < at + 4; ++i) out[i] = 0.0f;
  cp_async_wait<0>();
  write_out(out, 0, static_cast<int>(threadIdx.x));
}

ASTRAI_TEST(a_source_that_changes_before_it_is_copied) {
  expect_wrong_result<source_changes_kernel>(one_block(kThreads * 16), kThreads * 4);
}

__global__ void poison_kernel(bool wrong, const float* in, float* out) {
  __shared__ float fixed[2];
  float* dynamic = reinterpret_cast<float*>(dynamic_smem);
  if (!wrong) fixed[0] = fixed[1] = dynamic[0] = dynamic[1] = 0.0f;
  out[blockIdx.x] = in[blockIdx.x] + fixed[0] * dynamic[0];
  fixed[0] = dynamic[0] = 0.0f;  // what the next block must not find
}

ASTRAI_TEST(shared_memory_that_nobody_wrote) {
  LaunchConfig config = one_block(8, 1);
  config.grid = dim3(4);
  expect_wrong_result<poison_kernel>(config, 4);
}

__global__ void flag_first_kernel(bool wrong, const float* in, float* out) {
  auto* flag = reinterpret_cast<uint32_t*>(out + 1);  // poisoned with 0xff
  if (blockIdx.x == 0) {
    if (!wrong) out[0] = in[0];
    ptx::st_release_gpu(flag, 0u);
    __threadfence();
    if (wrong) out[0] = in[0];
  } else {
    while (ptx::ld_acquire_gpu(flag) != 0) {
    }
    out[1] = in[1];
    out[2] = out[0] + 2.0f;
  }
}

ASTRAI_TEST(a_flag_that_is_set_before_the_data) {
  LaunchConfig config = one_block(0, 1);
  config.grid = dim3(2);
  expect_wrong_result<flag_first_kernel>(config, 3);
}

// ---- Deadlocks ----------------------------------------------------------------------------------

__global__ void divergent_kernel() {
  if (threadIdx.x == 5) {
    __syncthreads();
  } else {
    __shfl_xor_sync(0xffffffffu, 1, 1);
  }
}

ASTRAI_TEST(a_deadlock_says_who_waits_where) {
  expect_message<divergent_kernel>(
      {"deadlock", "31 threads wait at __shfl_xor_sync", "1 thread waits at __syncthreads",
       "the first is (5, 0, 0)", "faults_test.cu:"},
      one_block(0, 32));
}

__global__ void wait_for_nobody_kernel(uint32_t* flag) {
  while (ptx::ld_acquire_gpu(flag) != 0) {
  }
}

ASTRAI_TEST(a_livelock) {
  const Ended ended = run_apart([] {
    DeviceBuffer<uint32_t> flag(1);
    run<wait_for_nobody_kernel>(one_block(0, 1), flag.data());
  });
  EXPECT_TRUE(ended.aborted);
  EXPECT_TRUE(ended.output.find("livelock") != std::string::npos);
}

__global__ void different_warp_operations_kernel() {
  if (threadIdx.x % 2 == 0) {
    __syncwarp();
  } else {
    __ballot_sync(0xffffffffu, 1);
  }
}

ASTRAI_TEST(lanes_at_different_warp_operations) {
  expect_message<different_warp_operations_kernel>({"other lanes of the warp wait at"},
                                                   one_block(0, 32));
}

__global__ void foreign_mask_kernel() { __shfl_sync(0xffu, 1, 0); }

ASTRAI_TEST(a_mask_without_the_lane_itself) {
  expect_message<foreign_mask_kernel>({"__shfl_sync", "the mask 000000ff lacks the calling lane"},
                                      one_block(0, 32));
}

__global__ void mma_without_all_kernel() {
  if (threadIdx.x == 3) return;
  uint32_t r[4];
  ldmatrix_x4(r, shared_address(dynamic_smem));
}

ASTRAI_TEST(a_matrix_instruction_without_all_lanes) {
  expect_message<mma_without_all_kernel>({"ldmatrix", "lanes 00000008 have exited"},
                                         one_block(16, 32));
}

// ---- Memory -------------------------------------------------------------------------------------

__global__ void read_kernel(const float* x, float* out) { *out = *x; }
__global__ void write_kernel(float* x) { *x = 1.0f; }

ASTRAI_TEST(an_access_outside_of_device_memory) {
  for (const bool write : {false, true}) {
    const Ended ended = run_apart([&] {
      float* memory = nullptr;
      float* out = nullptr;
      cudaMalloc(&memory, 1024);
      cudaMalloc(&out, 4);
      if (write) {
        run<write_kernel>(one_block(0, 1), memory + 256);
      } else {
        run<read_kernel>(one_block(0, 1), memory + 256, out);
      }
    });
    EXPECT_TRUE(ended.aborted);
    const std::string text = std::string("invalid ") + (write ? "write" : "read");
    EXPECT_TRUE(ended.output.find(text) != std::string::npos);
    EXPECT_TRUE(ended.output.find("1024 bytes from the start of an allocation of 1024 bytes") !=
                std::string::npos);
  }
}

ASTRAI_TEST(a_write_into_the_rest_of_the_last_256_bytes) {
  const Ended ended = run_apart([] {
    float* memory = nullptr;
    cudaMalloc(&memory, 1000);
    run<write_kernel>(one_block(0, 1), memory + 250);
    cudaFree(memory);
  });
  EXPECT_TRUE(ended.aborted);
  EXPECT_TRUE(ended.output.find("wrote at 1000 from the start") != std::string::npos);
}

__global__ void stack_overflow_kernel(float* out) {
  volatile float big[1 << 17];
  for (int i = (1 << 17) - 1; i >= 0; --i) big[i] = 0.0f;
  *out = big[5];
}

ASTRAI_TEST(a_stack_overflow) {
  expect_message<stack_overflow_kernel>({"stack overflow"}, one_block(0, 1), nullptr);
}

__global__ void shared_kernel(int offset, int bytes) {
  if (bytes == 16) {
    cp_async_16(shared_address(dynamic_smem) + static_cast<uint32_t>(offset), nullptr, false);
  } else {
    dynamic_smem[offset] = 0;
  }
}

ASTRAI_TEST(shared_addresses_out_of_range_or_misaligned) {
  expect_message<shared_kernel>({"cp.async", "is out of range"}, one_block(64, 1), 64, 16);
  expect_message<shared_kernel>({"cp.async", "is out of range"}, one_block(64, 1), -16, 16);
  expect_message<shared_kernel>({"cp.async", "is not aligned to 16 bytes"}, one_block(64, 1), 8,
                                16);
  expect_message<shared_kernel>({"wrote", "behind its 64 bytes of dynamic shared memory"},
                                one_block(64, 1), 64, 1);
}

__global__ void trap_kernel() {
  if (threadIdx.x == 5 && blockIdx.y == 2) __trap();
}

ASTRAI_TEST(messages_name_thread_and_block) {
  LaunchConfig config = one_block(0, 32);
  config.grid = dim3(1, 3);
  expect_message<trap_kernel>({"__trap", "thread (5, 0, 0) of block (0, 2, 0)", "grid (1, 3, 1)"},
                              config);
}

// ---- Clusters -----------------------------------------------------------------------------------

enum class ClusterFault { kNoBarrierBefore, kNoBarrierAfter, kArriveTwice, kWaitFirst };

__global__ void cluster_kernel(ClusterFault fault, float* out) {
  __shared__ float value;
  value = 1.0f;
  if (fault == ClusterFault::kWaitFirst) cluster_wait();
  if (fault == ClusterFault::kArriveTwice) cluster_arrive();
  if (fault != ClusterFault::kNoBarrierBefore) cluster_sync();
  // One after the other, so that the others are early.
  for (uint32_t rank = 0; rank < cluster_rank(); ++rank) emulator::yield();
  const uint32_t last = cluster_size() - 1;
  *out =
      cluster_load_float(cluster_address(shared_address(&value), cluster_rank() == 0 ? last : 0));
  if (fault != ClusterFault::kNoBarrierAfter) cluster_sync();
}

// Repeats the launch until the fault shows.
void expect_cluster_message(const std::string& text, ClusterFault fault) {
  const Ended ended = run_apart([&] {
    LaunchConfig config = one_block(0, 1);
    config.grid = dim3(4);
    config.cluster_blocks = 4;
    float* out = nullptr;
    cudaMalloc(&out, 4);
    for (int i = 0; i < 100; ++i) run<cluster_kernel>(config, fault, out);
  });
  EXPECT_TRUE(ended.aborted);
  if (ended.output.find(text) == std::string::npos) {
    add_failure(__FILE__, __LINE__, "no \"" + text + "\" in: " + ended.output);
  }
}

ASTRAI_TEST(shared_memory_of_a_block_that_does_not_run) {
  expect_cluster_message("has not started; a cluster barrier has to come first",
                         ClusterFault::kNoBarrierBefore);
  expect_cluster_message("has exited", ClusterFault::kNoBarrierAfter);
}

ASTRAI_TEST(halves_of_the_cluster_barrier_out_of_order) {
  expect_cluster_message("barrier.cluster.arrive: twice", ClusterFault::kArriveTwice);
  expect_cluster_message("barrier.cluster.wait: without an arrive", ClusterFault::kWaitFirst);
}

// ---- Programmatic dependent launch --------------------------------------------------------------

enum class OverlapFault { kNone, kLoad, kExit };

__global__ void overlapping_kernel(OverlapFault fault, const float* in) {
  uint32_t bits[1];
  if (fault == OverlapFault::kLoad) ptx::ld_global(bits, in);
  if (fault == OverlapFault::kExit && threadIdx.x == 7) return;
  wait_for_previous_kernel();
  ptx::ld_global(bits, in);
}

ASTRAI_TEST(a_kernel_that_does_not_wait_for_the_one_before) {
  LaunchConfig config = one_block();
  config.overlaps_previous = true;
  DeviceBuffer<float> in(std::vector<float>{1.0f});
  const auto message = [&](OverlapFault fault, const char* what) {
    const std::string text = std::string(what) + " before griddepcontrol.wait";
    expect_message<overlapping_kernel>({text}, config, fault, static_cast<const float*>(in.data()));
  };
  message(OverlapFault::kLoad, "ld.global");
  message(OverlapFault::kExit, "exit");
  const Ended ended = run_apart([&] {
    run<overlapping_kernel>(config, OverlapFault::kNone, static_cast<const float*>(in.data()));
  });
  EXPECT_FALSE(ended.aborted);
  config.overlaps_previous = false;
  const Ended alone = run_apart([&] {
    run<overlapping_kernel>(config, OverlapFault::kLoad, static_cast<const float*>(in.data()));
  });
  EXPECT_FALSE(alone.aborted);
}

// ---- Host ---------------------------------------------------------------------------------------

__global__ void nothing_kernel() {}

ASTRAI_TEST(launches_that_a_gpu_refuses) {
  const auto error_of = [](LaunchConfig config) { return launch<nothing_kernel>(config); };
  LaunchConfig config = one_block();
  config.grid = dim3(0);
  EXPECT_EQ(error_of(config), cudaErrorInvalidConfiguration);
  config.grid = dim3(1, 65536);
  EXPECT_EQ(error_of(config), cudaErrorInvalidConfiguration);
  EXPECT_EQ(error_of(one_block(0, 1025)), cudaErrorInvalidConfiguration);
  EXPECT_EQ(error_of(one_block((227 << 10) + 1)), cudaErrorInvalidValue);
  config = one_block();
  config.grid = dim3(3);
  config.cluster_blocks = 2;
  EXPECT_EQ(error_of(config), cudaErrorInvalidClusterSize);
}

}  // namespace
}  // namespace astrai
