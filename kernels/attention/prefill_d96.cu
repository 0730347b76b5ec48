// Prefill on tensor cores: head dims up to 96, rectangular queries, contiguous keys.
#ifndef ASTRAI_NO_MMA

#include "kernels/attention/prefill_launch.cuh"

namespace astrai::attention {

ASTRAI_PREFILL_KERNELS(96, 96, DenseQSchedule, ContigKV);

}  // namespace astrai::attention

#endif  // ASTRAI_NO_MMA
