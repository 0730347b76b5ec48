// Prefill on tensor cores: head dims up to 256, packed queries, paged keys.
#ifndef ASTRAI_NO_MMA

#include "kernels/attention/prefill_launch.cuh"

namespace astrai::attention {

ASTRAI_PREFILL_KERNELS(256, 256, PackedQSchedule, PagedKV);
ASTRAI_PREFILL_LARGE_KERNELS(256, 256, PackedQSchedule, PagedKV);

}  // namespace astrai::attention

#endif  // ASTRAI_NO_MMA
