// Prefill on tensor cores: head dims up to 192, packed queries, paged keys.
#ifndef ASTRAI_NO_MMA

#include "kernels/attention/prefill_launch.cuh"

namespace astrai::attention {

ASTRAI_PREFILL_KERNELS(192, 192, PackedQSchedule, PagedKV);

}  // namespace astrai::attention

#endif  // ASTRAI_NO_MMA
