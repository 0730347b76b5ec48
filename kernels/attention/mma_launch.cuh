// Launchers of the MMA kernels. Each head dim is instantiated in a translation unit of its own
// (decode_d64.cu, prefill_d64.cu, ...), for both element types, so that no compiler run is long.
#pragma once

#include "kernels/attention/decode_args.cuh"
#include "kernels/attention/plan.h"
#include "kernels/attention/prefill_args.cuh"

namespace astrai::attention {

template <typename T, int kHeadDim>
cudaError_t launch_decode_mma(const DecodeArgs<ContigKV<T>>& args, const DecodePlan& plan,
                              int batch, cudaStream_t stream);

template <typename T, int kHeadDim>
cudaError_t launch_prefill_mma(const PrefillArgs<DenseQSchedule, ContigKV<T>>& args,
                               const PrefillPlan& plan, cudaStream_t stream);

}  // namespace astrai::attention
