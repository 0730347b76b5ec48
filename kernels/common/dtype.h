// Element types that kernels take, as a run-time tag.
//
// Kernels know neither torch nor Python, so a tensor's type travels in their params structs as a
// DType. Plain C++: no CUDA header is needed to use it.
#pragma once

#include <cstddef>

namespace astrai {

enum class DType : int {
  kBF16,  // bfloat16: 8 exponent bits, 7 mantissa bits
  kFP16,  // IEEE binary16
  kFP32,  // IEEE binary32
  kE4M3,  // fp8 e4m3fn: no infinity, largest finite value 448
  kE5M2,  // fp8 e5m2: IEEE like, largest finite value 57344
};

// Bytes of one element; 0 for a value outside the enum.
constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
    case DType::kFP16:
      return 2;
    case DType::kFP32:
      return 4;
    case DType::kE4M3:
    case DType::kE5M2:
      return 1;
  }
  return 0;
}

// The name users know (torch's spelling), for messages.
constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return "bfloat16";
    case DType::kFP16:
      return "float16";
    case DType::kFP32:
      return "float32";
    case DType::kE4M3:
      return "float8_e4m3fn";
    case DType::kE5M2:
      return "float8_e5m2";
  }
  return "unknown";
}

}  // namespace astrai
