// CUDA's built-in variables and device functions. Included by <cuda_runtime.h> alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tests/kernels/emulator/device.h"

// Of the thread that runs; there is one at a time.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
constexpr int warpSize = 32;

// ---- Barriers, fences ---------------------------------------------------------------------------

namespace astrai::emulator {

template <typename To, typename From>
To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace astrai::emulator

using astrai_place = astrai::emulator::Place;

inline void __syncthreads(astrai_place place = astrai_place::here()) {
  astrai::emulator::block_barrier(astrai::emulator::BarrierKind::kSync, false, place);
}
inline int __syncthreads_count(int predicate, astrai_place place = astrai_place::here()) {
  return astrai::emulator::block_barrier(astrai::emulator::BarrierKind::kCount, predicate != 0,
                                         place);
}
inline int __syncthreads_and(int predicate, astrai_place place = astrai_place::here()) {
  return astrai::emulator::block_barrier(astrai::emulator::BarrierKind::kAnd, predicate != 0,
                                         place);
}
inline int __syncthreads_or(int predicate, astrai_place place = astrai_place::here()) {
  return astrai::emulator::block_barrier(astrai::emulator::BarrierKind::kOr, predicate != 0, place);
}

inline void __threadfence_block() {}
inline void __threadfence() { astrai::emulator::yield(); }
inline void __threadfence_system() { astrai::emulator::yield(); }
inline void __nanosleep(unsigned) { astrai::emulator::yield_in_loop(); }
[[noreturn]] inline void __trap() { astrai::emulator::fail("__trap"); }

// ---- Warps --------------------------------------------------------------------------------------

namespace astrai::emulator {

inline void sync_warp(uint32_t mask, Place place) {
  static constexpr WarpOp kOp = {"__syncwarp", [](void* const[32], uint32_t) {}};
  warp_rendezvous(kOp, mask, nullptr, place);
}

// Values of 4 or 8 bytes travel as bits.
struct Shuffle {
  uint64_t value;
  int source;  // lane
  uint64_t result;
};
void run_shuffle(void* const data[32], uint32_t lanes);

enum class ShuffleKind { kIndex, kUp, kDown, kXor };
// The lane that `lane` reads from, by the rules of shfl.sync.
inline int shuffle_source(ShuffleKind kind, int lane, int by, int width) {
  const int first = lane & ~(width - 1);
  switch (kind) {
    case ShuffleKind::kIndex:
      return first + (by & (width - 1));
    case ShuffleKind::kUp:
      return lane - by >= first ? lane - by : lane;
    case ShuffleKind::kDown:
      return lane + by < first + width ? lane + by : lane;
    case ShuffleKind::kXor:
      return (lane ^ by) < first + width ? lane ^ by : lane;
  }
  return lane;
}

template <typename T>
T shuffle(const WarpOp& op, ShuffleKind kind, uint32_t mask, T value, int by, int width,
          Place place) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 2);
  Shuffle data = {};
  std::memcpy(&data.value, &value, sizeof(T));
  data.source = shuffle_source(kind, lane_index(), by, width);
  warp_rendezvous(op, mask, &data, place);
  T result;
  std::memcpy(&result, &data.result, sizeof(T));
  return result;
}

inline constexpr WarpOp kShuffleIndex = {"__shfl_sync", run_shuffle};
inline constexpr WarpOp kShuffleUp = {"__shfl_up_sync", run_shuffle};
inline constexpr WarpOp kShuffleDown = {"__shfl_down_sync", run_shuffle};
inline constexpr WarpOp kShuffleXor = {"__shfl_xor_sync", run_shuffle};

// Each lane gives a value; all lanes get the one result.
struct Vote {
  uint32_t value;
  uint32_t result;
};
extern const WarpOp kBallot, kReduceAdd, kReduceMin, kReduceMax, kReduceMinSigned, kReduceMaxSigned,
    kReduceAnd, kReduceOr, kReduceXor;

inline uint32_t vote(const WarpOp& op, uint32_t mask, uint32_t value, Place place) {
  Vote data = {value, 0};
  warp_rendezvous(op, mask, &data, place);
  return data.result;
}

}  // namespace astrai::emulator

inline void __syncwarp(unsigned mask = 0xffffffffu, astrai_place place = astrai_place::here()) {
  astrai::emulator::sync_warp(mask, place);
}
inline unsigned __activemask() { return astrai::emulator::live_lanes(); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32,
              astrai_place place = astrai_place::here()) {
  using namespace astrai::emulator;
  return shuffle(kShuffleIndex, ShuffleKind::kIndex, mask, value, lane, width, place);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32,
                 astrai_place place = astrai_place::here()) {
  using namespace astrai::emulator;
  return shuffle(kShuffleUp, ShuffleKind::kUp, mask, value, static_cast<int>(by), width, place);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32,
                   astrai_place place = astrai_place::here()) {
  using namespace astrai::emulator;
  return shuffle(kShuffleDown, ShuffleKind::kDown, mask, value, static_cast<int>(by), width, place);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int by, int width = 32,
                  astrai_place place = astrai_place::here()) {
  using namespace astrai::emulator;
  return shuffle(kShuffleXor, ShuffleKind::kXor, mask, value, by, width, place);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              astrai_place place = astrai_place::here()) {
  return astrai::emulator::vote(astrai::emulator::kBallot, mask, predicate != 0, place);
}
inline int __any_sync(unsigned mask, int predicate, astrai_place place = astrai_place::here()) {
  return astrai::emulator::vote(astrai::emulator::kReduceOr, mask, predicate != 0, place) != 0;
}
inline int __all_sync(unsigned mask, int predicate, astrai_place place = astrai_place::here()) {
  return astrai::emulator::vote(astrai::emulator::kReduceAnd, mask, predicate != 0, place) != 0;
}

#define ASTRAI_REDUCE(name, T, op)                                                                \
  inline T name(unsigned mask, T value, astrai_place place = astrai_place::here()) {              \
    return static_cast<T>(                                                                        \
        astrai::emulator::vote(astrai::emulator::op, mask, static_cast<uint32_t>(value), place)); \
  }
ASTRAI_REDUCE(__reduce_add_sync, unsigned, kReduceAdd)
ASTRAI_REDUCE(__reduce_add_sync, int, kReduceAdd)
ASTRAI_REDUCE(__reduce_min_sync, unsigned, kReduceMin)
ASTRAI_REDUCE(__reduce_min_sync, int, kReduceMinSigned)
ASTRAI_REDUCE(__reduce_max_sync, unsigned, kReduceMax)
ASTRAI_REDUCE(__reduce_max_sync, int, kReduceMaxSigned)
ASTRAI_REDUCE(__reduce_and_sync, unsigned, kReduceAnd)
ASTRAI_REDUCE(__reduce_or_sync, unsigned, kReduceOr)
ASTRAI_REDUCE(__reduce_xor_sync, unsigned, kReduceXor)
#undef ASTRAI_REDUCE

// ---- Atomics: one thread runs at a time, so nothing can come between
// -----------------------------

namespace astrai::emulator {

template <typename T, typename Update>
T atomic_update(T* address, Update update) {
  yield();
  const T before = *address;
  *address = update(before);
  return before;
}

}  // namespace astrai::emulator

#define ASTRAI_ATOMIC(name, expression)                                                         \
  template <typename T>                                                                         \
  T name(T* address, std::common_type_t<T> value) {                                             \
    return astrai::emulator::atomic_update(address, [&](T before) -> T { return expression; }); \
  }
ASTRAI_ATOMIC(atomicAdd, before + value)
ASTRAI_ATOMIC(atomicSub, before - value)
ASTRAI_ATOMIC(atomicExch, ((void)before, value))
ASTRAI_ATOMIC(atomicMax, before < value ? value : before)
ASTRAI_ATOMIC(atomicMin, value < before ? value : before)
ASTRAI_ATOMIC(atomicAnd, before& value)
ASTRAI_ATOMIC(atomicOr, before | value)
ASTRAI_ATOMIC(atomicXor, before ^ value)
ASTRAI_ATOMIC(atomicInc, before >= value ? T{0} : before + 1)
ASTRAI_ATOMIC(atomicDec, before == 0 || before > value ? value : before - 1)
#undef ASTRAI_ATOMIC

template <typename T>
T atomicCAS(T* address, std::common_type_t<T> compare, std::common_type_t<T> value) {
  return astrai::emulator::atomic_update(
      address, [&](T before) -> T { return before == compare ? value : before; });
}

// ---- Memory -------------------------------------------------------------------------------------

inline size_t __cvta_generic_to_shared(const void* pointer) {
  return astrai::emulator::shared_address(pointer);
}

inline void* __cvta_shared_to_generic(size_t address) {
  return astrai::emulator::resolve_shared(static_cast<uint32_t>(address), 0, 1, "cvta");
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
void __stcg(T* address, std::common_type_t<T> value) {
  *address = value;
}
template <typename T>
void __stcs(T* address, std::common_type_t<T> value) {
  *address = value;
}

// ---- Bits and arithmetic ------------------------------------------------------------------------

inline float __uint_as_float(unsigned x) { return astrai::emulator::bit_cast<float>(x); }
inline float __int_as_float(int x) { return astrai::emulator::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return astrai::emulator::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return astrai::emulator::bit_cast<int>(x); }
inline long long __double_as_longlong(double x) { return astrai::emulator::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return astrai::emulator::bit_cast<double>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i);
  return y;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = uint64_t{high} << 32 | low;
  return static_cast<unsigned>((both << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = uint64_t{high} << 32 | low;
  return static_cast<unsigned>(both >> (shift & 31));
}
// Byte i of the result is the byte of y:x that the lower three bits of the selector's nibble i
// number.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = selector >> (4 * i) & 7u;
    result |= static_cast<unsigned>(both >> (8 * byte) & 0xffu) << (8 * i);
  }
  return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(uint64_t{a} * b >> 32);
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __expf(float a) { return expf(a); }
inline float __logf(float a) { return logf(a); }
inline float __log2f(float a) { return log2f(a); }
inline float __saturatef(float a) { return a >= 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline int __float2int_rn(float a) { return static_cast<int>(nearbyintf(a)); }
inline int __float2int_rd(float a) { return static_cast<int>(floorf(a)); }

// CUDA's min and max of arithmetic types, with the usual conversions. The order of the arguments
// matters for NaN: as fminf and fmaxf.
template <typename A, typename B,
          typename = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmin(static_cast<T>(a), static_cast<T>(b));
  } else {
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
  }
}
template <typename A, typename B,
          typename = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmax(static_cast<T>(a), static_cast<T>(b));
  } else {
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
  }
}
