// One attention problem with random data: buffers in a chosen memory layout, launch, and check
// against an fp64 reference. Everything around the tensors is NaN: unused elements of strided
// views, keys and values past kv_len, outputs before the launch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/attention/plan.h"
#include "tests/kernels/testing/compare.h"
#include "tests/kernels/testing/device_buffer.h"
#include "tests/kernels/testing/testing.h"

namespace astrai::attention {

using namespace astrai::testing;  // the helpers of every test

struct Shape {
  int batch;
  int q_len;
  int kv_len;
  int q_heads;
  int kv_heads;
  int head_dim;
};

enum class Layout {
  kContiguous,   // [batch, seq, heads, dim]
  kHeadsFirst,   // [batch, heads, seq, dim] in memory
  kInterleaved,  // K and V as [:, :, 0] and [:, :, 1] of one [batch, seq, 2, heads, dim]; q and out
                 // contiguous
  kPadded,       // gaps after heads, rows and batches
};

// What the binding maps masks of each rank to.
enum class MaskKind {
  kNone,
  kBatchKv,        // 2-D [batch, kv]
  kBatchQKv,       // 3-D [batch, q, kv]
  kBatchHeads1Kv,  // 4-D [batch, heads, 1, kv]
  kFull,           // 4-D [batch, heads, q, kv]
};

struct Options {
  bool decode = false;
  bool causal = false;
  MaskKind mask = MaskKind::kNone;
  bool mask_rows_aligned = false;  // rows at multiples of 16 bytes, or at odd addresses
  Layout layout = Layout::kContiguous;
  int shift = 0;  // elements by which all operands are moved off their alignment
  bool lse = true;
  double scale = 0.0;  // 0: 1 / sqrt(head_dim)
  int splits = 0;      // decode: forced
  int tile_rows = 0;   // prefill: forced
  double q_magnitude = 1.0;
};

inline std::string describe(const Shape& s, const Options& o) {
  return "batch " + std::to_string(s.batch) + ", q_len " + std::to_string(s.q_len) + ", kv_len " +
         std::to_string(s.kv_len) + ", heads " + std::to_string(s.q_heads) + "/" +
         std::to_string(s.kv_heads) + ", dim " + std::to_string(s.head_dim) +
         (o.decode ? ", decode" : ", prefill") + (o.causal ? ", causal" : "") + ", mask " +
         std::to_string(static_cast<int>(o.mask)) + (o.mask_rows_aligned ? " aligned" : "") +
         ", layout " + std::to_string(static_cast<int>(o.layout)) + ", shift " +
         std::to_string(o.shift) + ", scale " + std::to_string(o.scale) + ", splits " +
         std::to_string(o.splits) + ", tile rows " + std::to_string(o.tile_rows);
}

// Offsets of a [batch, seq, heads, dim] tensor in its buffer, in elements.
struct Strides {
  int64_t offset = 0;
  int64_t batch = 0;
  int64_t seq = 0;
  int64_t head = 0;
  size_t size = 0;  // of the buffer

  int64_t at(int b, int i, int h) const { return offset + b * batch + i * seq + h * head; }
};

// `capacity` >= the sequence length is what the buffer has room for.
inline Strides make_strides(Layout layout, int batch, int capacity, int heads, int dim) {
  Strides s;
  switch (layout) {
    case Layout::kContiguous:
    case Layout::kInterleaved:
      s.head = dim;
      s.seq = int64_t{heads} * dim;
      s.batch = capacity * s.seq;
      break;
    case Layout::kHeadsFirst:
      s.seq = dim;
      s.head = int64_t{capacity} * dim;
      s.batch = heads * s.head;
      break;
    case Layout::kPadded:
      s.head = dim + 8;
      s.seq = heads * s.head + 24;
      s.batch = capacity * s.seq + 40;
      break;
  }
  s.size = static_cast<size_t>(batch * s.batch);
  return s;
}

template <typename T>
class AttentionCase {
 public:
  AttentionCase(Rng& rng, const Shape& shape, const Options& options)
      : shape_(shape),
        options_(options),
        q_strides_(
            make_strides(options.layout, shape.batch, shape.q_len, shape.q_heads, shape.head_dim)),
        k_strides_(make_strides(options.layout, shape.batch, shape.kv_len + kSpareKeys,
                                shape.kv_heads, shape.head_dim)) {
    if (options.layout == Layout::kInterleaved) {
      k_strides_.seq *= 2;
      k_strides_.batch *= 2;
      k_strides_.size *= 2;
    }
    v_strides_ = k_strides_;
    const T nan = from_double<T>(std::numeric_limits<double>::quiet_NaN());
    q_.assign(q_strides_.size, nan);
    k_.assign(k_strides_.size, nan);
    if (options.layout == Layout::kInterleaved) {
      v_strides_.offset = int64_t{shape.kv_heads} * shape.head_dim;
    } else {
      v_.assign(v_strides_.size, nan);
    }
    fill(rng, q_, q_strides_, shape.q_len, shape.q_heads, options.q_magnitude);
    fill(rng, k_, k_strides_, shape.kv_len, shape.kv_heads, 1.0);
    fill(rng, v(), v_strides_, shape.kv_len, shape.kv_heads, 1.0);
    make_mask(rng);
  }

  // Tests change the data here before run().
  std::vector<T>& q() { return q_; }
  std::vector<T>& k() { return k_; }
  std::vector<T>& v() { return options_.layout == Layout::kInterleaved ? k_ : v_; }
  const Strides& q_strides() const { return q_strides_; }
  const Strides& k_strides() const { return k_strides_; }
  const Strides& v_strides() const { return v_strides_; }
  std::vector<uint8_t>& mask() { return mask_; }

  // Launches and brings the results back.
  void run() {
    DeviceBuffer<T> q(q_, options_.shift), k(k_, options_.shift), v(v_, options_.shift);
    DeviceBuffer<uint8_t> mask(mask_, options_.mask_rows_aligned ? 0 : 1);
    DeviceBuffer<T> out(q_strides_.size, options_.shift);
    DeviceBuffer<float> lse(lse_size());
    DenseParams p = params();
    p.q.data = q.data() + q_strides_.offset;
    p.k.data = k.data() + k_strides_.offset;
    p.v.data = (options_.layout == Layout::kInterleaved ? k.data() : v.data()) + v_strides_.offset;
    p.out = out.data();
    if (options_.lse) p.lse = lse.data();
    if (options_.mask != MaskKind::kNone) p.mask.data = reinterpret_cast<const bool*>(mask.data());
    launch(p);
    REQUIRE_CUDA(cudaDeviceSynchronize());
    out_ = out.download();
    lse_ = lse.download();
  }

  // Compares out and lse with the reference, in all rows or as many random ones as `budget`
  // multiplications pay for.
  void check(Rng& rng, double budget = 4e7) {
    const double row_cost = 2.0 * std::max(1, shape_.kv_len) * shape_.head_dim;
    const int64_t rows = int64_t{shape_.batch} * shape_.q_len * shape_.q_heads;
    const int64_t checked = std::min<int64_t>(rows, static_cast<int64_t>(budget / row_cost) + 8);
    std::vector<T> out;
    std::vector<double> out_ref;
    std::vector<float> lse;
    std::vector<double> lse_ref;
    for (int64_t n = 0; n < checked; ++n) {
      const int64_t row = checked == rows ? n : rng.integer(0, rows - 1);
      const int h = static_cast<int>(row % shape_.q_heads);
      const int i = static_cast<int>(row / shape_.q_heads % shape_.q_len);
      const int b = static_cast<int>(row / shape_.q_heads / shape_.q_len);
      lse_ref.push_back(reference_row(b, i, h, &out_ref));
      const int64_t at = q_strides_.at(b, i, h);
      out.insert(out.end(), out_.begin() + at, out_.begin() + at + shape_.head_dim);
      if (options_.lse) lse.push_back(lse_[row]);
    }
    constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;
    EXPECT_CLOSE(out, out_ref, kIsBf16 ? 6e-3 : 8e-4, kIsBf16 ? 3e-2 : 4e-3);
    if (options_.lse) EXPECT_CLOSE(lse, lse_ref, 1e-5, lse_tolerance_);
    check_untouched();
  }

  void set_lse_tolerance(double tolerance) { lse_tolerance_ = tolerance; }
  const std::vector<T>& out() const { return out_; }
  const std::vector<float>& lse() const { return lse_; }

 private:
  static constexpr int kSpareKeys = 70;  // past kv_len, all NaN

  size_t lse_size() const {
    return options_.lse ? static_cast<size_t>(shape_.batch) * shape_.q_len * shape_.q_heads : 0;
  }

  double scale() const {
    return options_.scale != 0.0 ? options_.scale : 1.0 / std::sqrt(double(shape_.head_dim));
  }

  void fill(Rng& rng, std::vector<T>& buffer, const Strides& s, int seq, int heads,
            double magnitude) {
    for (int b = 0; b < shape_.batch; ++b) {
      for (int i = 0; i < seq; ++i) {
        for (int h = 0; h < heads; ++h) {
          T* row = buffer.data() + s.at(b, i, h);
          for (int d = 0; d < shape_.head_dim; ++d) {
            row[d] = from_double<T>(magnitude * rng.normal());
          }
        }
      }
    }
  }

  void make_mask(Rng& rng) {
    if (options_.mask == MaskKind::kNone) return;
    const bool heads =
        options_.mask == MaskKind::kFull || options_.mask == MaskKind::kBatchHeads1Kv;
    const bool queries = options_.mask == MaskKind::kFull || options_.mask == MaskKind::kBatchQKv;
    const int64_t pitch =
        options_.mask_rows_aligned ? (shape_.kv_len + 15) / 16 * 16 : shape_.kv_len + 3;
    mask_q_stride_ = queries ? pitch : 0;
    const int64_t head_pitch = pitch * (queries ? shape_.q_len : 1);
    mask_head_stride_ = heads ? head_pitch : 0;
    mask_batch_stride_ = head_pitch * (heads ? shape_.q_heads : 1);
    mask_.assign(static_cast<size_t>(mask_batch_stride_ * shape_.batch), 0xff);
    for (int64_t start = 0; start < static_cast<int64_t>(mask_.size()); start += pitch) {
      // Some rows allow nothing, some everything, some just a few keys.
      const int64_t kind = rng.integer(0, 9);
      for (int j = 0; j < shape_.kv_len; ++j) {
        mask_[start + j] = kind == 0   ? 0
                           : kind == 1 ? 1
                           : kind == 2 ? rng.integer(0, 40) == 0
                                       : rng.coin();
      }
    }
  }

  bool allowed(int b, int i, int h, int j) const {
    if (options_.causal && j > i + shape_.kv_len - shape_.q_len) return false;
    return mask_.empty() ||
           mask_[b * mask_batch_stride_ + h * mask_head_stride_ + i * mask_q_stride_ + j] != 0;
  }

  DenseParams params() const {
    DenseParams p;
    p.dtype = std::is_same_v<T, __nv_bfloat16> ? DType::kBF16 : DType::kFP16;
    p.batch = shape_.batch;
    p.q_len = shape_.q_len;
    p.kv_len = shape_.kv_len;
    p.q_heads = shape_.q_heads;
    p.kv_heads = shape_.kv_heads;
    p.head_dim = shape_.head_dim;
    p.q = {nullptr, q_strides_.batch, q_strides_.seq, q_strides_.head};
    p.k = {nullptr, k_strides_.batch, k_strides_.seq, k_strides_.head};
    p.v = {nullptr, v_strides_.batch, v_strides_.seq, v_strides_.head};
    p.out_batch_stride = q_strides_.batch;
    p.out_seq_stride = q_strides_.seq;
    p.out_head_stride = q_strides_.head;
    p.scale = static_cast<float>(scale());
    p.causal = options_.causal;
    p.mask.batch_stride = mask_batch_stride_;
    p.mask.head_stride = mask_head_stride_;
    p.mask.q_stride = mask_q_stride_;
    return p;
  }

  void launch(const DenseParams& p) {
    DeviceInfo device;
    REQUIRE_CUDA(current_device_info(&device));
    REQUIRE(why_not_implemented(p) == nullptr);
    if (!options_.decode) {
      if (options_.tile_rows == 0) {
        REQUIRE_CUDA(launch_prefill(p, nullptr));
      } else {
        REQUIRE_CUDA(launch_prefill(p, plan_prefill(p, device, options_.tile_rows), nullptr));
      }
      return;
    }
    if (options_.splits == 0) {
      DeviceBuffer<uint8_t> workspace(decode_workspace_bytes(p, device.sm_count));
      REQUIRE_CUDA(launch_decode(p, workspace.data(), workspace.size(), nullptr));
      REQUIRE_CUDA(cudaDeviceSynchronize());
    } else {
      const DecodePlan plan = plan_decode(p, device, 0, options_.splits);
      DeviceBuffer<uint8_t> workspace(plan.workspace_bytes);
      REQUIRE_CUDA(launch_decode(p, plan, workspace.data(), nullptr));
      REQUIRE_CUDA(cudaDeviceSynchronize());
    }
  }

  // Appends the row's output; returns its lse.
  double reference_row(int b, int i, int h, std::vector<double>* out) {
    const int dim = shape_.head_dim;
    const int kv_head = h / (shape_.q_heads / shape_.kv_heads);
    std::vector<double> score(shape_.kv_len, -std::numeric_limits<double>::infinity());
    double max = -std::numeric_limits<double>::infinity();
    const T* q = q_.data() + q_strides_.at(b, i, h);
    for (int j = 0; j < shape_.kv_len; ++j) {
      if (!allowed(b, i, h, j)) continue;
      const T* k = k_.data() + k_strides_.at(b, j, kv_head);
      double dot = 0;
      for (int d = 0; d < dim; ++d) dot += to_double(q[d]) * to_double(k[d]);
      score[j] = dot * static_cast<float>(scale());
      max = std::max(max, score[j]);
    }
    std::vector<double> sum_v(dim, 0.0);
    double sum = 0;
    for (int j = 0; j < shape_.kv_len; ++j) {
      if (!allowed(b, i, h, j)) continue;
      const double p = std::exp(score[j] - max);
      const T* row = v().data() + v_strides_.at(b, j, kv_head);
      sum += p;
      for (int d = 0; d < dim; ++d) sum_v[d] += p * to_double(row[d]);
    }
    for (int d = 0; d < dim; ++d) out->push_back(sum == 0 ? 0.0 : sum_v[d] / sum);
    return sum == 0 ? -std::numeric_limits<double>::infinity() : max + std::log(sum);
  }

  // Every row is written, and nothing between the rows.
  void check_untouched() {
    std::vector<uint8_t> written(out_.size(), 0);
    int64_t unwritten = 0, touched = 0;
    for (int b = 0; b < shape_.batch; ++b) {
      for (int i = 0; i < shape_.q_len; ++i) {
        for (int h = 0; h < shape_.q_heads; ++h) {
          const int64_t at = q_strides_.at(b, i, h);
          for (int d = 0; d < shape_.head_dim; ++d) {
            written[at + d] = 1;
            unwritten += std::isnan(to_double(out_[at + d]));
          }
        }
      }
    }
    const std::vector<uint16_t> bits = bits_of(out_);
    for (size_t i = 0; i < bits.size(); ++i) touched += written[i] == 0 && bits[i] != 0xffff;
    EXPECT_EQ(unwritten, 0);
    EXPECT_EQ(touched, 0);
    for (const float x : lse_) unwritten += std::isnan(x);
    EXPECT_EQ(unwritten, 0);
  }

  Shape shape_;
  Options options_;
  Strides q_strides_, k_strides_, v_strides_;
  std::vector<T> q_, k_, v_;
  std::vector<uint8_t> mask_;
  int64_t mask_batch_stride_ = 0, mask_head_stride_ = 0, mask_q_stride_ = 0;
  std::vector<T> out_;
  std::vector<float> lse_;
  double lse_tolerance_ = 1e-4;
};

template <typename T>
void run_case(Rng& rng, const Shape& shape, const Options& options) {
  const Context context(describe(shape, options) +
                        (std::is_same_v<T, __nv_bfloat16> ? ", bf16" : ", fp16"));
  AttentionCase<T> test(rng, shape, options);
  test.run();
  test.check(rng);
}

// Both element types.
inline void run_both(Rng& rng, const Shape& shape, const Options& options) {
  run_case<__nv_bfloat16>(rng, shape, options);
  run_case<__half>(rng, shape, options);
}

}  // namespace astrai::attention
