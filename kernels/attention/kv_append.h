// Putting new keys and values into a paged cache in a launch of its own, for launches whose blocks
// do not each put what they read.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/attention.h"

namespace astrai::attention {

// Writes params.new_k and params.new_v into the cache, as AttentionParams describes.
cudaError_t launch_kv_append(const AttentionParams& params, cudaStream_t stream);

}  // namespace astrai::attention
