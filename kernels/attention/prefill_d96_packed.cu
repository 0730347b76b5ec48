// Prefill on tensor cores: head dims up to 96, packed queries, contiguous keys.
#ifndef ASTRAI_NO_MMA

#include "kernels/attention/prefill_launch.cuh"

namespace astrai::attention {

ASTRAI_PREFILL_KERNELS(96, 96, PackedQSchedule, ContigKV);

}  // namespace astrai::attention

#endif  // ASTRAI_NO_MMA
