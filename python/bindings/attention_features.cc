#include "python/bindings/attention_features.h"

#include <cmath>

namespace astrai::bindings {
namespace {

float read_scale(const Call& call, PyObject* object, int64_t head_dim) {
  if (object == Py_None) return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  const double scale = read_double(call.function(), object, "scale");
  if (!std::isfinite(static_cast<float>(scale))) {
    raise_argument(ErrorClass::kShape, call.function(), "scale", "finite in fp32",
                   std::to_string(scale));
  }
  return static_cast<float>(scale);
}

float read_softcap(const Call& call, PyObject* object) {
  const double softcap = read_double(call.function(), object, "softcap");
  if (!std::isfinite(static_cast<float>(softcap)) || softcap < 0) {
    raise_argument(ErrorClass::kShape, call.function(), "softcap", "finite and 0 or more",
                   std::to_string(softcap));
  }
  return static_cast<float>(softcap);
}

struct Window {
  int64_t left, right;
};

Window read_window(const Call& call, PyObject* object) {
  constexpr const char* kExpected = "a pair (left, right) of ints, each -1 (unlimited) or more";
  Owned pair(PySequence_Check(object) != 0 ? PySequence_Tuple(object) : nullptr);
  if (pair.get() == nullptr || PyTuple_GET_SIZE(pair.get()) != 2) {
    PyErr_Clear();
    raise_argument(pair.get() == nullptr ? ErrorClass::kType : ErrorClass::kShape, call.function(),
                   "window", kExpected, describe(object));
  }
  int64_t sides[2];
  for (int i = 0; i < 2; ++i) {
    sides[i] = read_int(call.function(), PyTuple_GET_ITEM(pair.get(), i), "window");
    if (sides[i] < -1) {
      raise_argument(ErrorClass::kShape, call.function(), "window", kExpected, describe(object));
    }
  }
  return {sides[0], sides[1]};
}

}  // namespace

void read_features(Call& call, PyObject* const* args, attention::AttentionParams* params) {
  params->causal = read_bool(call.function(), args[0], "is_causal");
  params->scale = read_scale(call, args[1], params->head_dim);
  const Window window = read_window(call, args[2]);
  params->window_left = window.left >= params->kv_len ? -1 : static_cast<int>(window.left);
  params->window_right = window.right >= params->q_len ? -1 : static_cast<int>(window.right);
  params->softcap = read_softcap(call, args[3]);
  if (args[4] != Py_None) {
    const TensorView sinks = call.input(args[4], "sinks");
    require_dtype(call, sinks, {ScalarType::kFloat32});
    require_shape(call, sinks, {params->q_heads}, "[q_heads]");
    require_contiguous(call, sinks);
    params->sinks = static_cast<const float*>(sinks.data);
  }
  read_step(call, args[5], "k_scale", &params->k_scale, &params->k_scale_pointer);
  read_step(call, args[6], "v_scale", &params->v_scale, &params->v_scale_pointer);
}

}  // namespace astrai::bindings
