// Quantisation to fp8: cast, largest |x|, and transposition in one pass over the input.
//
// codes = saturate(round_to_nearest_even(float(x) * multiplier)); NaN stays NaN, and infinities
// become the largest finite code of their sign. The largest |x| is that of the input itself, before
// scaling. Nothing waits for the device: scales are read and written there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace astrai::fp8 {

// Where the multiplier of an element comes from.
enum class Scaling : int {
  kMultiplier,    // scale[0] is the multiplier
  kStep,          // scale[0] is the step; the multiplier is 1 / step
  kDynamic,       // step from the largest finite |x| of the tensor; two launches
  kRowwise,       // a step for each row, from its largest finite |x|; two launches
  kBlock1x128,    // a step for 128 columns of a row; one pass
  kBlock128x128,  // a step for 128 rows and 128 columns of a batch element; one pass
};

// Delayed scaling's state on the device: fp32 [history | step | non-finite count | amax | done].
// The last block of a launch enters the amax at history[index], sets
// step = max(max(history) / fp8_max / margin, 1e-12), and clears amax and done. A non-finite amax
// changes neither history nor step; it adds 1 to the count.
struct RingFold {
  float* state = nullptr;  // null: no fold. history + 4 elements; amax and done are 0 between calls
  int history = 0;         // at least 1
  int index = 0;           // 0 .. history - 1
  float fp8_max = 448.0f;
  float margin = 1.0f;  // a power of two
};

struct QuantizeParams {
  DType in_type = DType::kBF16;   // bf16, fp16 or fp32
  DType out_type = DType::kE4M3;  // e4m3 or e5m2

  // x [batch, rows, columns]; strides in elements, of any value (0 repeats).
  const void* x = nullptr;
  int64_t batch = 1;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 1;

  // Either may be null. With both null only the largest |x| is taken.
  uint8_t* out = nullptr;             // [batch, rows, columns], dense
  uint8_t* out_transposed = nullptr;  // [columns, batch * rows], dense

  Scaling scaling = Scaling::kMultiplier;
  const float* scale = nullptr;  // kMultiplier, kStep: one element
  // Steps written: kDynamic [1], kRowwise [batch, rows], kBlock1x128 [batch, rows, ceil(columns /
  // 128)], kBlock128x128 [batch, ceil(rows / 128), ceil(columns / 128)]. Null with other scalings.
  float* step = nullptr;

  // Largest |x| [1]; NaN if x has one. Set to zero by the launch, unless `accumulate_amax`: then
  // it is the maximum of what stood there (not negative) and of this call.
  float* amax = nullptr;
  bool accumulate_amax = false;
  // kDynamic: scratch of one element for the largest finite |x|.
  float* finite_amax = nullptr;

  RingFold ring;  // with kMultiplier and kStep only
};

// Launches on the current device. cudaErrorInvalidValue for params that can_implement
// (quantize_plan.h) refuses, else the launch's error. x without elements launches no kernel: amax
// is zeroed, ring and steps stay as they are.
cudaError_t launch_quantize(const QuantizeParams& params, cudaStream_t stream);

}  // namespace astrai::fp8
