// Prefill on tensor cores: head dims up to 64, packed queries, contiguous keys.
#ifndef ASTRAI_NO_MMA

#include "kernels/attention/prefill_launch.cuh"

namespace astrai::attention {

ASTRAI_PREFILL_KERNELS(64, 64, PackedQSchedule, ContigKV);
ASTRAI_PREFILL_LARGE_KERNELS(64, 64, PackedQSchedule, ContigKV);

}  // namespace astrai::attention

#endif  // ASTRAI_NO_MMA
