// Prefill on tensor cores, head dim 256.
#ifndef ASTRAI_NO_MMA

#include "kernels/attention/prefill_launch.cuh"

namespace astrai::attention {

template cudaError_t launch_prefill_mma<__nv_bfloat16, 256>(
    const PrefillArgs<DenseQSchedule, ContigKV<__nv_bfloat16>>&, const PrefillPlan&, cudaStream_t);
template cudaError_t launch_prefill_mma<__half, 256>(
    const PrefillArgs<DenseQSchedule, ContigKV<__half>>&, const PrefillPlan&, cudaStream_t);

}  // namespace astrai::attention

#endif  // ASTRAI_NO_MMA
