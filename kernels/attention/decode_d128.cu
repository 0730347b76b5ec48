// Decode on tensor cores: head dims up to 128, contiguous keys.
#ifndef ASTRAI_NO_MMA

#include "kernels/attention/decode_launch.cuh"

namespace astrai::attention {

ASTRAI_DECODE_KERNELS(128, 128, ContigKV);

}  // namespace astrai::attention

#endif  // ASTRAI_NO_MMA
