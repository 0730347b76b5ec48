// Module rotary_emb: rotary position embedding, with angles per token (rotary_emb) or from a table
// (rotary_embed), also together with the write of keys and values into a cache (rope_append_kv).
#include <pybind11/pybind11.h>

#include "kernels/rotary/rope_append.h"
#include "kernels/rotary/rotary.h"
#include "python/bindings/device.h"
#include "python/bindings/module.h"
#include "python/bindings/rope_append_call.h"
#include "python/bindings/rotary_call.h"
#include "python/bindings/tensor.h"

namespace astrai::bindings {
namespace {

cudaError_t launch_kernel(const rotary::RotaryParams& params, cudaStream_t stream) {
  return rotary::launch_rotary(params, stream);
}
cudaError_t launch_kernel(const rotary::RopeAppendParams& params, cudaStream_t stream) {
  return rotary::launch_rope_append(params, stream);
}

template <typename Params>
void launch(const Call& call, const Params& params) {
  if (!has_work(params)) return;
  const int device = call.device().device_id;
  require_capability(call.function(), device);
  auto* stream = static_cast<cudaStream_t>(call.stream());
  DeviceGuard guard(call.function(), device);
  require_launched(call.function(), launch_kernel(params, stream));
}

PyObject* rotary_emb(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "rotary_emb";
  require_count(kName, count, kRotaryEmbArguments);
  Call call(kName);
  launch(call, read_rotary_emb(call, args));
  call.finish();
  Py_RETURN_NONE;
}

PyObject* rotary_embed(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "rotary_embed";
  require_count(kName, count, kRotaryEmbedArguments);
  Call call(kName);
  launch(call, read_rotary_embed(call, args));
  call.finish();
  Py_RETURN_NONE;
}

PyObject* rope_append_kv(PyObject* const* args, Py_ssize_t count) {
  constexpr const char* kName = "rope_append_kv";
  require_count(kName, count, kRopeAppendArguments);
  Call call(kName);
  launch(call, read_rope_append(call, args));
  call.finish();
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    ASTRAI_FASTCALL("rotary_emb", rotary_emb,
                    "rotary_emb(x, freqs_cis, out, /) -> None\n\n"
                    "Writes out, which may be x; see astrai.extension.ops.rotary."),
    ASTRAI_FASTCALL("rotary_embed", rotary_embed,
                    "rotary_embed(q, k, cos_sin_cache, positions, interleaved, rotary_dim, q_out, "
                    "k_out, /) -> None\n\nWrites q_out and k_out, which may be q and k; see "
                    "astrai.extension.ops.rotary."),
    ASTRAI_FASTCALL("rope_append_kv", rope_append_kv,
                    "rope_append_kv(q, k, v, cos_sin_cache, positions, k_cache, v_cache, slots, "
                    "interleaved, rotary_dim, k_scale, v_scale, q_out, /) -> None\n\n"
                    "Writes the caches and q_out, which may be q; see "
                    "astrai.extension.ops.rotary."),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace astrai::bindings

PYBIND11_MODULE(rotary_emb, module) {
  module.doc() = "Rotary position embedding on CUDA.";
  astrai::bindings::define_module(module, "rotary_emb", astrai::bindings::functions);
}
