// One tile of a quantisation: read once, measured, cast, and written in either or both orders.
//
// A thread owns 16 neighbouring columns of thread_rows neighbouring rows, all loaded before any is
// used. For the transposed order it turns 4x4 codes within registers and lays words of 4 rows into
// shared memory, from where 16 rows of a column leave in one store.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/common/reduce.cuh"
#include "kernels/common/vec.cuh"
#include "kernels/fp8/convert.cuh"
#include "kernels/fp8/quantize_plan.h"
#include "kernels/fp8/ring.cuh"

namespace astrai::fp8 {

// 16 elements of T as they lie in memory.
template <typename T>
struct RawColumns {
  static constexpr int kWords = kThreadColumns * static_cast<int>(sizeof(T)) / 4;
  uint32_t words[kWords];

  __device__ __forceinline__ void load(const T* x, int64_t stride, int valid, bool wide) {
    if (wide && valid == kThreadColumns) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        uint32_t quad[4];
        ptx::ld_global(quad, x + i * 4 / static_cast<int>(sizeof(T)));
#pragma unroll
        for (int j = 0; j < 4; ++j) words[i + j] = quad[j];
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
#pragma unroll
    for (int i = 0; i < kThreadColumns; ++i) {
      if (i >= valid) continue;
      if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(x[i * stride]);
      } else {
        const uint32_t bits = reinterpret_cast<const uint16_t*>(x)[i * stride];
        words[i / 2] |= bits << (16 * (i % 2));
      }
    }
  }

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else {
      const float2 pair = unpack2<T>(words[i / 2]);
      return i % 2 == 0 ? pair.x : pair.y;
    }
  }
};

__device__ __forceinline__ uint32_t magnitude_bits(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}
__device__ __forceinline__ float finite_magnitude(float x) {
  return is_finite(x) ? fabsf(x) : 0.0f;
}

__device__ __forceinline__ uint32_t block_max(uint32_t value, uint32_t* scratch) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value = max(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  constexpr int kWarps = kQuantizeThreads / 32;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) most = max(most, scratch[i]);
  __syncthreads();
  return most;
}

__device__ __forceinline__ void store_columns(uint8_t* target, const uint32_t (&codes)[4],
                                              int valid, bool wide) {
  if (wide && valid == kThreadColumns) {
    ptx::st_global(target, codes);
    return;
  }
#pragma unroll
  for (int i = 0; i < kThreadColumns; ++i) {
    if (i < valid) target[i] = static_cast<uint8_t>(codes[i / 4] >> (8 * (i % 4)));
  }
}

// Rows become columns: byte i of turned[j] is byte j of rows[i].
__device__ __forceinline__ void turn4x4(const uint32_t (&rows)[4], uint32_t (&turned)[4]) {
  const uint32_t ab01 = __byte_perm(rows[0], rows[1], 0x5140);
  const uint32_t ab23 = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t cd01 = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t cd23 = __byte_perm(rows[2], rows[3], 0x7362);
  turned[0] = __byte_perm(ab01, cd01, 0x5410);
  turned[1] = __byte_perm(ab01, cd01, 0x7632);
  turned[2] = __byte_perm(ab23, cd23, 0x5410);
  turned[3] = __byte_perm(ab23, cd23, 0x7632);
}

// `measure` is kDynamic's first launch: it takes both maxima and writes no codes.
template <typename T, DType kFormat, int kThreadRows>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_kernel(QuantizeParams p, QuantizePlan plan, bool measure) {
  __shared__ uint32_t scratch[kQuantizeThreads / 32];
  // kDynamic's second launch goes backwards: what the first read last is still in the L2.
  const bool backwards = p.scaling == Scaling::kDynamic && !measure;
  const int64_t tile = backwards ? plan.tiles - 1 - blockIdx.x : int64_t{blockIdx.x};
  const int64_t column_tile = tile % plan.column_tiles;
  const int64_t row_tile = tile / plan.column_tiles % plan.row_tiles;
  const int64_t b = tile / plan.column_tiles / plan.row_tiles;
  constexpr int kGroups = kTileColumns / kThreadColumns;
  const int group = threadIdx.x % kGroups;
  const int64_t column = column_tile * kTileColumns + group * kThreadColumns;
  const int64_t row =
      (row_tile * kRowThreads + static_cast<int>(threadIdx.x) / kGroups) * kThreadRows;

  RawColumns<T> x[kThreadRows];
  int valid[kThreadRows];
  const T* source = static_cast<const T*>(p.x) + b * p.batch_stride + column * p.column_stride;
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int64_t end = row + i >= p.rows       ? 0
                        : row + i == p.rows - 1 ? plan.last_row_columns
                                                : p.columns;
    valid[i] = static_cast<int>(max(int64_t{0}, min(int64_t{kThreadColumns}, end - column)));
    x[i].load(source + (row + i) * p.row_stride, p.column_stride, valid[i], plan.wide_in);
  }

  if (p.amax != nullptr || p.ring.state != nullptr) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
      for (int j = 0; j < kThreadColumns; ++j) most = max(most, magnitude_bits(x[i][j]));
    }
    most = block_max(most, scratch);
    if (threadIdx.x == 0) {
      if (p.ring.state != nullptr) {
        atomic_max_bits(p.ring.state + p.ring.history + 2, most);
      } else {
        atomic_max_bits(p.amax, most);
      }
    }
  }

  // One multiplier for each row of the thread.
  float multiplier[kThreadRows];
  if (p.scaling == Scaling::kMultiplier || p.scaling == Scaling::kStep) {
    const float given = p.scale != nullptr ? p.scale[0] : 1.0f;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      multiplier[i] = p.scaling == Scaling::kStep ? multiplier_of(given) : given;
    }
  } else if (p.scaling == Scaling::kRowwise) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      multiplier[i] = row + i < p.rows ? multiplier_of(p.step[b * p.rows + row + i]) : 1.0f;
    }
  } else if (p.scaling == Scaling::kDynamic && !measure) {
    const float step = step_of(p.finite_amax[0], max_of(kFormat));
    if (blockIdx.x == 0 && threadIdx.x == 0) p.step[0] = step;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) multiplier[i] = multiplier_of(step);
  } else {
    float most[kThreadRows];
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      most[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < kThreadColumns; ++j) most[i] = fmaxf(most[i], finite_magnitude(x[i][j]));
      all = fmaxf(all, most[i]);
    }
    if (p.scaling != Scaling::kBlock1x128) {  // kBlock128x128, or kDynamic's first launch
      all = __uint_as_float(block_max(__float_as_uint(all), scratch));
      if (measure) {
        if (threadIdx.x == 0) atomic_max_bits(p.finite_amax, __float_as_uint(all));
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const bool square = p.scaling == Scaling::kBlock128x128;
      const float amax = square ? all : lanes_max<kGroups>(most[i]);
      const float step = step_of(amax, max_of(kFormat));
      multiplier[i] = multiplier_of(step);
      if (square) {
        if (threadIdx.x == 0 && i == 0) {
          p.step[(b * plan.row_tiles + row_tile) * plan.column_tiles + column_tile] = step;
        }
      } else if (group == 0 && row + i < p.rows) {
        p.step[(b * p.rows + row + i) * plan.column_tiles + column_tile] = step;
      }
    }
  }

  uint32_t codes[kThreadRows][4];
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      codes[i][j] =
          to_fp8x4<kFormat>(x[i][4 * j] * multiplier[i], x[i][4 * j + 1] * multiplier[i],
                            x[i][4 * j + 2] * multiplier[i], x[i][4 * j + 3] * multiplier[i]);
    }
    if (p.out != nullptr && valid[i] > 0) {
      uint8_t* target = p.out + (b * p.rows + row + i) * p.columns + column;
      store_columns(target, codes[i], valid[i], plan.wide_out);
    }
  }

  if constexpr (kThreadRows == 4) {
    if (p.out_transposed != nullptr) {
      alignas(16) __shared__ uint32_t turned[kTileColumns * kTileColumns / 4];
      const int quad = static_cast<int>(threadIdx.x) / kGroups;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t in[4] = {codes[0][j], codes[1][j], codes[2][j], codes[3][j]};
        uint32_t out[4];
        turn4x4(in, out);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          turned[transposed_word(group * kThreadColumns + 4 * j + c, quad)] = out[c];
        }
      }
      __syncthreads();
      const int64_t first_row = row_tile * kTileColumns + group * 16;
      const int rows_left = static_cast<int>(max(int64_t{0}, min(int64_t{16}, p.rows - first_row)));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = i * kRowThreads + static_cast<int>(threadIdx.x) / kGroups;
        const int64_t target_row = column_tile * kTileColumns + c;
        if (target_row >= p.columns || rows_left == 0) continue;
        uint32_t word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) word[j] = turned[transposed_word(c, 4 * group) + j];
        uint8_t* target =
            p.out_transposed + target_row * (p.batch * p.rows) + b * p.rows + first_row;
        store_columns(target, word, rows_left, plan.wide_transposed);
      }
    }
  }

  if (p.ring.state != nullptr && threadIdx.x == 0) fold_when_last(p.ring, p.amax);
}

// kRowwise's first launch: a block for each row.
template <typename T>
__global__ void __launch_bounds__(kQuantizeThreads)
    row_steps_kernel(QuantizeParams p, QuantizePlan plan) {
  __shared__ uint32_t scratch[kQuantizeThreads / 32];
  const int64_t b = blockIdx.x / p.rows, row = blockIdx.x % p.rows;
  const T* source = static_cast<const T*>(p.x) + b * p.batch_stride + row * p.row_stride;
  float most = 0.0f;
  for (int64_t column = int64_t{threadIdx.x} * kThreadColumns; column < p.columns;
       column += int64_t{kQuantizeThreads} * kThreadColumns) {
    RawColumns<T> x;
    const int valid = static_cast<int>(min(int64_t{kThreadColumns}, p.columns - column));
    x.load(source + column * p.column_stride, p.column_stride, valid, plan.wide_in);
#pragma unroll
    for (int j = 0; j < kThreadColumns; ++j) most = fmaxf(most, finite_magnitude(x[j]));
  }
  const float amax = __uint_as_float(block_max(__float_as_uint(most), scratch));
  if (threadIdx.x == 0) p.step[blockIdx.x] = step_of(amax, max_of(p.out_type));
}

}  // namespace astrai::fp8
