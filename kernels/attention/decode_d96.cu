// Decode on tensor cores: head dims up to 96, contiguous keys.
#ifndef ASTRAI_NO_MMA

#include "kernels/attention/decode_launch.cuh"

namespace astrai::attention {

ASTRAI_DECODE_KERNELS(96, 96, ContigKV);

}  // namespace astrai::attention

#endif  // ASTRAI_NO_MMA
