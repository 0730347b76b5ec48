// Host memory of tensors whose element type is known at run time, and the strides of test layouts.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/common/dtype.h"
#include "tests/kernels/testing/compare.h"
#include "tests/kernels/testing/device_buffer.h"

namespace astrai::attention {

// Value of an e4m3 code (OCP 8-bit floating point: bias 7, no infinity, 0x7f and 0xff are NaN).
inline double e4m3_value(uint8_t code) {
  static const std::vector<double> table = [] {
    std::vector<double> values(256);
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, mantissa = i & 7;
      const double magnitude =
          exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
      values[i] = (i & 0x7f) == 0x7f ? std::nan("") : i & 0x80 ? -magnitude : magnitude;
    }
    return values;
  }();
  return table[code];
}

// The code nearest to x, of two the even one; saturates at 448, NaN stays NaN.
inline uint8_t e4m3_code(double x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return 0x7f | sign;
  const double magnitude = std::fabs(x);
  uint8_t low = 0, high = 0x7e;  // codes 0 .. 0x7e are in order
  while (high - low > 1) {
    const uint8_t middle = static_cast<uint8_t>((low + high) / 2);
    (e4m3_value(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - e4m3_value(low), above = e4m3_value(high) - magnitude;
  return (above < below || (above == below && low % 2 != 0) ? high : low) | sign;
}

// bf16, fp16 or e4m3; new elements are NaN.
struct ElementBuffer {
  DType dtype = DType::kBF16;
  std::vector<uint8_t> bytes;

  ElementBuffer() = default;
  ElementBuffer(DType type, size_t count) : dtype(type), bytes(count * size_of(type), 0xff) {}

  size_t size_of_element() const { return size_of(dtype); }
  size_t size() const { return bytes.size() / size_of_element(); }
  double get(int64_t at) const {
    if (dtype == DType::kE4M3) return e4m3_value(bytes[at]);
    return dtype == DType::kBF16 ? testing::to_double(as<__nv_bfloat16>(at))
                                 : testing::to_double(as<__half>(at));
  }
  // All of them; fp32 holds each exactly.
  std::vector<float> values() const {
    std::vector<float> values(size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(get(i));
    return values;
  }
  void set(int64_t at, double x) {
    if (dtype == DType::kE4M3) {
      bytes[at] = e4m3_code(x);
    } else if (dtype == DType::kBF16) {
      put(at, testing::from_double<__nv_bfloat16>(x));
    } else {
      put(at, testing::from_double<__half>(x));
    }
  }

 private:
  template <typename T>
  T as(int64_t at) const {
    T x;
    std::memcpy(&x, bytes.data() + at * sizeof(T), sizeof(T));
    return x;
  }
  template <typename T>
  void put(int64_t at, T x) {
    std::memcpy(bytes.data() + at * sizeof(T), &x, sizeof(T));
  }
};

enum class Layout {
  kContiguous,   // [batch or pages, seq, heads, dim]
  kHeadsFirst,   // [batch or pages, heads, seq, dim] in memory
  kInterleaved,  // K and V as [:, 0] and [:, 1] of one [batch or pages, 2, seq, heads, dim]
  kPadded,       // gaps after heads, rows and batches
};

// Offsets of a [batch, seq, heads, dim] tensor in its buffer, in elements.
struct Strides {
  int64_t offset = 0;
  int64_t batch = 0;
  int64_t seq = 0;
  int64_t head = 0;
  size_t size = 0;  // of the buffer

  int64_t at(int b, int i, int h) const { return offset + b * batch + i * seq + h * head; }
};

// Of one of the two tensors, if they are to be interleaved.
inline Strides make_strides(Layout layout, int batch, int seq, int heads, int dim) {
  Strides s;
  switch (layout) {
    case Layout::kContiguous:
    case Layout::kInterleaved:
      s.head = dim;
      s.seq = int64_t{heads} * dim;
      s.batch = seq * s.seq;
      break;
    case Layout::kHeadsFirst:
      s.seq = dim;
      s.head = int64_t{seq} * dim;
      s.batch = heads * s.head;
      break;
    case Layout::kPadded:
      s.head = dim + 16;
      s.seq = heads * s.head + 32;
      s.batch = seq * s.seq + 48;
      break;
  }
  s.size = static_cast<size_t>(batch * s.batch);
  return s;
}

}  // namespace astrai::attention
