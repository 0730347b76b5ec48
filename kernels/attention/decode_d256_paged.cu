// Decode on tensor cores: head dims up to 256, paged keys.
#ifndef ASTRAI_NO_MMA

#include "kernels/attention/decode_launch.cuh"

namespace astrai::attention {

ASTRAI_DECODE_KERNELS(256, 256, PagedKV);

}  // namespace astrai::attention

#endif  // ASTRAI_NO_MMA
