// Part of binding_probe: the kernel params that the bindings make of their arguments, as dicts.
#pragma once

#include <Python.h>

namespace astrai::bindings {

// dense_params(function, *arguments), varlen_params(*arguments), paged_params(function,
// most_queries, *arguments), merge_params(*arguments), rotary_emb_params(*arguments),
// rotary_embed_params(*arguments), rope_append_params(*arguments). Tensors may be on any device.
extern PyMethodDef probe_params_functions[];

}  // namespace astrai::bindings
