// Decode on tensor cores, head dim 128.
#ifndef ASTRAI_NO_MMA

#include "kernels/attention/decode_launch.cuh"

namespace astrai::attention {

template cudaError_t launch_decode_mma<__nv_bfloat16, 128>(
    const DecodeArgs<ContigKV<__nv_bfloat16>>&, const DecodePlan&, int, cudaStream_t);
template cudaError_t launch_decode_mma<__half, 128>(const DecodeArgs<ContigKV<__half>>&,
                                                    const DecodePlan&, int, cudaStream_t);

}  // namespace astrai::attention

#endif  // ASTRAI_NO_MMA
