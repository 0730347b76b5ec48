// Reading bool masks: bytes to bits. Mask rows may start at any address.
#pragma once

#include <cstdint>

#include "kernels/attention/attention.h"

namespace astrai::attention {

// Bit i of the result = byte i of `bytes` is not 0 (i in 0..3).
__host__ __device__ constexpr uint32_t nonzero_bytes(uint32_t bytes) {
  // The high bit of a byte is set by adding 127 to its low 7 bits iff those are not all 0.
  const uint32_t ones = ((((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) >> 7) & 0x01010101u;
  // Moves the bits at 0, 8, 16 and 24 to 24..27; no two products meet below bit 28.
  return (ones * 0x01020408u) >> 24;
}

#ifdef __CUDACC__

// Row of a mask: the bytes of keys 0 .. kv_len - 1.
__device__ __forceinline__ const uint8_t* mask_row(const MaskView& mask, int batch, int head,
                                                   int position) {
  return reinterpret_cast<const uint8_t*>(mask.data) + batch * mask.batch_stride +
         head * mask.head_stride + position * mask.q_stride;
}

// Bit i of the result = key `first_key` + i may be attended (0 for keys from kv_len on). Nothing
// outside the row is read, except up to 3 bytes before its start, which lie in the same aligned 4
// bytes as a byte of it.
__device__ __forceinline__ uint32_t mask_bits_32(const uint8_t* row, int first_key, int kv_len) {
  const uint8_t* bytes = row + first_key;
  const uint32_t misaligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(bytes)) & 15u;
  uint32_t bits = 0;
  if (first_key + 32 <= kv_len && misaligned == 0) {
    const uint4* quads = reinterpret_cast<const uint4*>(bytes);
    const uint4 a = __ldg(quads);
    const uint4 b = __ldg(quads + 1);
    const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) bits |= nonzero_bytes(words[i]) << (4 * i);
  } else if (first_key + 36 <= kv_len) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(bytes - (misaligned & 3u));
    uint32_t low = __ldg(words);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t high = __ldg(words + i + 1);
      bits |= nonzero_bytes(__funnelshift_r(low, high, (misaligned & 3u) * 8)) << (4 * i);
      low = high;
    }
  } else {
    for (int i = 0; i < 32 && first_key + i < kv_len; ++i) {
      bits |= static_cast<uint32_t>(bytes[i] != 0) << i;
    }
  }
  return bits;
}

#endif  // __CUDACC__

}  // namespace astrai::attention
