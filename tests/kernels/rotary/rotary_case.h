// One rotary call under test: random operands of any layout, the launch, and every check that holds
// for all calls.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/rotary/rotary.h"
#include "tests/kernels/testing/compare.h"
#include "tests/kernels/testing/device_buffer.h"
#include "tests/kernels/testing/testing.h"

namespace astrai::rotary {

using testing::Context;
using testing::DeviceBuffer;
using testing::Rng;

template <typename T>
struct TypeTraits;
template <>
struct TypeTraits<__nv_bfloat16> {
  static constexpr DType kDType = DType::kBF16;
  static constexpr int kSignificandBits = 8;
  static constexpr double kSmallestStep = 0x1p-133;
};
template <>
struct TypeTraits<__half> {
  static constexpr DType kDType = DType::kFP16;
  static constexpr int kSignificandBits = 11;
  static constexpr double kSmallestStep = 0x1p-24;
};

// Where the elements of one tensor lie.
struct Layout {
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;
  int64_t storage = 0;  // elements, gaps included
  int64_t shift = 0;    // of the first element from a 256-byte boundary

  int64_t at(int64_t b, int64_t t, int64_t h) const {
    return b * batch_stride + t * token_stride + h * head_stride;
  }
};

struct Shape {
  int batch = 1;
  int64_t tokens = 1;
  int q_heads = 1, k_heads = 0;
  int head_dim = 128, rotary_dim = 128;
};

// [batch, tokens, heads, head_dim] without gaps.
inline Layout dense_layout(const Shape& s, int heads) {
  Layout layout;
  layout.head_stride = s.head_dim;
  layout.token_stride = int64_t{heads} * s.head_dim;
  layout.batch_stride = s.tokens * layout.token_stride;
  layout.storage = s.batch * layout.batch_stride;
  return layout;
}

// Batch, tokens and heads in any order in memory, with gaps of whole `unit`s, shifted by one.
inline Layout random_layout(Rng& rng, const Shape& s, int heads, int64_t unit) {
  Layout layout;
  int64_t* strides[3] = {&layout.batch_stride, &layout.token_stride, &layout.head_stride};
  const int64_t sizes[3] = {s.batch, s.tokens, heads};
  int order[3] = {0, 1, 2};
  std::shuffle(order, order + 3, rng.engine());
  auto round_up = [&](int64_t n) { return (n + unit - 1) / unit * unit; };
  int64_t extent = round_up(s.head_dim);
  for (const int dim : order) {
    *strides[dim] = extent + unit * rng.integer(0, 2);
    extent = *strides[dim] * std::max<int64_t>(sizes[dim], 1);
  }
  layout.storage = extent;
  layout.shift = unit * rng.integer(0, 3);
  return layout;
}

struct Options {
  Pairing pairing = Pairing::kInterleaved;
  AngleSource source = AngleSource::kPerToken;
  bool positions_are_int64 = false;
  bool in_place = false;
  int64_t max_pos = 0;      // 0: random, at least 1
  int64_t angle_shift = 0;  // floats between the angles and a 256-byte boundary
};

// A tensor, its result, and what both are expected to hold.
template <typename T>
struct Operand {
  int heads = 0;
  Layout in_layout, out_layout;
  std::vector<T> host;                       // the input's storage
  std::unique_ptr<DeviceBuffer<T>> in, out;  // out is null if in place
};

template <typename T>
class RotaryCase {
 public:
  // q_in .. k_out: layouts; the output's are ignored if in place.
  RotaryCase(Rng& rng, const Shape& shape, const Options& options, const Layout& q_in,
             const Layout& q_out, const Layout& k_in, const Layout& k_out)
      : shape_(shape), options_(options) {
    make_operand(rng, q_, shape.q_heads, q_in, q_out);
    make_operand(rng, k_, shape.k_heads, k_in, k_out);
    make_angles(rng);
  }
  RotaryCase(Rng& rng, const Shape& shape, const Options& options)
      : RotaryCase(rng, shape, options, dense_layout(shape, shape.q_heads),
                   dense_layout(shape, shape.q_heads), dense_layout(shape, shape.k_heads),
                   dense_layout(shape, shape.k_heads)) {}

  RotaryParams params() {
    RotaryParams p;
    p.dtype = TypeTraits<T>::kDType;
    p.batch = shape_.batch;
    p.tokens = shape_.tokens;
    p.head_dim = shape_.head_dim;
    p.rotary_dim = shape_.rotary_dim;
    p.pairing = options_.pairing;
    p.q = operand_params(q_);
    p.k = operand_params(k_);
    p.angles = angles_device_->data();
    p.source = options_.source;
    if (options_.source == AngleSource::kTable) {
      p.positions = options_.positions_are_int64
                        ? static_cast<const void*>(positions64_device_->data())
                        : static_cast<const void*>(positions32_device_->data());
      p.positions_are_int64 = options_.positions_are_int64;
      p.max_pos = max_pos_;
    }
    return p;
  }

  // Positions for the next launch, one per (batch, token).
  void set_positions(const std::vector<int64_t>& positions) {
    positions_ = positions;
    if (options_.positions_are_int64) {
      positions64_device_->upload(positions);
    } else {
      positions32_device_->upload(std::vector<int32_t>(positions.begin(), positions.end()));
    }
  }
  int64_t max_pos() const { return max_pos_; }
  const std::vector<int64_t>& positions() const { return positions_; }
  std::vector<T>& host_q() { return q_.host; }
  void upload_q() { q_.in->upload(q_.host); }
  std::vector<T> result_q() const { return (q_.out ? q_.out : q_.in)->download(); }
  std::vector<T> result_k() const { return (k_.out ? k_.out : k_.in)->download(); }

  void launch(cudaStream_t stream = nullptr) {
    REQUIRE_CUDA(launch_rotary(params(), stream));
    REQUIRE_CUDA(cudaStreamSynchronize(stream));
  }
  void check() {
    check_operand(q_, "q");
    check_operand(k_, "k");
  }
  void launch_and_check() {
    launch();
    check();
  }

 private:
  void make_operand(Rng& rng, Operand<T>& x, int heads, const Layout& in, const Layout& out) {
    x.heads = heads;
    x.in_layout = in;
    x.out_layout = options_.in_place ? in : out;
    if (heads == 0) return;
    x.host = testing::random_normal<T>(rng, static_cast<size_t>(in.storage), 2.0);
    x.in = std::make_unique<DeviceBuffer<T>>(x.host, static_cast<size_t>(in.shift));
    if (!options_.in_place) {
      x.out = std::make_unique<DeviceBuffer<T>>(static_cast<size_t>(out.storage),
                                                static_cast<size_t>(out.shift));
    }
  }

  // Cosines and sines need not belong to one angle: the kernel multiplies what it gets.
  void make_angles(Rng& rng) {
    const int64_t rows = shape_.batch * shape_.tokens;
    int64_t table_rows = rows;
    if (options_.source == AngleSource::kTable) {
      max_pos_ = options_.max_pos > 0 ? options_.max_pos : rng.integer(1, 2 * rows + 1);
      table_rows = max_pos_;
      positions_.resize(static_cast<size_t>(rows));
      for (int64_t& position : positions_) position = rng.integer(0, max_pos_ - 1);
      if (options_.positions_are_int64) {
        positions64_device_ = std::make_unique<DeviceBuffer<int64_t>>(positions_.size());
      } else {
        positions32_device_ = std::make_unique<DeviceBuffer<int32_t>>(positions_.size());
      }
      set_positions(positions_);
    }
    angles_.resize(static_cast<size_t>(table_rows * shape_.rotary_dim));
    for (float& value : angles_) value = static_cast<float>(rng.uniform(-1, 1));
    angles_device_ =
        std::make_unique<DeviceBuffer<float>>(angles_, static_cast<size_t>(options_.angle_shift));
  }

  RotaryOperand operand_params(Operand<T>& x) {
    RotaryOperand p;
    p.heads = x.heads;
    if (x.heads == 0) return p;
    p.in = x.in->data();
    p.out = x.out ? x.out->data() : x.in->data();
    p.in_batch_stride = x.in_layout.batch_stride;
    p.in_token_stride = x.in_layout.token_stride;
    p.in_head_stride = x.in_layout.head_stride;
    p.out_batch_stride = x.out_layout.batch_stride;
    p.out_token_stride = x.out_layout.token_stride;
    p.out_head_stride = x.out_layout.head_stride;
    return p;
  }

  struct CosSin {
    double cos, sin;
  };
  CosSin angle(int64_t row, int pair) const {
    const int half = shape_.rotary_dim / 2;
    if (options_.source == AngleSource::kPerToken) {
      const size_t at = static_cast<size_t>((row * half + pair) * 2);
      return {angles_[at], angles_[at + 1]};
    }
    const int64_t position = positions_[static_cast<size_t>(row)];
    if (position < 0 || position >= max_pos_) {
      const double nan = std::numeric_limits<double>::quiet_NaN();
      return {nan, nan};
    }
    const size_t at = static_cast<size_t>(position * shape_.rotary_dim + pair);
    return {angles_[at], angles_[at + static_cast<size_t>(half)]};
  }

  void check_operand(const Operand<T>& x, const char* name) {
    if (x.heads == 0) return;
    const Context context(std::string("operand ") + name);
    const std::vector<T> result = (x.out ? x.out : x.in)->download();
    // Before the launch, the result's storage held these bits: poison, or the input if in place.
    std::vector<uint16_t> expected_bits =
        x.out ? std::vector<uint16_t>(result.size(), uint16_t{0xffff}) : testing::bits_of(x.host);
    const std::vector<uint16_t> input_bits = testing::bits_of(x.host);
    const std::vector<uint16_t> result_bits = testing::bits_of(result);
    if (x.out) EXPECT_TRUE(testing::bits_of(x.in->download()) == input_bits);

    size_t wrong_rotated = 0, wrong_exact = 0;
    std::vector<T> rotated;
    std::vector<double> reference;
    std::vector<bool> is_rotated(result.size());
    for (int64_t b = 0; b < shape_.batch; ++b) {
      for (int64_t t = 0; t < shape_.tokens; ++t) {
        for (int64_t h = 0; h < x.heads; ++h) {
          const int64_t in = x.in_layout.at(b, t, h), out = x.out_layout.at(b, t, h);
          for (int i = shape_.rotary_dim; i < shape_.head_dim; ++i) {
            expected_bits[static_cast<size_t>(out + i)] = input_bits[static_cast<size_t>(in + i)];
          }
          for (int pair = 0; pair < shape_.rotary_dim / 2; ++pair) {
            const bool interleaved = options_.pairing == Pairing::kInterleaved;
            const int i1 = interleaved ? 2 * pair : pair;
            const int i2 = interleaved ? i1 + 1 : pair + shape_.rotary_dim / 2;
            const double x1 = testing::to_double(x.host[static_cast<size_t>(in + i1)]);
            const double x2 = testing::to_double(x.host[static_cast<size_t>(in + i2)]);
            const CosSin a = angle(b * shape_.tokens + t, pair);
            const double y[2] = {x1 * a.cos - x2 * a.sin, x1 * a.sin + x2 * a.cos};
            const int at[2] = {i1, i2};
            for (int side = 0; side < 2; ++side) {
              const size_t place = static_cast<size_t>(out + at[side]);
              is_rotated[place] = true;
              rotated.push_back(result[place]);
              reference.push_back(y[side]);
              wrong_rotated += !one_rounding_apart(result[place], y[side], x1, x2);
            }
          }
        }
      }
    }
    for (size_t i = 0; i < result.size(); ++i) {
      wrong_exact += !is_rotated[i] && result_bits[i] != expected_bits[i];
    }
    EXPECT_EQ(wrong_rotated, size_t{0});
    EXPECT_EQ(wrong_exact, size_t{0});  // the tail, and the gaps between heads
    const double infinity = std::numeric_limits<double>::infinity();
    EXPECT_CLOSE(rotated, reference, std::ldexp(1.0, -TypeTraits<T>::kSignificandBits), infinity);
  }

  // fp32 arithmetic on exact inputs and one rounding to T: half a unit in the last place of the
  // result, plus the rounding of two fp32 products and their sum.
  static bool one_rounding_apart(T value, double reference, double x1, double x2) {
    const double got = testing::to_double(value);
    if (std::isnan(reference)) return std::isnan(got);
    const double half_unit =
        std::max(std::ldexp(std::abs(reference), -TypeTraits<T>::kSignificandBits),
                 TypeTraits<T>::kSmallestStep / 2);
    const double fp32_error = std::ldexp(std::abs(x1) + std::abs(x2), -23);
    return std::abs(got - reference) <= half_unit + fp32_error;
  }

  Shape shape_;
  Options options_;
  Operand<T> q_, k_;
  std::vector<float> angles_;
  std::vector<int64_t> positions_;
  int64_t max_pos_ = 0;
  std::unique_ptr<DeviceBuffer<float>> angles_device_;
  std::unique_ptr<DeviceBuffer<int32_t>> positions32_device_;
  std::unique_ptr<DeviceBuffer<int64_t>> positions64_device_;
};

inline std::string describe(const Shape& s, const Options& o) {
  return "B" + std::to_string(s.batch) + " T" + std::to_string(s.tokens) + " Hq" +
         std::to_string(s.q_heads) + " Hk" + std::to_string(s.k_heads) + " D" +
         std::to_string(s.head_dim) + " R" + std::to_string(s.rotary_dim) +
         (o.pairing == Pairing::kInterleaved ? " interleaved" : " half split") +
         (o.source == AngleSource::kTable ? " table" : " per token") +
         (o.in_place ? " in place" : "");
}

}  // namespace astrai::rotary
