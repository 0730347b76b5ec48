// Comparison of a kernel's result with a reference in fp64.
#pragma once

#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "tests/kernels/testing/testing.h"

namespace astrai::testing {

struct Error {
  double relative = 0;    // ||out - ref|| / ||ref||; ||out|| where ref is all zero
  double max_abs = 0;     // largest |out - ref|
  size_t worst = 0;       // index of max_abs
  size_t mismatches = 0;  // NaN or infinity on one side only
  size_t first_mismatch = 0;
};

// A NaN matches a NaN, an infinity the infinity of the same sign. T converts to double by value or
// through float (bf16 and fp16).
template <typename T>
double to_double(const T& value) {
  return static_cast<double>(static_cast<float>(value));
}
inline double to_double(double value) { return value; }

template <typename T>
Error compare(const std::vector<T>& out, const std::vector<double>& ref) {
  if (out.size() != ref.size()) {
    throw Abort("compare: sizes differ: " + std::to_string(out.size()) + " and " +
                std::to_string(ref.size()));
  }
  Error error;
  double difference2 = 0, norm2 = 0;
  for (size_t i = 0; i < ref.size(); ++i) {
    const double a = to_double(out[i]), b = ref[i];
    if (!std::isfinite(a) || !std::isfinite(b)) {
      const bool same = (std::isnan(a) && std::isnan(b)) || a == b;
      if (!same && error.mismatches++ == 0) error.first_mismatch = i;
      continue;
    }
    const double difference = std::abs(a - b);
    difference2 += difference * difference;
    norm2 += b * b;
    if (difference > error.max_abs) {
      error.max_abs = difference;
      error.worst = i;
    }
  }
  error.relative = std::sqrt(norm2 > 0 ? difference2 / norm2 : difference2);
  return error;
}

template <typename T>
void expect_close(const char* file, int line, const std::vector<T>& out,
                  const std::vector<double>& ref, double relative, double max_abs) {
  const Error error = compare(out, ref);
  if (error.mismatches > 0) {
    const size_t i = error.first_mismatch;
    add_failure(file, line,
                std::to_string(error.mismatches) + " of " + std::to_string(ref.size()) +
                    " elements are NaN or infinite on one side only, first at " +
                    std::to_string(i) + ": got " + show(to_double(out[i])) + ", expected " +
                    show(ref[i]));
  }
  if (!(error.relative <= relative) || !(error.max_abs <= max_abs)) {
    const size_t i = error.worst;
    add_failure(file, line,
                "relative error " + show(error.relative) + " (allowed " + show(relative) +
                    "), max error " + show(error.max_abs) + " (allowed " + show(max_abs) + ") at " +
                    std::to_string(i) + ": got " + show(to_double(out[i])) + ", expected " +
                    show(ref[i]));
  }
}

}  // namespace astrai::testing

// `out` (any float type) against `ref` (std::vector<double>): both errors within their bounds, and
// NaN and infinity in the same places.
#define EXPECT_CLOSE(out, ref, relative, max_abs) \
  ::astrai::testing::expect_close(__FILE__, __LINE__, (out), (ref), (relative), (max_abs))
