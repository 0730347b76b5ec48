// Prefill on tensor cores: head dims 192 and 128, packed queries, paged keys.
#ifndef ASTRAI_NO_MMA

#include "kernels/attention/prefill_launch.cuh"

namespace astrai::attention {

ASTRAI_PREFILL_KERNELS(192, 128, PackedQSchedule, PagedKV);

}  // namespace astrai::attention

#endif  // ASTRAI_NO_MMA
