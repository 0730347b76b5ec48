// Prefill on tensor cores: head dims 192 and 128, packed queries, contiguous keys.
#ifndef ASTRAI_NO_MMA

#include "kernels/attention/prefill_launch.cuh"

namespace astrai::attention {

ASTRAI_PREFILL_KERNELS(192, 128, PackedQSchedule, ContigKV);

}  // namespace astrai::attention

#endif  // ASTRAI_NO_MMA
