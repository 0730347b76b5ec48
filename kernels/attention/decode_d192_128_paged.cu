// Decode on tensor cores: head dims 192 and 128, paged keys.
#ifndef ASTRAI_NO_MMA

#include "kernels/attention/decode_launch.cuh"

namespace astrai::attention {

ASTRAI_DECODE_KERNELS(192, 128, PagedKV);

}  // namespace astrai::attention

#endif  // ASTRAI_NO_MMA
