// launch_rope_append against an fp64 reference. Needs a GPU.
#include "kernels/rotary/rope_append.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/common/fp8.cuh"
#include "tests/kernels/rotary/rotary_case.h"

namespace astrai::rotary {
namespace {

struct AppendShape {
  int64_t tokens = 5;
  int q_heads = 4, kv_heads = 2;
  int head_dim = 64, v_head_dim = 64, rotary_dim = 64;
  int page_size = 16;
  int64_t gap = 0;  // elements between pages
};

struct AppendOptions {
  Pairing pairing = Pairing::kInterleaved;
  bool in_place = false;
  bool int64 = false;   // positions and slots
  int64_t unit = 8;     // of random strides, in elements
  float k_step = 1.0f;  // for a cache of e4m3
  float v_step = 1.0f;
  bool steps_on_device = false;
};

// Raw elements of a cache: bits of T, or codes.
template <typename E>
double value_of(E x) {
  if constexpr (sizeof(E) == 1) {
    return e4m3_to_float(x);
  } else {
    return testing::to_double(x);
  }
}

// The largest distance of a value from what it is rounded to.
template <typename T, typename E>
double half_unit(double value) {
  if constexpr (sizeof(E) == 1) {
    return std::max(std::abs(value) * 0x1p-4, 0x1p-10);
  } else {
    return std::max(std::ldexp(std::abs(value), -TypeTraits<T>::kSignificandBits),
                    TypeTraits<T>::kSmallestStep / 2);
  }
}

// E: T, or uint8_t for codes of e4m3.
template <typename T, typename E>
class AppendCase {
 public:
  AppendCase(Rng& rng, const AppendShape& shape, const AppendOptions& options)
      : shape_(shape), options_(options) {
    const int64_t t = shape.tokens, unit = options.unit;
    const auto stride = [&](int64_t elements) {
      return (elements + unit - 1) / unit * unit + unit * rng.integer(0, 1);
    };
    q_ = make_tokens(rng, shape.q_heads, shape.head_dim, stride);
    q_out_ = make_tokens(rng, shape.q_heads, shape.head_dim, stride);
    k_ = make_tokens(rng, shape.kv_heads, shape.head_dim, stride);
    v_ = make_tokens(rng, shape.kv_heads, shape.v_head_dim, stride);
    pages_ = (t + shape.page_size - 1) / shape.page_size + 1;
    k_cache_ = make_cache(shape.head_dim, stride);
    v_cache_ = make_cache(shape.v_head_dim, stride);
    max_pos_ = 40;
    angles_.resize(max_pos_ * std::max(shape.rotary_dim, 1));
    for (float& x : angles_) x = static_cast<float>(rng.uniform(-1, 1));
    angles_device_ = std::make_unique<DeviceBuffer<float>>(angles_);

    std::vector<int64_t> free_slots(pages_ * shape.page_size);
    std::iota(free_slots.begin(), free_slots.end(), 0);
    std::shuffle(free_slots.begin(), free_slots.end(), rng.engine());
    for (int64_t i = 0; i < t; ++i) {
      positions_.push_back(rng.integer(0, max_pos_ - 1));
      slots_.push_back(free_slots[i]);
    }
    steps_ =
        std::make_unique<DeviceBuffer<float>>(std::vector<float>{options.k_step, options.v_step});
  }

  std::vector<int64_t>& positions() { return positions_; }
  std::vector<int64_t>& slots() { return slots_; }
  std::vector<T>& k() { return k_.host; }
  std::vector<T>& v() { return v_.host; }
  int64_t slot_count() const { return pages_ * shape_.page_size; }
  int64_t max_pos() const { return max_pos_; }

  void launch_and_check() {
    launch();
    check_q();
    check_cache(k_, *k_cache_.device, k_cache_, shape_.head_dim, shape_.rotary_dim, options_.k_step,
                "k");
    check_cache(v_, *v_cache_.device, v_cache_, shape_.v_head_dim, 0, options_.v_step, "v");
  }

 private:
  struct Tokens {
    int heads, dim;
    int64_t token_stride, head_stride;
    std::vector<T> host;
    std::unique_ptr<DeviceBuffer<T>> device;
  };
  struct Cache {
    int64_t page_stride, row_stride, head_stride;
    std::unique_ptr<DeviceBuffer<E>> device;
  };

  template <typename Stride>
  Tokens make_tokens(Rng& rng, int heads, int dim, Stride stride) {
    Tokens x{heads, dim, 0, 0, {}, nullptr};
    x.head_stride = stride(dim);
    x.token_stride = stride(x.head_stride * std::max(heads, 1));
    x.host = testing::random_normal<T>(rng, x.token_stride * shape_.tokens, 2.0);
    x.device = std::make_unique<DeviceBuffer<T>>(x.host.size(), options_.unit % 8);
    return x;
  }
  template <typename Stride>
  Cache make_cache(int dim, Stride stride) {
    Cache cache;
    cache.head_stride = stride(dim);
    cache.row_stride = stride(cache.head_stride * std::max(shape_.kv_heads, 1));
    cache.page_stride = cache.row_stride * shape_.page_size + shape_.gap;
    cache.device = std::make_unique<DeviceBuffer<E>>(cache.page_stride * pages_, options_.unit % 8);
    return cache;
  }

  AppendedOperand operand(Tokens& x, Cache& cache, float step, size_t which) {
    AppendedOperand o;
    o.in = x.device->data();
    o.token_stride = x.token_stride;
    o.head_stride = x.head_stride;
    o.cache = cache.device->data();
    o.page_stride = cache.page_stride;
    o.row_stride = cache.row_stride;
    o.cache_head_stride = cache.head_stride;
    o.scale = options_.steps_on_device ? 1.0f : step;
    if (options_.steps_on_device) o.scale_pointer = steps_->data() + which;
    return o;
  }

  template <typename I>
  void upload_indices(RopeAppendParams* p, std::unique_ptr<DeviceBuffer<I>>* positions,
                      std::unique_ptr<DeviceBuffer<I>>* slots) {
    *positions =
        std::make_unique<DeviceBuffer<I>>(std::vector<I>(positions_.begin(), positions_.end()));
    *slots = std::make_unique<DeviceBuffer<I>>(std::vector<I>(slots_.begin(), slots_.end()));
    p->positions = (*positions)->data();
    p->slots = (*slots)->data();
  }

  void launch() {
    for (Tokens* x : {&q_, &k_, &v_}) x->device->upload(x->host);
    RopeAppendParams p;
    p.dtype = TypeTraits<T>::kDType;
    p.cache_dtype = sizeof(E) == 1 ? DType::kE4M3 : p.dtype;
    p.tokens = shape_.tokens;
    p.kv_heads = shape_.kv_heads;
    p.head_dim = shape_.head_dim;
    p.v_head_dim = shape_.v_head_dim;
    p.rotary_dim = shape_.rotary_dim;
    p.pairing = options_.pairing;
    Tokens& out = options_.in_place ? q_ : q_out_;
    p.q.heads = shape_.q_heads;
    p.q.in = q_.device->data();
    p.q.out = out.device->data();
    p.q.in_token_stride = q_.token_stride;
    p.q.in_head_stride = q_.head_stride;
    p.q.out_token_stride = out.token_stride;
    p.q.out_head_stride = out.head_stride;
    p.k = operand(k_, k_cache_, options_.k_step, 0);
    p.v = operand(v_, v_cache_, options_.v_step, 1);
    p.angles = angles_device_->data();
    p.max_pos = max_pos_;
    p.positions_are_int64 = p.slots_are_int64 = options_.int64;
    std::unique_ptr<DeviceBuffer<int32_t>> positions32, slots32;
    std::unique_ptr<DeviceBuffer<int64_t>> positions64, slots64;
    if (options_.int64) {
      upload_indices(&p, &positions64, &slots64);
    } else {
      upload_indices(&p, &positions32, &slots32);
    }
    p.slot_count = slot_count();
    p.page_size = shape_.page_size;
    REQUIRE_CUDA(launch_rope_append(p, nullptr));
    REQUIRE_CUDA(cudaDeviceSynchronize());
  }

  // Element i of a head after rotation, in fp64, and what bounds the error of the fp32 arithmetic.
  struct Rotated {
    double value, magnitude;
  };
  Rotated rotated(const T* head, int64_t token, int i) const {
    const int half = shape_.rotary_dim / 2;
    const bool interleaved = options_.pairing == Pairing::kInterleaved;
    const int pair = interleaved ? i / 2 : i % half;
    const bool second = interleaved ? i % 2 == 1 : i >= half;
    const double x1 = testing::to_double(head[interleaved ? 2 * pair : pair]);
    const double x2 = testing::to_double(head[interleaved ? 2 * pair + 1 : pair + half]);
    const int64_t position = positions_[token];
    double cos = std::numeric_limits<double>::quiet_NaN(), sin = cos;
    if (position >= 0 && position < max_pos_) {
      cos = angles_[position * shape_.rotary_dim + pair];
      sin = angles_[position * shape_.rotary_dim + half + pair];
    }
    return {second ? x1 * sin + x2 * cos : x1 * cos - x2 * sin, std::abs(x1) + std::abs(x2)};
  }

  void check_q() {
    const Context context("q");
    const Tokens& target = options_.in_place ? q_ : q_out_;
    const std::vector<T> got = target.device->download();
    size_t wrong = 0;
    for (int64_t t = 0; t < shape_.tokens; ++t) {
      for (int h = 0; h < shape_.q_heads; ++h) {
        const T* in = q_.host.data() + t * q_.token_stride + h * q_.head_stride;
        const T* out = got.data() + t * target.token_stride + h * target.head_stride;
        for (int i = 0; i < shape_.head_dim; ++i) {
          if (i >= shape_.rotary_dim) {
            wrong += std::memcmp(in + i, out + i, sizeof(T)) != 0;
            continue;
          }
          const Rotated want = rotated(in, t, i);
          const double value = testing::to_double(out[i]);
          const bool close = std::abs(value - want.value) <=
                             half_unit<T, T>(want.value) + std::ldexp(want.magnitude, -23);
          wrong += std::isnan(want.value) ? !std::isnan(value) : !close;
        }
      }
    }
    EXPECT_EQ(wrong, size_t{0});
  }

  // What was written is right, and nothing else was: the rest still holds the poison.
  void check_cache(const Tokens& x, const DeviceBuffer<E>& device, const Cache& cache, int dim,
                   int rotary_dim, float step, const char* name) {
    const Context context(std::string("cache of ") + name);
    const std::vector<E> got = device.download();
    std::vector<bool> written(got.size());
    size_t wrong = 0;
    for (int64_t t = 0; t < shape_.tokens; ++t) {
      const int64_t slot = slots_[t];
      if (slot < 0 || slot >= slot_count()) continue;
      for (int h = 0; h < shape_.kv_heads; ++h) {
        const T* in = x.host.data() + t * x.token_stride + h * x.head_stride;
        const int64_t at = slot / shape_.page_size * cache.page_stride +
                           slot % shape_.page_size * cache.row_stride + h * cache.head_stride;
        for (int i = 0; i < dim; ++i) {
          written[at + i] = true;
          wrong += !element_is_right(in, t, i, rotary_dim, got[at + i], step);
        }
      }
    }
    EXPECT_EQ(wrong, size_t{0});
    const std::vector<uint8_t> poison(sizeof(E), 0xff);
    size_t disturbed = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      disturbed += !written[i] && std::memcmp(&got[i], poison.data(), sizeof(E)) != 0;
    }
    EXPECT_EQ(disturbed, size_t{0});
  }

  bool element_is_right(const T* in, int64_t token, int i, int rotary_dim, E got,
                        float step) const {
    if (i >= rotary_dim) {
      if constexpr (sizeof(E) == 1) {
        return got == float_to_e4m3(static_cast<float>(in[i]) / step);
      } else {
        return std::memcmp(in + i, &got, sizeof(E)) == 0;
      }
    }
    const Rotated want = rotated(in, token, i);
    const double value = value_of(got);
    if (std::isnan(want.value)) return std::isnan(value);
    const double scale = sizeof(E) == 1 ? step : 1.0;
    double target = want.value / scale;
    if (sizeof(E) == 1) target = std::clamp(target, -448.0, 448.0);
    const double fp32_error = std::ldexp(want.magnitude / scale, -22);
    return std::abs(value - target) <= half_unit<T, E>(target) + fp32_error;
  }

  AppendShape shape_;
  AppendOptions options_;
  Tokens q_, q_out_, k_, v_;
  int64_t pages_ = 0, max_pos_ = 0;
  Cache k_cache_, v_cache_;
  std::vector<float> angles_;
  std::unique_ptr<DeviceBuffer<float>> angles_device_, steps_;
  std::vector<int64_t> positions_, slots_;
};

std::string describe(const AppendShape& s) {
  return "T" + std::to_string(s.tokens) + " Hq" + std::to_string(s.q_heads) + " Hk" +
         std::to_string(s.kv_heads) + " D" + std::to_string(s.head_dim) + "/" +
         std::to_string(s.v_head_dim) + " R" + std::to_string(s.rotary_dim) + " page " +
         std::to_string(s.page_size) + " gap " + std::to_string(s.gap);
}

void run(Rng& rng, const AppendShape& shape, const AppendOptions& options) {
  const Context context(describe(shape));
  AppendCase<__nv_bfloat16, __nv_bfloat16>(rng, shape, options).launch_and_check();
  AppendCase<__half, __half>(rng, shape, options).launch_and_check();
  AppendOptions scaled = options;
  scaled.k_step = 0.037f;
  scaled.v_step = 0.0061f;  // part of v saturates
  AppendCase<__nv_bfloat16, uint8_t>(rng, shape, scaled).launch_and_check();
  scaled.steps_on_device = true;
  AppendCase<__half, uint8_t>(rng, shape, scaled).launch_and_check();
}

void run_both_pairings(Rng& rng, const AppendShape& shape, AppendOptions options = {}) {
  for (const Pairing pairing : {Pairing::kInterleaved, Pairing::kHalfSplit}) {
    options.pairing = pairing;
    options.in_place = rng.coin();
    options.int64 = rng.coin();
    run(rng, shape, options);
  }
}

ASTRAI_TEST(case_d10_every_page_size) {
  Rng rng;
  for (const int page_size : {1, 2, 16, 64, 256}) {
    run_both_pairings(rng, {37, 4, 2, 64, 64, 64, page_size, 0});
    run_both_pairings(rng, {37, 4, 2, 64, 64, 64, page_size, 64});
  }
  run_both_pairings(rng, {37, 4, 2, 64, 64, 64, 24, 0});  // not a power of two, dense
}

ASTRAI_TEST(case_d15_partial_rotation_passes_the_tail) {
  Rng rng;
  for (const int rotary_dim : {0, 2, 20, 32, 64, 96, 126, 128}) {
    run_both_pairings(rng, {9, 3, 1, 128, 128, rotary_dim, 16, 0});
  }
}

ASTRAI_TEST(case_d13_one_kv_head_and_other_counts) {
  Rng rng;
  for (const int kv_heads : {1, 3, 8}) run_both_pairings(rng, {11, 9, kv_heads, 64, 64, 64, 16, 0});
  run_both_pairings(rng, {11, 0, 2, 64, 64, 64, 16, 0});  // no q
  run_both_pairings(rng, {11, 4, 0, 64, 64, 64, 16, 0});  // no k and v
}

ASTRAI_TEST(values_of_another_head_dim) {
  Rng rng;
  run_both_pairings(rng, {7, 4, 2, 192, 128, 192, 16, 0});
  run_both_pairings(rng, {7, 4, 2, 192, 128, 64, 16, 0});
  run_both_pairings(rng, {7, 4, 2, 64, 256, 64, 16, 0});
  run_both_pairings(rng, {7, 4, 2, 72, 40, 36, 16, 0});
}

ASTRAI_TEST(any_alignment) {
  Rng rng;
  for (const int64_t unit : {1, 2, 4}) {
    AppendOptions options;
    options.unit = unit;
    run_both_pairings(rng, {9, 4, 2, 64, 64, 64, 16, unit}, options);
    run_both_pairings(rng, {9, 3, 2, 80, 80, 20, 1, 0}, options);
    run_both_pairings(rng, {9, 3, 2, 34, 35, 34, 4, 0}, options);
  }
}

// Threads that own more heads than they keep in flight.
ASTRAI_TEST(many_tokens) {
  Rng rng;
  run_both_pairings(rng, {2500, 9, 2, 64, 64, 64, 16, 0});
}

template <typename T, typename E>
void run_special(Rng& rng, bool int64) {
  AppendOptions options;
  options.int64 = int64;
  AppendCase<T, E> c(rng, {12, 2, 2, 64, 64, 64, 4, 0}, options);
  c.slots()[0] = -1;
  c.slots()[3] = c.slot_count();
  c.slots()[5] = std::numeric_limits<int32_t>::min();
  c.positions()[1] = -1;
  c.positions()[2] = c.max_pos();
  if (int64) {
    c.slots()[6] = int64_t{1} << 33;
    c.positions()[7] = (int64_t{1} << 32) + 1;
  }
  c.launch_and_check();
}

ASTRAI_TEST(case_d12_slots_and_positions_out_of_range) {
  Rng rng;
  for (const bool int64 : {false, true}) {
    run_special<__nv_bfloat16, __nv_bfloat16>(rng, int64);
    run_special<__half, uint8_t>(rng, int64);
  }
}

ASTRAI_TEST(case_f01_nan_stays_and_infinity_saturates) {
  Rng rng;
  AppendCase<__nv_bfloat16, uint8_t> c(rng, {6, 1, 1, 64, 64, 0, 2, 0}, {});
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<double> values = {std::nan(""), infinity, -infinity, 448.0,   464.0, -465.0,
                                      1e30,         0x1p-9,   0x1p-10,   0x1p-11, 0.0,   -0.0};
  for (size_t i = 0; i < values.size(); ++i) {
    c.k()[i] = c.v()[i] = testing::from_double<__nv_bfloat16>(values[i]);
  }
  c.launch_and_check();
}

}  // namespace
}  // namespace astrai::rotary
