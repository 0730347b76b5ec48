#include "python/bindings/attention_launch.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "python/bindings/device.h"
#include "python/bindings/workspace.h"

namespace astrai::bindings {
namespace {

using attention::AttentionParams;
using attention::QWorkMap;

void require_implemented(const Call& call, const AttentionParams& params) {
  if (const char* reason = attention::why_not_implemented(params)) {
    raise(ErrorClass::kShape, std::string(call.function()) + ": " + reason);
  }
}

// A map for packed queries, in new memory that the caller keeps until the launch.
QWorkMap make_map(Call& call, const AttentionParams& params, PyObject* like, Owned* memory,
                  cudaStream_t stream) {
  const int64_t capacity = attention::q_work_map_capacity(params.batch, params.total_q);
  *memory = Owned(new_bytes(like, static_cast<size_t>(capacity) * 2 * sizeof(int32_t)));
  auto* batch = static_cast<int32_t*>(call.input(memory->get(), "map").data);
  const QWorkMap map = {batch, batch + capacity, static_cast<int>(capacity)};
  require_launched(call.function(),
                   attention::launch_q_work_map(params.qo_indptr, params.batch, batch,
                                                batch + capacity, map.size, stream));
  return map;
}

// 1, 2, 4, ... below `most`, and `most`.
std::vector<int> up_to(int64_t most) {
  std::vector<int> sizes;
  for (int64_t size = 1; size < most; size *= 2) sizes.push_back(static_cast<int>(size));
  if (most > 0) sizes.push_back(static_cast<int>(most));
  return sizes;
}

PyObject* workspace_size(const char* function, PyObject* const* args,
                         size_t (*bytes_of)(const AttentionParams&, int)) {
  constexpr const char* kNames[] = {"batch",    "max_q_len",  "q_heads",       "kv_heads",
                                    "head_dim", "v_head_dim", "deterministic", "device"};
  int64_t values[kWorkspaceSizeArguments];
  for (int i = 0; i < kWorkspaceSizeArguments; ++i) {
    values[i] = read_int(function, args[i], kNames[i]);
    if (values[i] < 0 || values[i] > std::numeric_limits<int>::max()) {
      raise_argument(ErrorClass::kShape, function, kNames[i], "in 0..2147483647",
                     std::to_string(values[i]));
    }
  }
  AttentionParams params;
  params.q_heads = static_cast<int>(values[2]);
  params.kv_heads = static_cast<int>(values[3]);
  params.head_dim = static_cast<int>(values[4]);
  params.v_head_dim = static_cast<int>(values[5]);
  params.deterministic = values[6] != 0;
  params.kv_len = std::numeric_limits<int>::max() - 1024;  // lengths may grow
  // Without requests there are no tensors to look at.
  if (const char* reason = attention::why_not_implemented(params)) {
    raise(ErrorClass::kShape, std::string(function) + ": " + reason);
  }
  const int device = static_cast<int>(values[7]);
  require_capability(function, device);
  const int sms = sm_count(device);
  // Plans need not grow with the sizes of a call: the workspace is to do for smaller ones, too.
  size_t bytes = 0;
  for (const DType kv_dtype : {DType::kBF16, DType::kE4M3}) {
    params.kv_dtype = kv_dtype;
    for (const int batch : up_to(values[0])) {
      params.batch = batch;
      for (const int q_len : up_to(values[1])) {
        params.q_len = q_len;
        bytes = std::max(bytes, bytes_of(params, sms));
      }
    }
  }
  return checked(PyLong_FromSize_t(bytes));
}

}  // namespace

bool has_work(const AttentionParams& params) {
  const int queries = params.qo_indptr == nullptr ? params.q_len : params.total_q;
  return params.batch > 0 && queries > 0 && params.q_heads > 0;
}

void run_decode(Call& call, const AttentionParams& params, const LaunchMemory& memory) {
  if (!has_work(params)) return;
  require_implemented(call, params);
  const int device = call.device().device_id;
  require_capability(call.function(), device);
  const size_t needed = attention::decode_workspace_bytes(params, sm_count(device));
  const Workspace workspace(call, memory.workspace, memory.spare, memory.like, needed);
  auto* stream = static_cast<cudaStream_t>(call.stream());
  DeviceGuard guard(call.function(), device);
  require_launched(call.function(),
                   attention::launch_decode(params, workspace.data(), workspace.bytes(), stream));
}

void run_prefill(Call& call, const AttentionParams& params, const LaunchMemory& memory,
                 const QWorkMap* map) {
  if (!has_work(params)) return;
  require_implemented(call, params);
  const int device = call.device().device_id;
  require_capability(call.function(), device);
  const size_t needed = attention::prefill_workspace_bytes(params, sm_count(device));
  const Workspace workspace(call, memory.workspace, memory.spare, memory.like, needed);
  auto* stream = static_cast<cudaStream_t>(call.stream());
  DeviceGuard guard(call.function(), device);
  Owned map_memory;
  const QWorkMap used = map != nullptr ? *map
                        : params.qo_indptr != nullptr
                            ? make_map(call, params, memory.like, &map_memory, stream)
                            : QWorkMap{};
  require_launched(call.function(), attention::launch_prefill(params, used, workspace.data(),
                                                              workspace.bytes(), stream));
}

PyObject* decode_workspace_size(const char* function, PyObject* const* args) {
  return workspace_size(function, args, attention::decode_workspace_bytes);
}

PyObject* prefill_workspace_size(const char* function, PyObject* const* args) {
  return workspace_size(function, args, attention::prefill_workspace_bytes);
}

}  // namespace astrai::bindings
