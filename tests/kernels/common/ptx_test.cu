// The instructions that kernels use, against what the PTX ISA says. The same cases run on a GPU and
// on the CPU (tests/kernels/emulator), so that they also show that the emulator is right.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/common/cp_async.cuh"
#include "kernels/common/launch.h"
#include "kernels/common/ldmatrix.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/reduce.cuh"
#include "kernels/common/smem.cuh"
#include "kernels/common/vec.cuh"
#include "tests/kernels/testing/compare.h"
#include "tests/kernels/testing/device_buffer.h"
#include "tests/kernels/testing/testing.h"

namespace astrai {
namespace {

using namespace astrai::testing;

// Runs one kernel on buffers, and waits.
template <auto kKernel, typename... Args>
void run(int blocks, int threads, size_t smem_bytes, Args... args) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(blocks));
  config.block = dim3(static_cast<unsigned>(threads));
  config.smem_bytes = smem_bytes;
  REQUIRE_CUDA(launch<kKernel>(config, args...));
  REQUIRE_CUDA(cudaDeviceSynchronize());
}

// ---- Barriers and votes -------------------------------------------------------------------------

// Thread i gives i to thread n - 1 - i.
__global__ void reverse_kernel(int* out) {
  __shared__ int values[1024];
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

ASTRAI_TEST(a_block_barrier_orders_shared_memory) {
  for (const int threads : {1, 31, 32, 33, 96, 257, 1024}) {
    DeviceBuffer<int> out(static_cast<size_t>(threads));
    run<reverse_kernel>(1, threads, 0, out.data());
    const std::vector<int> result = out.download();
    for (int i = 0; i < threads; ++i) {
      EXPECT_EQ(result[static_cast<size_t>(i)], threads - 1 - i);
    }
  }
}

// Threads from `leave` on are gone when the others meet.
__global__ void block_votes_kernel(int leave, int* out) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= leave) return;
  const int count = __syncthreads_count(i % 3 == 0);
  const int all = __syncthreads_and(i < leave);
  const int not_all = __syncthreads_and(i != 5);
  const int any = __syncthreads_or(i == 5);
  const int none = __syncthreads_or(i == leave);
  __syncthreads();
  out[i] = count * 16 + (all != 0) * 8 + (not_all != 0) * 4 + (any != 0) * 2 + (none != 0);
}

ASTRAI_TEST(block_votes_count_the_threads_that_are_left) {
  for (const int leave : {6, 32, 50, 64}) {
    DeviceBuffer<int> out(static_cast<size_t>(leave));
    run<block_votes_kernel>(1, 64, 0, leave, out.data());
    for (const int x : out.download()) EXPECT_EQ(x, (leave + 2) / 3 * 16 + 8 + 2);
  }
}

struct WarpResults {
  unsigned ballot;
  int any, all;
  int index, up, down, by_xor, narrow;
  double wide;
  unsigned sum, least, most;
  int most_signed;
  float lanes_max, lanes_sum;
};

__global__ void warp_kernel(WarpResults* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const unsigned all = 0xffffffffu;
  WarpResults r;
  r.ballot = __ballot_sync(all, lane % 3 == 0);
  r.any = __any_sync(all, lane == 7) != 0;
  r.all = __all_sync(all, lane != 7) != 0;
  r.index = __shfl_sync(all, lane * lane, (lane + 5) % 32);
  r.up = __shfl_up_sync(all, lane, 3);
  r.down = __shfl_down_sync(all, lane, 3);
  r.by_xor = __shfl_xor_sync(all, lane, 9);
  r.narrow = __shfl_down_sync(all, lane, 1, 8);
  r.wide = __shfl_sync(all, lane + 0.25, 31 - lane);
  r.sum = __reduce_add_sync(all, static_cast<unsigned>(lane));
  r.least = __reduce_min_sync(all, static_cast<unsigned>(lane + 3));
  r.most = __reduce_max_sync(all, static_cast<unsigned>(lane - 3));
  r.most_signed = __reduce_max_sync(all, lane - 40);
  r.lanes_max = lanes_max<8>(static_cast<float>(lane));
  r.lanes_sum = lanes_sum<4>(static_cast<float>(lane));
  out[lane] = r;
}

ASTRAI_TEST(warp_votes_and_shuffles) {
  DeviceBuffer<WarpResults> out(32);
  run<warp_kernel>(1, 32, 0, out.data());
  const std::vector<WarpResults> results = out.download();
  for (int lane = 0; lane < 32; ++lane) {
    const WarpResults& r = results[static_cast<size_t>(lane)];
    EXPECT_EQ(r.ballot, 0x49249249u);
    EXPECT_EQ(r.any, 1);
    EXPECT_EQ(r.all, 0);
    EXPECT_EQ(r.index, (lane + 5) % 32 * ((lane + 5) % 32));
    EXPECT_EQ(r.up, lane < 3 ? lane : lane - 3);
    EXPECT_EQ(r.down, lane < 29 ? lane + 3 : lane);
    EXPECT_EQ(r.by_xor, lane ^ 9);
    EXPECT_EQ(r.narrow, lane % 8 == 7 ? lane : lane + 1);
    EXPECT_EQ(r.wide, 31.25 - lane);
    EXPECT_EQ(r.sum, 496u);
    EXPECT_EQ(r.least, 3u);
    EXPECT_EQ(r.most, 0xffffffffu);
    EXPECT_EQ(r.most_signed, -9);
    EXPECT_EQ(r.lanes_max, static_cast<float>(lane / 8 * 8 + 7));
    EXPECT_EQ(r.lanes_sum, static_cast<float>(lane / 4 * 16 + 6));
  }
}

// ---- Matrices -----------------------------------------------------------------------------------

// c[16][8] = a[16][16] * b[16][8] + c, b by rows of k, through ldmatrix with and without transpose.
template <typename T>
__global__ void matrix_kernel(const T* a, const T* b, float* c) {
  uint8_t* const smem = dynamic_smem;
  const int lane = static_cast<int>(threadIdx.x);
  // Rows of 32 bytes, two chunks each; b has 16 columns, of which the first 8 count.
  // Through memory, which keeps it out of uniform registers: with an address there, ptxas 13.0
  // encodes a copy that has a cache policy as an illegal instruction (see device_code_test.py).
  __shared__ volatile uint32_t tiles;
  tiles = shared_address(smem);
  __syncwarp();
  const uint32_t a_tile = tiles;
  const uint32_t b_tile = a_tile + 16 * 32;
  cp_async_16(a_tile + static_cast<uint32_t>(lane) * 16, a + lane * 8, true);
  cp_async_commit();
  cp_async_16(b_tile + static_cast<uint32_t>(lane) * 16, b + lane * 8, lane % 2 == 0,
              evict_first_policy());
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  const LdmatrixLane at = ldmatrix_rows_first(lane);
  const uint32_t offset = static_cast<uint32_t>(at.row * 32 + at.chunk * 16);
  uint32_t a_bits[4], b_bits[4];
  ldmatrix_x4(a_bits, a_tile + offset);
  ldmatrix_x4_trans(b_bits, b_tile + offset);
  float d[4];
  for (int reg = 0; reg < 4; ++reg) {
    const MatrixCoord place = mma_c_coord(lane, reg);
    d[reg] = c[place.row * 8 + place.col];
  }
  mma_m16n8k16<T>(d, a_bits, b_bits[0], b_bits[1]);
  for (int reg = 0; reg < 4; ++reg) {
    const MatrixCoord place = mma_c_coord(lane, reg);
    c[place.row * 8 + place.col] = d[reg];
  }
  // What was not valid is zero.
  if (lane % 2 == 1) c[128 + lane / 2] = reinterpret_cast<const float*>(smem + 512)[lane * 4];
}

template <typename T>
void test_matrix_product() {
  Rng rng;
  const std::vector<T> a = random_normal<T>(rng, 256);
  std::vector<T> b = random_normal<T>(rng, 256);
  const std::vector<float> c = random_normal<float>(rng, 144);
  std::vector<double> expected(144);
  for (size_t m = 0; m < 16; ++m) {
    for (size_t n = 0; n < 8; ++n) {
      expected[m * 8 + n] = c[m * 8 + n];
      for (size_t k = 0; k < 16; ++k) {
        expected[m * 8 + n] += to_double(a[m * 16 + k]) * to_double(b[k * 16 + n]);
      }
    }
  }
  DeviceBuffer<T> a_device(a), b_device(b);
  DeviceBuffer<float> c_device(c);
  run<matrix_kernel<T>>(1, 32, 1024, a_device.data(), b_device.data(), c_device.data());
  EXPECT_CLOSE(c_device.download(), expected, 1e-6, 1e-5);
}

ASTRAI_TEST(ldmatrix_and_mma_on_bf16) { test_matrix_product<__nv_bfloat16>(); }
ASTRAI_TEST(ldmatrix_and_mma_on_fp16) { test_matrix_product<__half>(); }

// ---- Arithmetic ---------------------------------------------------------------------------------

__global__ void exp2_kernel(const float* x, float* y) {
  y[threadIdx.x] = ptx::ex2_approx_ftz(x[threadIdx.x]);
}

ASTRAI_TEST(ex2_approximates_and_flushes) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {0.0f, 1.0f, -1.5f,  10.25f, -126.0f,      -126.5f,
                                -inf, inf,  200.0f, 1e-40f, std::nanf("")};
  DeviceBuffer<float> in(x), out(x.size());
  run<exp2_kernel>(1, static_cast<int>(x.size()), 0, in.data(), out.data());
  const std::vector<float> y = out.download();
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_LE(std::fabs(y[i] - std::exp2(x[i])), 4e-7f * std::exp2(x[i]));
  }
  EXPECT_EQ(y[5], 0.0f);
  EXPECT_EQ(y[6], 0.0f);
  EXPECT_EQ(y[7], inf);
  EXPECT_EQ(y[8], inf);
  EXPECT_EQ(y[9], 1.0f);
  EXPECT_TRUE(std::isnan(y[10]));
}

__global__ void pack_kernel(const float* x, uint32_t* bf16, uint32_t* fp16) {
  const int i = static_cast<int>(threadIdx.x);
  bf16[i] = pack2<__nv_bfloat16>(x[2 * i], x[2 * i + 1]);
  fp16[i] = pack2<__half>(x[2 * i], x[2 * i + 1]);
}

ASTRAI_TEST(packing_rounds_to_nearest_even) {
  // Exact, ties to even down and up, the largest values, denormals, overflow; the low half first.
  const std::vector<float> x = {1.0f,           -2.0f,          1.00390625f,  1.01171875f,
                                1.00048828125f, 1.00146484375f, 65519.0f,     65520.0f,
                                0x1p-24f,       0x1p-25f,       0x1.8p-24f,   0x1.000002p-25f,
                                3.4e38f,        0x1.ffp127f,    0x1.ff8p-15f, -0.0f};
  const std::vector<uint32_t> bf16 = {0xc0003f80u, 0x3f823f80u, 0x3f803f80u, 0x47804780u,
                                      0x33003380u, 0x330033c0u, 0x7f807f80u, 0x80003880u};
  const std::vector<uint32_t> fp16 = {0xc0003c00u, 0x3c0c3c04u, 0x3c023c00u, 0x7c007bffu,
                                      0x00000001u, 0x00010002u, 0x7c007c00u, 0x800003ffu};
  DeviceBuffer<float> in(x);
  DeviceBuffer<uint32_t> bf16_out(8), fp16_out(8);
  run<pack_kernel>(1, 8, 0, in.data(), bf16_out.data(), fp16_out.data());
  const std::vector<uint32_t> bf16_got = bf16_out.download(), fp16_got = fp16_out.download();
  for (size_t i = 0; i < 8; ++i) {
    const Context context("pair " + std::to_string(i));
    EXPECT_EQ(bf16_got[i], bf16[i]);
    EXPECT_EQ(fp16_got[i], fp16[i]);
  }
}

__global__ void bits_kernel(uint32_t* out) {
  out[0] = ptx::prmt(0x83227f00u, 0xaabbccddu, 0x4321u);
  out[1] = ptx::prmt(0x83227f00u, 0xaabbccddu, 0xfb98u);
  out[2] = __byte_perm(0x83227f00u, 0xaabbccddu, 0xfb98u);
  out[3] = ptx::fma_bf16x2(0x3f804000u, 0x40403fc0u, 0xbf803f80u);  // 1 * 3 - 1, 2 * 1.5 + 1
  out[4] = ptx::fma_bf16x2(0x00108001u, 0x7b807b80u, 0x80008000u);  // denormal times 2^120
  out[5] = ptx::mul_f16x2(0x3e003800u, 0x42000001u);                // 1.5 * 3, 0.5 * 2^-24
  out[6] = __funnelshift_r(0x11223344u, 0xaabbccddu, 8);
  out[7] = static_cast<uint32_t>(__popc(0xf0f0u) * 256 + __ffs(8) * 16 + __clz(0x00ffffff));
}

ASTRAI_TEST(bit_and_packed_arithmetic) {
  DeviceBuffer<uint32_t> out(8);
  run<bits_kernel>(1, 1, 0, out.data());
  const std::vector<uint32_t> expected = {0xdd83227fu, 0xffff0000u,         0xaa837f00u,
                                          0x40004080u, 0x3b00b900u,         0x44800000u,
                                          0xdd112233u, 8 * 256 + 4 * 16 + 8};
  const std::vector<uint32_t> got = out.download();
  for (size_t i = 0; i < expected.size(); ++i) {
    const Context context("result " + std::to_string(i));
    EXPECT_EQ(got[i], expected[i]);
  }
}

// ---- Global memory ------------------------------------------------------------------------------

// Every thread adds its number; the block that arrives last reads the sum and leaves the counter at
// zero.
__global__ void last_block_kernel(unsigned* sum, unsigned* arrived, unsigned* out) {
  __shared__ bool last;
  atomicAdd(sum, blockIdx.x * blockDim.x + threadIdx.x);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(arrived, 1u) == gridDim.x - 1;
    if (last) *arrived = 0;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) *out = ptx::ld_acquire_gpu(sum);
}

ASTRAI_TEST(the_last_block_sees_all_others) {
  DeviceBuffer<unsigned> sum(std::vector<unsigned>{0}), arrived(std::vector<unsigned>{0}), out(1);
  run<last_block_kernel>(50, 64, 0, sum.data(), arrived.data(), out.data());
  EXPECT_EQ(out.download()[0], 3200u * 3199u / 2);
  EXPECT_EQ(arrived.download()[0], 0u);
}

// Block 1 waits for what block 0 releases.
__global__ void release_kernel(uint64_t* flag, float* value, float* out) {
  if (blockIdx.x == 0) {
    *value = 42.0f;
    ptx::st_release_gpu(flag, uint64_t{1} << 40);
  } else {
    while (ptx::ld_acquire_gpu(flag) == 0) {
    }
    *out = *value;
  }
}

ASTRAI_TEST(release_and_acquire_between_blocks) {
  DeviceBuffer<uint64_t> flag(std::vector<uint64_t>{0});
  DeviceBuffer<float> value(1), out(1);
  run<release_kernel>(2, 1, 0, flag.data(), value.data(), out.data());
  EXPECT_EQ(out.download()[0], 42.0f);
}

__global__ void atomics_kernel(unsigned* words, unsigned long long* wide, float* sum) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicMax(&words[0], i * 7 % 64);
  atomicMin(&words[1], i * 7 % 64);
  atomicOr(&words[2], 1u << (i % 32));
  atomicInc(&words[3], 9u);
  atomicExch(&words[4], 5u);
  unsigned seen = words[5];
  for (;;) {  // adds 2 by compare and swap
    const unsigned before = atomicCAS(&words[5], seen, seen + 2);
    if (before == seen) break;
    seen = before;
  }
  atomicAdd(wide, uint64_t{1} << 33);
  atomicAdd(sum, 0.5f);
}

ASTRAI_TEST(atomics_lose_nothing) {
  DeviceBuffer<unsigned> words(std::vector<unsigned>{0, 100, 0, 0, 0, 0});
  DeviceBuffer<unsigned long long> wide(std::vector<unsigned long long>{0});
  DeviceBuffer<float> sum(std::vector<float>{0.0f});
  run<atomics_kernel>(2, 32, 0, words.data(), wide.data(), sum.data());
  EXPECT_TRUE(words.download() == (std::vector<unsigned>{63, 0, 0xffffffffu, 4, 5, 128}));
  EXPECT_EQ(wide.download()[0], uint64_t{64} << 33);
  EXPECT_EQ(sum.download()[0], 32.0f);
}

}  // namespace
}  // namespace astrai
