// Warp instructions: the last lane to arrive computes for all.
#include "tests/kernels/emulator/ptx.h"

#include "kernels/common/mma.cuh"

namespace astrai::emulator {

void run_shuffle(void* const data[32], uint32_t lanes) {
  for (int lane = 0; lane < 32; ++lane) {
    if ((lanes >> lane & 1u) == 0) continue;
    Shuffle& own = *static_cast<Shuffle*>(data[lane]);
    // What a lane that takes no part would give is undefined.
    const bool defined = own.source >= 0 && own.source < 32 && (lanes >> own.source & 1u) != 0;
    own.result = defined ? static_cast<const Shuffle*>(data[own.source])->value : ~uint64_t{0};
  }
}

namespace {

template <typename Reduce>
void reduce(void* const data[32], uint32_t lanes, Reduce&& combine) {
  uint32_t result = 0;
  bool first = true;
  for (int lane = 0; lane < 32; ++lane) {
    if ((lanes >> lane & 1u) == 0) continue;
    const uint32_t value = static_cast<const Vote*>(data[lane])->value;
    result = first ? value : combine(result, value);
    first = false;
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (lanes >> lane & 1u) static_cast<Vote*>(data[lane])->result = result;
  }
}

void run_ballot(void* const data[32], uint32_t lanes) {
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (lanes >> lane & 1u) static_cast<Vote*>(data[lane])->value <<= lane;
  }
  reduce(data, lanes, [](uint32_t a, uint32_t b) { return a | b; });
}

}  // namespace

#define ASTRAI_REDUCE_OP(op, name, T, expression)                              \
  const WarpOp op = {name, [](void* const data[32], uint32_t lanes) {          \
                       reduce(data, lanes, [](uint32_t x, uint32_t y) {        \
                         const T a = static_cast<T>(x), b = static_cast<T>(y); \
                         return static_cast<uint32_t>(expression);             \
                       });                                                     \
                     }};
const WarpOp kBallot = {"__ballot_sync", run_ballot};
ASTRAI_REDUCE_OP(kReduceAdd, "__reduce_add_sync", uint32_t, a + b)
ASTRAI_REDUCE_OP(kReduceMin, "__reduce_min_sync", uint32_t, a < b ? a : b)
ASTRAI_REDUCE_OP(kReduceMax, "__reduce_max_sync", uint32_t, a < b ? b : a)
ASTRAI_REDUCE_OP(kReduceMinSigned, "__reduce_min_sync", int32_t, a < b ? a : b)
ASTRAI_REDUCE_OP(kReduceMaxSigned, "__reduce_max_sync", int32_t, a < b ? b : a)
ASTRAI_REDUCE_OP(kReduceAnd, "__all_sync or __reduce_and_sync", uint32_t, a& b)
ASTRAI_REDUCE_OP(kReduceOr, "__any_sync or __reduce_or_sync", uint32_t, a | b)
ASTRAI_REDUCE_OP(kReduceXor, "__reduce_xor_sync", uint32_t, a ^ b)
#undef ASTRAI_REDUCE_OP

}  // namespace astrai::emulator

namespace astrai::ptx {
namespace {

using emulator::WarpOp;

uint16_t half_of(uint32_t bits, int part) { return static_cast<uint16_t>(bits >> (16 * part)); }

void require_full_warp(uint32_t lanes, const char* instruction) {
  if (lanes != 0xffffffffu) emulator::fail("%s: lanes %08x have exited", instruction, ~lanes);
}

// ---- mma ----------------------------------------------------------------------------------------

struct MmaData {
  float* c;           // 4
  const uint32_t* a;  // 4
  uint32_t b[2];
};

template <float (*kToFloat)(uint16_t)>
void run_mma(void* const data[32], uint32_t lanes) {
  require_full_warp(lanes, "mma");
  float a[16][16];
  float b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const MmaData& own = *static_cast<const MmaData*>(data[lane]);
    for (int part = 0; part < 2; ++part) {
      for (int reg = 0; reg < 4; ++reg) {
        const MatrixCoord at = mma_a_coord(lane, reg, part);
        a[at.row][at.col] = kToFloat(half_of(own.a[reg], part));
      }
      for (int reg = 0; reg < 2; ++reg) {
        const MatrixCoord at = mma_b_coord(lane, reg, part);
        b[at.row][at.col] = kToFloat(half_of(own.b[reg], part));
      }
    }
  }
  // Products of 16-bit floats are exact in fp32; the order of the sums is not defined.
  float d[16][8] = {};
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const MmaData& own = *static_cast<const MmaData*>(data[lane]);
    for (int reg = 0; reg < 4; ++reg) {
      const MatrixCoord at = mma_c_coord(lane, reg);
      own.c[reg] += d[at.row][at.col];
    }
  }
}

void mma(const WarpOp& op, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MmaData data = {c, a, {b0, b1}};
  emulator::warp_rendezvous(op, 0xffffffffu, &data, emulator::Place::here());
}

// ---- ldmatrix -----------------------------------------------------------------------------------

struct LdmatrixData {
  uint32_t* r;          // 4
  const uint16_t* row;  // 8 elements
};

// Lane l gets elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each matrix.
void run_ldmatrix(void* const data[32], uint32_t lanes) {
  require_full_warp(lanes, "ldmatrix");
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const uint16_t* row = static_cast<const LdmatrixData*>(data[8 * i + lane / 4])->row;
      static_cast<LdmatrixData*>(data[lane])->r[i] =
          pack_halves(row[lane % 4 * 2 + 1], row[lane % 4 * 2]);
    }
  }
}

// The same of the transposed matrices.
void run_ldmatrix_trans(void* const data[32], uint32_t lanes) {
  require_full_warp(lanes, "ldmatrix.trans");
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      uint16_t pair[2];
      for (int part = 0; part < 2; ++part) {
        const int row = 8 * i + lane % 4 * 2 + part;
        pair[part] = static_cast<const LdmatrixData*>(data[row])->row[lane / 4];
      }
      static_cast<LdmatrixData*>(data[lane])->r[i] = pack_halves(pair[1], pair[0]);
    }
  }
}

void ldmatrix(const WarpOp& op, uint32_t (&r)[4], uint32_t address) {
  LdmatrixData data = {
      r, static_cast<const uint16_t*>(emulator::resolve_shared(address, 16, 16, op.name))};
  emulator::warp_rendezvous(op, 0xffffffffu, &data, emulator::Place::here());
}

// Rounds once: an fp32 between two bf16 that is not exact ends in 1 (round to odd).
uint16_t double_to_bf16(double x) {
  float near = static_cast<float>(x);
  if (static_cast<double>(near) != x && std::isfinite(near)) {
    if (std::fabs(static_cast<double>(near)) > std::fabs(x)) near = nextafterf(near, 0.0f);
    near = emulator::float_of_bits(emulator::bits_of_float(near) | 1u);
  }
  return emulator::float_to_bf16(near);
}

// ---- fp8 ----------------------------------------------------------------------------------------

float e4m3_to_float(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float magnitude = exponent == 0 ? ldexpf(static_cast<float>(mantissa), -9)
                                        : ldexpf(static_cast<float>(8 + mantissa), exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

// The nearest code, by comparing with all of them; of two as near the even one.
uint8_t float_to_e4m3(float x) {
  if (std::isnan(x)) return 0x7f;
  uint8_t best = 0;
  const double magnitude = std::fabs(static_cast<double>(x));
  double least = magnitude;
  for (uint8_t code = 1; code <= 0x7e; ++code) {
    const double distance = std::fabs(magnitude - static_cast<double>(e4m3_to_float(code)));
    if (distance < least || (distance == least && code % 2 == 0)) {
      best = code;
      least = distance;
    }
  }
  if (std::isinf(x)) best = 0x7e;
  return static_cast<uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

}  // namespace

void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static constexpr WarpOp kOp = {"mma.m16n8k16.bf16", run_mma<emulator::bf16_to_float>};
  mma(kOp, c, a, b0, b1);
}

void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static constexpr WarpOp kOp = {"mma.m16n8k16.f16", run_mma<emulator::fp16_to_float>};
  mma(kOp, c, a, b0, b1);
}

void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  static constexpr WarpOp kOp = {"ldmatrix.x4", run_ldmatrix};
  ldmatrix(kOp, r, address);
}

void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  static constexpr WarpOp kOp = {"ldmatrix.x4.trans", run_ldmatrix_trans};
  ldmatrix(kOp, r, address);
}

void cp_async_cg_16(uint32_t shared, const void* source, int bytes) {
  if (bytes < 0 || bytes > 16) emulator::fail("cp.async: a source of %d bytes", bytes);
  if (bytes > 0) check_access(source, 16, "cp.async");
  emulator::async_copy(emulator::resolve_shared(shared, 16, 16, "cp.async"), source, bytes);
}

uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint16_t d[2];
  for (int part = 0; part < 2; ++part) {
    // The product is exact in fp64; its sum with c rounds once there, and once more to bf16.
    const auto value = [&](uint32_t bits) {
      return static_cast<double>(emulator::bf16_to_float(half_of(bits, part)));
    };
    d[part] = double_to_bf16(value(a) * value(b) + value(c));
  }
  return pack_halves(d[1], d[0]);
}

uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint16_t d[2];
  for (int part = 0; part < 2; ++part) {
    d[part] = emulator::float_to_fp16(emulator::fp16_to_float(half_of(a, part)) *
                                      emulator::fp16_to_float(half_of(b, part)));
  }
  return pack_halves(d[1], d[0]);
}

uint32_t cvt_f16x2_e4m3x2(uint16_t codes) {
  return pack_halves(emulator::float_to_fp16(e4m3_to_float(static_cast<uint8_t>(codes >> 8))),
                     emulator::float_to_fp16(e4m3_to_float(static_cast<uint8_t>(codes))));
}

uint16_t cvt_e4m3x2_satfinite(float high, float low) {
  return static_cast<uint16_t>(float_to_e4m3(high) << 8 | float_to_e4m3(low));
}

}  // namespace astrai::ptx
