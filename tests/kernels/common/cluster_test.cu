// Clusters: rank and size, the barrier, and each other's shared memory. Below sm_90 a block is a
// cluster of its own.
#include <cstdint>
#include <vector>

#include "kernels/common/cluster.cuh"
#include "kernels/common/launch.h"
#include "tests/kernels/testing/device_buffer.h"
#include "tests/kernels/testing/testing.h"

namespace astrai {
namespace {

using namespace astrai::testing;

constexpr int kThreads = 64;

// Every block leaves its threads' numbers in shared memory, static and dynamic; every thread adds
// up those of its own place in all blocks, and tells its right neighbour its rank.
__global__ void gather_kernel(float* sums, uint32_t* ranks, uint32_t* neighbours) {
  __shared__ float own[kThreads];
  __shared__ uint32_t left;
  float4* vectors = reinterpret_cast<float4*>(static_cast<uint8_t*>(dynamic_smem));
  const uint32_t i = threadIdx.x;
  const uint32_t n = blockIdx.x * kThreads + i;
  own[i] = static_cast<float>(n);
  vectors[i] = make_float4(1.0f, 2.0f, 3.0f, static_cast<float>(n));
  if (i == 0) left = ~0u;
  cluster_sync();
  float sum = 0.0f;
  for (uint32_t rank = 0; rank < cluster_size(); ++rank) {
    sum += cluster_load_float(cluster_address(shared_address(&own[i]), rank));
    const float4 v = cluster_load_float4(cluster_address(shared_address(&vectors[i]), rank));
    const float2 half = cluster_load_float2(cluster_address(shared_address(&vectors[i].z), rank));
    sum += v.x + v.y + half.x - half.y;
  }
  sums[n] = sum;
  const uint32_t right = (cluster_rank() + 1) % cluster_size();
  if (i == 0) cluster_store(cluster_address(shared_address(&left), right), cluster_rank());
  cluster_sync();
  ranks[n] = cluster_rank();
  neighbours[n] = cluster_load_uint(shared_address(&left));
}

ASTRAI_TEST(blocks_reach_each_others_shared_memory) {
  int major = 0;
  REQUIRE_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  cudaFuncAttributes attributes;
  REQUIRE_CUDA(cudaFuncGetAttributes(&attributes, gather_kernel));
  const bool has_clusters = major >= 9 && attributes.ptxVersion >= 90;
  for (const int size : {1, 2, 4, 8}) {
    if (size > 1 && !has_clusters) continue;
    const Context context("cluster of " + std::to_string(size));
    constexpr int kClusters = 5;
    const size_t threads = static_cast<size_t>(kClusters * size * kThreads);
    DeviceBuffer<float> sums(threads);
    DeviceBuffer<uint32_t> ranks(threads), neighbours(threads);
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(kClusters * size));
    config.block = dim3(kThreads);
    config.smem_bytes = kThreads * sizeof(float4);
    config.cluster_blocks = size;
    REQUIRE_CUDA(launch<gather_kernel>(config, sums.data(), ranks.data(), neighbours.data()));
    REQUIRE_CUDA(cudaDeviceSynchronize());
    const std::vector<float> sum = sums.download();
    const std::vector<uint32_t> rank = ranks.download(), neighbour = neighbours.download();
    for (size_t n = 0; n < threads; ++n) {
      const uint32_t expected = static_cast<uint32_t>(n) / kThreads % static_cast<uint32_t>(size);
      const uint32_t cluster = static_cast<uint32_t>(size);
      EXPECT_EQ(sum[n], 6.0f * static_cast<float>(size));
      EXPECT_EQ(rank[n], expected);
      EXPECT_EQ(neighbour[n], (expected + cluster - 1) % cluster);
    }
  }
}

}  // namespace
}  // namespace astrai
