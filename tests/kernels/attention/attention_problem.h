// One attention problem with random data, over everything that AttentionParams can say: buffers,
// params for a launch, and a check of what it wrote against an fp64 reference.
//
// Everything that a launch must not look at is NaN: gaps of strided views, keys past a request's
// length, pages of no request, outputs before the launch. Entries of page tables that must not be
// looked at lie far outside the cache. Everything that it must not write is compared afterwards.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/attention/attention.h"
#include "tests/kernels/attention/element_buffer.h"
#include "tests/kernels/testing/compare.h"
#include "tests/kernels/testing/device_buffer.h"
#include "tests/kernels/testing/testing.h"

namespace astrai::attention {

using namespace astrai::testing;  // the helpers of every test

// What the binding maps masks of each rank to.
enum class MaskKind {
  kNone,
  kBatchKv,        // 2-D [batch, kv]
  kBatchQKv,       // 3-D [batch, q, kv]
  kBatchHeads1Kv,  // 4-D [batch, heads, 1, kv]
  kFull,           // 4-D [batch, heads, q, kv]
};

struct Problem {
  int q_heads = 8;
  int kv_heads = 2;
  int head_dim = 64;
  int v_head_dim = 0;  // 0: head_dim
  // Of each request; all the same unless packed. One q_len stands for all requests.
  std::vector<int> q_lens = {1};
  std::vector<int> kv_lens = {1};
  bool packed_q = false;   // qo_indptr
  bool packed_kv = false;  // kv_indptr
  int spare_kv_len = 0;    // params.kv_len above the longest request
  int page_size = 0;       // 0: not paged
  bool table_rows = false;
  double holes = 0.0;  // share of table entries that are negative
  bool append = false;
  bool fp8 = false;
  float k_scale = 1.0f;
  float v_scale = 1.0f;
  bool scale_pointers = false;
  Layout layout = Layout::kContiguous;
  int shift = 0;       // elements by which all operands are moved off their alignment
  double scale = 0.0;  // 0: 1 / sqrt(head_dim)
  bool causal = false;
  int window_left = -1;
  int window_right = -1;
  float softcap = 0.0f;
  bool sinks = false;
  MaskKind mask = MaskKind::kNone;
  int mask_short = 0;  // positions and keys that the mask lacks
  bool lse = true;
  double q_magnitude = 1.0;

  int batch() const { return static_cast<int>(kv_lens.size()); }
  int v_dim() const { return v_head_dim == 0 ? head_dim : v_head_dim; }
  int most_q() const { return *std::max_element(q_lens.begin(), q_lens.end()); }
  int most_kv() const { return *std::max_element(kv_lens.begin(), kv_lens.end()); }
};

inline std::string describe(const Problem& p) {
  const auto list = [](const std::vector<int>& values) {
    std::string text;
    for (size_t i = 0; i < values.size() && i < 12; ++i) text += " " + std::to_string(values[i]);
    return text + (values.size() > 12 ? " ..." : "");
  };
  return "heads " + std::to_string(p.q_heads) + "/" + std::to_string(p.kv_heads) + ", dims " +
         std::to_string(p.head_dim) + "/" + std::to_string(p.v_dim()) + ", q" + list(p.q_lens) +
         (p.packed_q ? " packed" : "") + ", kv" + list(p.kv_lens) + (p.packed_kv ? " packed" : "") +
         ", page " + std::to_string(p.page_size) + (p.table_rows ? " rows" : "") +
         (p.holes > 0 ? " holes" : "") + (p.append ? ", append" : "") + (p.fp8 ? ", e4m3" : "") +
         ", layout " + std::to_string(static_cast<int>(p.layout)) + ", shift " +
         std::to_string(p.shift) + (p.causal ? ", causal" : "") + ", window " +
         std::to_string(p.window_left) + "," + std::to_string(p.window_right) + ", softcap " +
         std::to_string(p.softcap) + (p.sinks ? ", sinks" : "") + ", mask " +
         std::to_string(static_cast<int>(p.mask)) + (p.mask_short > 0 ? " short" : "") +
         ", scale " + std::to_string(p.scale);
}

template <typename T>
class AttentionProblem {
 public:
  AttentionProblem(Rng& rng, const Problem& problem)
      : p_(problem), kv_dtype_(problem.fp8 ? DType::kE4M3 : dtype()) {
    if (p_.q_lens.size() == 1) p_.q_lens.assign(p_.kv_lens.size(), p_.q_lens[0]);
    const auto equal = [](const std::vector<int>& x) {
      return std::all_of(x.begin(), x.end(), [&](int y) { return y == x[0]; });
    };
    REQUIRE(p_.q_lens.size() == p_.kv_lens.size());
    REQUIRE((p_.packed_q || equal(p_.q_lens)) && (p_.packed_kv || equal(p_.kv_lens)));
    q_starts_ = indptr(p_.q_lens);
    kv_starts_ = indptr(p_.kv_lens);
    make_queries(rng);
    make_cache(rng);
    make_mask(rng);
    for (int h = 0; h < p_.q_heads; ++h) {
      sinks_.push_back(static_cast<float>(rng.uniform(-3.0, 3.0)));
    }
  }

  // Tests change the data here before run().
  std::vector<T>& q() { return q_; }
  ElementBuffer& k() { return k_; }
  ElementBuffer& v() { return p_.layout == Layout::kInterleaved ? k_ : v_; }
  std::vector<uint8_t>& mask() { return mask_; }
  int64_t q_at(int b, int i, int h) const { return q_strides_.at(q_outer(b), q_seq(b, i), h); }
  int64_t out_at(int b, int i, int h) const { return out_strides_.at(q_outer(b), q_seq(b, i), h); }
  int64_t k_at(int b, int j, int h) const { return k_strides_.at(kv_outer(b, j), kv_seq(b, j), h); }
  int64_t v_at(int b, int j, int h) const { return v_strides_.at(kv_outer(b, j), kv_seq(b, j), h); }
  int64_t lse_at(int b, int i, int h) const { return (q_token(b) + i) * int64_t{p_.q_heads} + h; }
  const std::vector<T>& out() const { return out_; }
  const std::vector<float>& lse() const { return lse_; }
  void set_lse_tolerance(double tolerance) { lse_tolerance_ = tolerance; }

  // Calls launch(params), and brings back what it wrote.
  template <typename Launch>
  void run(Launch launch) {
    DeviceBuffer<T> q(q_, p_.shift), out(out_strides_.size, p_.shift);
    DeviceBuffer<uint8_t> k(k_.bytes, k_shift()), v(v_.bytes, k_shift());
    DeviceBuffer<T> new_k(new_k_, p_.shift), new_v(new_v_, p_.shift);
    DeviceBuffer<int32_t> table(table_), rows(rows_), qo(q_starts_), kv(kv_starts_);
    DeviceBuffer<uint8_t> mask(mask_, 1);
    DeviceBuffer<float> sinks(sinks_), scales(std::vector<float>{2.0f, 0.5f});
    DeviceBuffer<float> lse(p_.lse ? static_cast<size_t>(tokens()) * p_.q_heads : 0);
    AttentionParams a = params();
    a.q.data = q.data() + q_strides_.offset;
    a.k.data = k.data() + k_strides_.offset * k_.size_of_element();
    a.v.data = (p_.layout == Layout::kInterleaved ? k : v).data() +
               v_strides_.offset * k_.size_of_element();
    a.out = out.data() + out_strides_.offset;
    if (p_.lse) a.lse = lse.data();
    if (p_.packed_q) a.qo_indptr = qo.data();
    if (p_.packed_kv) a.kv_indptr = kv.data();
    if (p_.page_size > 0) a.pages.entries = table.data();
    if (p_.table_rows) a.pages.rows = rows.data();
    if (p_.append) {
      a.new_k.data = new_k.data();
      a.new_v.data = new_v.data();
    }
    if (p_.mask != MaskKind::kNone) a.mask.data = reinterpret_cast<const bool*>(mask.data());
    if (p_.sinks) a.sinks = sinks.data();
    if (p_.scale_pointers) {
      a.k_scale_pointer = scales.data();
      a.v_scale_pointer = scales.data() + 1;
    }
    REQUIRE_CUDA(launch(a));
    REQUIRE_CUDA(cudaDeviceSynchronize());
    out_ = out.download();
    lse_ = lse.download();
    const std::vector<uint8_t> k_after = k.download(), v_after = v.download();
    put_new_tokens();
    EXPECT_TRUE(k_after == k_.bytes);  // new tokens are there, and nothing else has changed
    EXPECT_TRUE(v_after == v_.bytes);
  }

  // Compares out and lse with the reference, in all rows or as many random ones as `budget`
  // multiplications pay for.
  void check(Rng& rng, double budget = 8e6) {
    const double row_cost = 2.0 * std::max(1, p_.most_kv()) * p_.head_dim;
    const int64_t rows = int64_t{tokens()} * p_.q_heads;
    k_values_ = k_.values();
    v_values_ = v().values();
    const int64_t checked = std::min<int64_t>(rows, static_cast<int64_t>(budget / row_cost) + 8);
    std::vector<T> out;
    std::vector<double> out_ref, lse_ref;
    std::vector<float> lse;
    int64_t n = 0;
    for (int b = 0; b < p_.batch(); ++b) {
      for (int i = 0; i < q_len(b); ++i) {
        for (int h = 0; h < p_.q_heads; ++h, ++n) {
          if (checked < rows && rng.uniform(0, 1) * rows > checked) continue;
          lse_ref.push_back(reference_row(b, i, h, &out_ref));
          const auto at = out_.begin() + out_at(b, i, h);
          out.insert(out.end(), at, at + p_.v_dim());
          if (p_.lse) lse.push_back(lse_[lse_at(b, i, h)]);
        }
      }
    }
    constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;
    const double unit = std::max(1.0, std::fabs(v_scale()));
    EXPECT_CLOSE(out, out_ref, kIsBf16 ? 6e-3 : 8e-4, (kIsBf16 ? 3e-2 : 4e-3) * unit);
    if (p_.lse) EXPECT_CLOSE(lse, lse_ref, 1e-5, lse_tolerance_);
    check_untouched();
  }

 private:
  static constexpr int kSpareKeys = 70;  // past a dense request's keys, all NaN
  static constexpr int32_t kFarPage = 1 << 30;

  static constexpr DType dtype() {
    return std::is_same_v<T, __nv_bfloat16> ? DType::kBF16 : DType::kFP16;
  }
  int q_len(int b) const { return p_.q_lens[b]; }
  int kv_len(int b) const { return p_.kv_lens[b]; }
  int tokens() const { return p_.packed_q ? q_starts_.back() : p_.batch() * p_.most_q(); }
  size_t k_shift() const { return p_.shift * k_.size_of_element(); }
  double k_scale() const { return p_.k_scale * (p_.scale_pointers ? 2.0 : 1.0); }
  double v_scale() const { return p_.v_scale * (p_.scale_pointers ? 0.5 : 1.0); }
  double scale() const {
    return p_.scale != 0.0 ? p_.scale : 1.0 / std::sqrt(static_cast<double>(p_.head_dim));
  }

  static std::vector<int32_t> indptr(const std::vector<int>& lengths) {
    std::vector<int32_t> sums = {0};
    for (const int length : lengths) sums.push_back(sums.back() + length);
    return sums;
  }

  // Where tokens lie: outer index (batch, page or 0) and index within it.
  int q_outer(int b) const { return p_.packed_q ? 0 : b; }
  int q_seq(int b, int i) const { return p_.packed_q ? q_starts_[b] + i : i; }
  int64_t q_token(int b) const { return p_.packed_q ? q_starts_[b] : int64_t{b} * p_.most_q(); }
  int table_entry(int b, int j) const {
    return table_[static_cast<size_t>(p_.table_rows ? rows_[b] : b) * table_width_ +
                  j / p_.page_size];
  }
  int kv_outer(int b, int j) const {
    return p_.page_size > 0 ? table_entry(b, j) : p_.packed_kv ? 0 : b;
  }
  int kv_seq(int b, int j) const {
    if (p_.page_size > 0) return j % p_.page_size;
    return p_.packed_kv ? kv_starts_[b] + j : j;
  }
  bool has_key(int b, int j) const { return p_.page_size == 0 || table_entry(b, j) >= 0; }

  void make_queries(Rng& rng) {
    const Layout layout = p_.layout == Layout::kInterleaved ? Layout::kContiguous : p_.layout;
    const int outer = p_.packed_q ? 1 : p_.batch();
    const int seq = p_.packed_q ? tokens() : p_.most_q();
    q_strides_ = make_strides(layout, outer, seq, p_.q_heads, p_.head_dim);
    out_strides_ = make_strides(layout, outer, seq, p_.q_heads, p_.v_dim());
    const T nan = from_double<T>(std::numeric_limits<double>::quiet_NaN());
    q_.assign(q_strides_.size, nan);
    for (int b = 0; b < p_.batch(); ++b) {
      for (int i = 0; i < q_len(b); ++i) {
        for (int h = 0; h < p_.q_heads; ++h) {
          for (int d = 0; d < p_.head_dim; ++d) {
            q_[q_at(b, i, h) + d] = from_double<T>(p_.q_magnitude * rng.normal());
          }
        }
      }
    }
    if (!p_.append) return;
    new_strides_ = make_strides(Layout::kContiguous, outer, seq, p_.kv_heads, p_.head_dim);
    new_v_strides_ = make_strides(Layout::kContiguous, outer, seq, p_.kv_heads, p_.v_dim());
    new_k_ = random_normal<T>(rng, new_strides_.size);
    new_v_ = random_normal<T>(rng, new_v_strides_.size);
  }

  void make_cache(Rng& rng) {
    int outer = p_.batch(), seq = p_.most_kv() + kSpareKeys;
    if (p_.page_size > 0) {
      outer = make_table(rng);
      seq = p_.page_size;
    } else if (p_.packed_kv) {
      outer = 1;
      seq = kv_starts_.back() + kSpareKeys;
    }
    k_strides_ = make_strides(p_.layout, outer, seq, p_.kv_heads, p_.head_dim);
    v_strides_ = make_strides(p_.layout, outer, seq, p_.kv_heads, p_.v_dim());
    if (p_.layout == Layout::kInterleaved) {
      REQUIRE(p_.v_dim() == p_.head_dim);
      v_strides_.offset = k_strides_.batch;
      k_strides_.batch *= 2;
      v_strides_.batch *= 2;
      k_strides_.size *= 2;
      v_strides_.size = 0;
    }
    k_ = ElementBuffer(kv_dtype_, k_strides_.size);
    v_ = ElementBuffer(kv_dtype_, v_strides_.size);
    for (int b = 0; b < p_.batch(); ++b) {
      const int old = p_.append ? std::max(0, kv_len(b) - q_len(b)) : kv_len(b);
      for (int j = 0; j < old; ++j) {
        if (!has_key(b, j)) continue;
        for (int h = 0; h < p_.kv_heads; ++h) {
          for (int d = 0; d < p_.head_dim; ++d) k_.set(k_at(b, j, h) + d, rng.normal());
          for (int d = 0; d < p_.v_dim(); ++d) v().set(v_at(b, j, h) + d, rng.normal());
        }
      }
    }
  }

  // Pages of all requests, in random order among pages that belong to none. Returns their number.
  int make_table(Rng& rng) {
    std::vector<int> counts;
    int used = 0;
    table_width_ = (p_.most_kv() + p_.spare_kv_len + p_.page_size - 1) / p_.page_size;
    for (int b = 0; b < p_.batch(); ++b) {
      counts.push_back((kv_len(b) + p_.page_size - 1) / p_.page_size);
      used += counts.back();
    }
    table_width_ += static_cast<int>(rng.integer(0, 2));
    std::vector<int32_t> pages(used + 3);
    for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
    std::shuffle(pages.begin(), pages.end(), rng.engine());
    const int table_rows = p_.batch() + (p_.table_rows ? 2 : 0);
    for (int r = 0; r < table_rows; ++r) rows_.push_back(r);
    if (p_.table_rows) std::shuffle(rows_.begin(), rows_.end(), rng.engine());
    table_.assign(static_cast<size_t>(table_rows) * table_width_, kFarPage);
    size_t next = 0;
    for (int b = 0; b < p_.batch(); ++b) {
      const int row = p_.table_rows ? rows_[b] : b;
      for (int i = 0; i < counts[b]; ++i) {
        const bool hole = rng.uniform(0, 1) < p_.holes;
        table_[static_cast<size_t>(row) * table_width_ + i] =
            hole ? static_cast<int32_t>(rng.integer(-1000000, -1)) : pages[next++];
      }
    }
    return static_cast<int>(pages.size());
  }

  // What the launch is to put into the cache.
  void put_new_tokens() {
    if (!p_.append) return;
    for (int b = 0; b < p_.batch(); ++b) {
      for (int i = 0; i < q_len(b); ++i) {
        const int j = kv_len(b) - q_len(b) + i;
        if (j < 0 || !has_key(b, j)) continue;
        for (int h = 0; h < p_.kv_heads; ++h) {
          const int64_t k_from = new_strides_.at(q_outer(b), q_seq(b, i), h);
          const int64_t v_from = new_v_strides_.at(q_outer(b), q_seq(b, i), h);
          for (int d = 0; d < p_.head_dim; ++d) {
            k_.set(k_at(b, j, h) + d, stored(new_k_[k_from + d], k_scale()));
          }
          for (int d = 0; d < p_.v_dim(); ++d) {
            v().set(v_at(b, j, h) + d, stored(new_v_[v_from + d], v_scale()));
          }
        }
      }
    }
  }
  // fp32 division, as documented; exact copies are not scaled.
  double stored(T x, double scale) const {
    return p_.fp8 ? static_cast<float>(to_double(x)) / static_cast<float>(scale) : to_double(x);
  }

  void make_mask(Rng& rng) {
    if (p_.mask == MaskKind::kNone) return;
    const bool heads = p_.mask == MaskKind::kFull || p_.mask == MaskKind::kBatchHeads1Kv;
    const bool queries = p_.mask == MaskKind::kFull || p_.mask == MaskKind::kBatchQKv;
    mask_view_.rows = std::max(0, p_.most_q() - p_.mask_short);
    mask_view_.width = std::max(0, p_.most_kv() - p_.mask_short);
    const int64_t pitch = mask_view_.width + rng.integer(0, 1) * 3;
    mask_view_.q_stride = queries ? pitch : 0;
    const int64_t head_pitch = pitch * (queries ? mask_view_.rows : 1);
    mask_view_.head_stride = heads ? head_pitch : 0;
    mask_view_.batch_stride = head_pitch * (heads ? p_.q_heads : 1);
    mask_.assign(static_cast<size_t>(mask_view_.batch_stride * p_.batch()), 0xff);
    for (size_t start = 0; pitch > 0 && start < mask_.size(); start += pitch) {
      // Some rows allow nothing, some everything, some just a few keys.
      const int64_t kind = rng.integer(0, 9);
      for (int j = 0; j < mask_view_.width; ++j) {
        mask_[start + j] = kind == 0   ? 0
                           : kind == 1 ? 1
                           : kind == 2 ? rng.integer(0, 40) == 0
                                       : rng.coin();
      }
    }
  }

  bool allowed(int b, int i, int h, int j) const {
    const int64_t diagonal = int64_t{i} + kv_len(b) - q_len(b);
    if (p_.causal && j > diagonal) return false;
    if (p_.window_left >= 0 && j < diagonal - p_.window_left) return false;
    if (p_.window_right >= 0 && j > diagonal + p_.window_right) return false;
    if (!has_key(b, j)) return false;
    if (p_.mask == MaskKind::kNone) return true;
    if (i >= mask_view_.rows || j >= mask_view_.width) return false;
    return mask_[b * mask_view_.batch_stride + h * mask_view_.head_stride +
                 i * mask_view_.q_stride + j] != 0;
  }

  AttentionParams params() const {
    AttentionParams a;
    a.dtype = dtype();
    a.kv_dtype = kv_dtype_;
    a.batch = p_.batch();
    a.q_heads = p_.q_heads;
    a.kv_heads = p_.kv_heads;
    a.head_dim = p_.head_dim;
    a.v_head_dim = p_.v_dim();
    a.q = {nullptr, q_strides_.batch, q_strides_.seq, q_strides_.head};
    a.q_len = p_.most_q();
    a.total_q = p_.packed_q ? tokens() : 0;
    a.k = {nullptr, k_strides_.batch, k_strides_.seq, k_strides_.head};
    a.v = {nullptr, v_strides_.batch, v_strides_.seq, v_strides_.head};
    a.kv_len = p_.most_kv() + p_.spare_kv_len;
    if (p_.page_size > 0) {
      a.pages.row_stride = table_width_;
      a.pages.width = table_width_;
      a.pages.page_size = p_.page_size;
    }
    a.new_k = {nullptr, new_strides_.batch, new_strides_.seq, new_strides_.head};
    a.new_v = {nullptr, new_v_strides_.batch, new_v_strides_.seq, new_v_strides_.head};
    a.out_batch_stride = out_strides_.batch;
    a.out_seq_stride = out_strides_.seq;
    a.out_head_stride = out_strides_.head;
    a.scale = static_cast<float>(scale());
    a.causal = p_.causal;
    a.window_left = p_.window_left;
    a.window_right = p_.window_right;
    a.softcap = p_.softcap;
    a.mask = mask_view_;
    a.k_scale = p_.k_scale;
    a.v_scale = p_.v_scale;
    return a;
  }

  // Appends the row's output; returns its lse.
  double reference_row(int b, int i, int h, std::vector<double>* out) {
    const int kv_head = h / (p_.q_heads / p_.kv_heads);
    const double factor = static_cast<float>(scale()) * k_scale();
    std::vector<double> score(kv_len(b), -std::numeric_limits<double>::infinity());
    double max = p_.sinks ? sinks_[h] : -std::numeric_limits<double>::infinity();
    std::vector<double> q(p_.head_dim);
    for (int d = 0; d < p_.head_dim; ++d) q[d] = to_double(q_[q_at(b, i, h) + d]);
    for (int j = 0; j < kv_len(b); ++j) {
      if (!allowed(b, i, h, j)) continue;
      const float* k = k_values_.data() + k_at(b, j, kv_head);
      double dot = 0;
      for (int d = 0; d < p_.head_dim; ++d) dot += q[d] * k[d];
      score[j] = dot * factor;
      if (p_.softcap > 0) score[j] = p_.softcap * std::tanh(score[j] / p_.softcap);
      max = std::max(max, score[j]);
    }
    std::vector<double> sum_v(p_.v_dim(), 0.0);
    double sum = p_.sinks ? std::exp(sinks_[h] - max) : 0.0;
    for (int j = 0; j < kv_len(b); ++j) {
      if (!allowed(b, i, h, j)) continue;
      const double weight = std::exp(score[j] - max);
      const float* v = v_values_.data() + v_at(b, j, kv_head);
      sum += weight;
      for (int d = 0; d < p_.v_dim(); ++d) sum_v[d] += weight * v[d];
    }
    for (const double x : sum_v) out->push_back(sum == 0 ? 0.0 : x / sum * v_scale());
    return sum == 0 ? -std::numeric_limits<double>::infinity() : max + std::log(sum);
  }

  // Every row is written, and nothing between the rows.
  void check_untouched() {
    std::vector<uint8_t> written(out_.size(), 0), lse_written(lse_.size(), 0);
    int64_t unwritten = 0, touched = 0;
    for (int b = 0; b < p_.batch(); ++b) {
      for (int i = 0; i < q_len(b); ++i) {
        for (int h = 0; h < p_.q_heads; ++h) {
          for (int d = 0; d < p_.v_dim(); ++d) {
            written[out_at(b, i, h) + d] = 1;
            unwritten += std::isnan(to_double(out_[out_at(b, i, h) + d]));
          }
          if (!p_.lse) continue;
          lse_written[lse_at(b, i, h)] = 1;
          unwritten += std::isnan(lse_[lse_at(b, i, h)]);
        }
      }
    }
    const std::vector<uint16_t> bits = bits_of(out_);
    for (size_t i = 0; i < bits.size(); ++i) touched += written[i] == 0 && bits[i] != 0xffff;
    for (size_t i = 0; i < lse_.size(); ++i) touched += !lse_written[i] && !std::isnan(lse_[i]);
    EXPECT_EQ(unwritten, 0);
    EXPECT_EQ(touched, 0);
  }

  Problem p_;
  DType kv_dtype_;
  Strides q_strides_, out_strides_, k_strides_, v_strides_, new_strides_, new_v_strides_;
  std::vector<T> q_, new_k_, new_v_, out_;
  ElementBuffer k_, v_;
  std::vector<float> k_values_, v_values_;     // the same, for the reference
  std::vector<int32_t> q_starts_, kv_starts_;  // where the requests of packed tensors begin
  std::vector<int32_t> table_, rows_;
  int table_width_ = 0;
  std::vector<uint8_t> mask_;
  MaskView mask_view_;
  std::vector<float> sinks_, lse_;
  double lse_tolerance_ = 1e-4;
};

}  // namespace astrai::attention
