// The host API: see include/cuda_runtime_api.h.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "tests/kernels/emulator/block.h"
#include "tests/kernels/emulator/memory.h"

using astrai::emulator::env_int;

struct CUgraph_st {
  std::vector<std::function<cudaError_t()>> work;
};
struct CUgraphExec_st {
  CUgraph_st graph;
};
struct CUstream_st {
  CUgraph_st* captured = nullptr;  // while it captures
};
struct CUevent_st {
  std::chrono::steady_clock::time_point time;
  bool recorded = false;
};

namespace {

thread_local cudaError_t last_error = cudaSuccess;

// As the runtime does: an error is returned, and kept for cudaGetLastError.
cudaError_t report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t submit(cudaStream_t stream, std::function<cudaError_t()> work) {
  if (stream != nullptr && stream->captured != nullptr) {
    stream->captured->work.push_back(std::move(work));
    return cudaSuccess;
  }
  return work();
}

struct Level {
  int cc;
  int smem_per_block;
  int smem_per_sm;
};

Level level() {
  const int cc = env_int("ASTRAI_EMU_CC", 90);
  if (cc >= 90) return {cc, 227 << 10, 228 << 10};
  if (cc >= 86) return {cc, 99 << 10, 100 << 10};
  return {cc, 163 << 10, 164 << 10};
}

constexpr size_t kDefaultSmem = 48 << 10;

std::mutex functions_mutex;
// Dynamic shared memory that a kernel may have.
size_t& allowed_smem(const void* kernel) {
  static auto& allowed = *new std::map<const void*, size_t>;
  return allowed.emplace(kernel, kDefaultSmem).first->second;
}

// Whether a kernel may have clusters of more than 8 blocks.
bool& allows_large_clusters(const void* kernel) {
  static auto& allows = *new std::map<const void*, bool>;
  return allows[kernel];
}

cudaError_t check_copy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  using astrai::emulator::is_device_memory;
  if (bytes == 0) return cudaSuccess;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (to_device && !is_device_memory(to, bytes)) return cudaErrorInvalidValue;
  if (from_device && !is_device_memory(from, bytes)) return cudaErrorInvalidValue;
  return cudaSuccess;
}

}  // namespace

// ---- Device and errors --------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return report(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return report(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = kDefaultSmem;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = env_int("ASTRAI_EMU_SMS", 132);
      return cudaSuccess;
    case cudaDevAttrL2CacheSize:
      *value = 50 << 20;
      return cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = level().cc / 10;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = level().cc % 10;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = level().smem_per_sm;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = level().smem_per_block;
      return cudaSuccess;
  }
  return report(cudaErrorInvalidValue);
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
#define ASTRAI_NAME(name) \
  case name:              \
    return #name;
  switch (error) {
    ASTRAI_NAME(cudaSuccess)
    ASTRAI_NAME(cudaErrorInvalidValue)
    ASTRAI_NAME(cudaErrorMemoryAllocation)
    ASTRAI_NAME(cudaErrorInvalidConfiguration)
    ASTRAI_NAME(cudaErrorInvalidDeviceFunction)
    ASTRAI_NAME(cudaErrorNoDevice)
    ASTRAI_NAME(cudaErrorInvalidDevice)
    ASTRAI_NAME(cudaErrorInvalidResourceHandle)
    ASTRAI_NAME(cudaErrorNotSupported)
    ASTRAI_NAME(cudaErrorStreamCaptureUnsupported)
    ASTRAI_NAME(cudaErrorInvalidClusterSize)
    ASTRAI_NAME(cudaErrorUnknown)
  }
#undef ASTRAI_NAME
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// ---- Memory -------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = bytes == 0 ? nullptr : astrai::emulator::allocate(bytes);
  return report(*pointer == nullptr && bytes != 0 ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  return report(astrai::emulator::release(pointer) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = size_t{1} << 30;
  *free = *total;
  return cudaSuccess;
}

cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  return cudaMemsetAsync(pointer, value, bytes, nullptr);
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  if (bytes != 0 && !astrai::emulator::is_device_memory(pointer, bytes)) {
    return report(cudaErrorInvalidValue);
  }
  return submit(stream, [=] {
    if (bytes != 0) std::memset(pointer, value, bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const cudaError_t error = check_copy(to, from, bytes, kind);
  if (error != cudaSuccess) return report(error);
  return submit(stream, [=] {
    if (bytes != 0) std::memmove(to, from, bytes);
    return cudaSuccess;
  });
}

// ---- Streams, events, graphs --------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreate(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream == nullptr || stream->captured == nullptr) return cudaSuccess;
  return report(cudaErrorStreamCaptureUnsupported);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool captures = stream != nullptr && stream->captured != nullptr;
  *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (stream == nullptr || stream->captured != nullptr) {
    return report(cudaErrorStreamCaptureUnsupported);
  }
  stream->captured = new CUgraph_st;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (stream == nullptr || stream->captured == nullptr) return report(cudaErrorInvalidValue);
  *graph = std::exchange(stream->captured, nullptr);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  event->time = std::chrono::steady_clock::now();
  event->recorded = true;
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!start->recorded || !end->recorded) return report(cudaErrorInvalidResourceHandle);
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{*graph};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const auto& work : exec->graph.work) {
    const cudaError_t error = submit(stream, work);
    if (error != cudaSuccess) return report(error);
  }
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}

// ---- Kernels ------------------------------------------------------------------------------------

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  const std::lock_guard<std::mutex> lock(functions_mutex);
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = level().cc;
  attributes->binaryVersion = level().cc;
  attributes->maxDynamicSharedSizeBytes = static_cast<int>(allowed_smem(kernel));
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  const std::lock_guard<std::mutex> lock(functions_mutex);
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    allows_large_clusters(kernel) = value != 0;
  }
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > level().smem_per_block) return report(cudaErrorInvalidValue);
  allowed_smem(kernel) = static_cast<size_t>(value);
  return cudaSuccess;
}

// By threads and shared memory: registers are not known.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads,
                                                          size_t smem_bytes) {
  if (threads <= 0 || threads > 1024) return report(cudaErrorInvalidValue);
  constexpr int kMostBlocks = 32, kReservedSmem = 1024;
  const int by_smem = level().smem_per_sm / (static_cast<int>(smem_bytes) + kReservedSmem);
  const int by_threads = 2048 / ((threads + 31) / 32 * 32);
  *blocks = std::min({by_smem, by_threads, kMostBlocks});
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel,
                                           const cudaLaunchConfig_t* config) {
  int blocks = 0;
  const dim3 b = config->blockDim;
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, kernel, static_cast<int>(b.x * b.y * b.z), config->dynamicSmemBytes);
  if (error != cudaSuccess) return error;
  unsigned size = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id != cudaLaunchAttributeClusterDimension) continue;
    const auto& dim = config->attrs[i].val.clusterDim;
    size = dim.x * dim.y * dim.z;
  }
  *clusters = blocks * env_int("ASTRAI_EMU_SMS", 132) / static_cast<int>(size);
  return cudaSuccess;
}

namespace astrai::emulator {

cudaError_t launch(const cudaLaunchConfig_t& config, const void* entry,
                   std::function<void()> kernel) {
  const dim3 g = config.gridDim, b = config.blockDim;
  const uint64_t threads = uint64_t{b.x} * b.y * b.z;
  if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535 ||
      threads == 0 || threads > 1024 || b.z > 64) {
    return report(cudaErrorInvalidConfiguration);
  }
  unsigned most_cluster_blocks;
  {
    const std::lock_guard<std::mutex> lock(functions_mutex);
    if (config.dynamicSmemBytes > allowed_smem(entry)) return report(cudaErrorInvalidValue);
    most_cluster_blocks = allows_large_clusters(entry) ? 16 : 8;
  }
  dim3 cluster;
  bool overlaps = false;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (level().cc < 90) return report(cudaErrorNotSupported);
    if (config.attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      overlaps = config.attrs[i].val.programmaticStreamSerializationAllowed != 0;
    }
    if (config.attrs[i].id != cudaLaunchAttributeClusterDimension) continue;
    const auto& dim = config.attrs[i].val.clusterDim;
    cluster = dim3(dim.x, dim.y, dim.z);
    const unsigned size = dim.x * dim.y * dim.z;
    if (size == 0 || size > most_cluster_blocks || g.x % dim.x != 0 || g.y % dim.y != 0 ||
        g.z % dim.z != 0) {
      return report(cudaErrorInvalidClusterSize);
    }
  }
  cudaLaunchConfig_t kept = config;
  kept.attrs = nullptr;
  kept.numAttrs = 0;
  return submit(config.stream, [kept, cluster, overlaps, entry, kernel = std::move(kernel)] {
    return run_launch(kept, cluster, overlaps, entry, kernel);
  });
}

}  // namespace astrai::emulator
