// CUDA's 8-bit float types, as storage: the project converts by kernels/common/fp8.cuh.
#pragma once

struct __nv_fp8_e4m3 {
  unsigned char __x;
};
struct __nv_fp8_e5m2 {
  unsigned char __x;
};
