// What tests of decode and of prefill draw their problems from: head dims, masks, layouts, and
// problems with any of the features.
#pragma once

#include <algorithm>
#include <vector>

#include "tests/kernels/attention/attention_problem.h"

namespace astrai::attention {

struct Dims {
  int qk;
  int v;
};
inline const std::vector<Dims> kKernelDims = {{64, 64},   {96, 96},   {128, 128},
                                              {192, 128}, {192, 192}, {256, 256}};
inline const std::vector<MaskKind> kMasks = {MaskKind::kNone, MaskKind::kBatchKv,
                                             MaskKind::kBatchQKv, MaskKind::kBatchHeads1Kv,
                                             MaskKind::kFull};
inline const std::vector<Layout> kLayouts = {Layout::kContiguous, Layout::kHeadsFirst,
                                             Layout::kInterleaved, Layout::kPadded};

inline Problem with_dims(const Dims& dims) {
  Problem p;
  p.head_dim = dims.qk;
  p.v_head_dim = dims.v;
  return p;
}

inline int random_int(Rng& rng, int low, int high) {
  return static_cast<int>(rng.integer(low, high));
}

// A kernel's own head dims, or any that one pads to.
inline void draw_head_dims(Rng& rng, Problem* p) {
  *p = with_dims(rng.pick(kKernelDims));
  if (rng.integer(0, 2) == 0) {
    p->head_dim = random_int(rng, 1, 32) * 8;
    p->v_head_dim = 0;
  }
}

// `batch` requests, with lengths of their own where q or the keys are packed.
inline void draw_lengths(Rng& rng, Problem* p, int batch, int most_q, int most_kv) {
  p->packed_q = rng.coin();
  p->packed_kv = rng.coin();
  p->q_lens.assign(batch, random_int(rng, 1, most_q));
  p->kv_lens.assign(batch, random_int(rng, 0, most_kv));
  for (int b = 0; b < batch; ++b) {
    if (p->packed_q) p->q_lens[b] = random_int(rng, 0, most_q);
    if (p->packed_kv) p->kv_lens[b] = random_int(rng, 0, most_kv);
  }
  if (p->most_q() == 0) p->q_lens[0] = 1;
  p->spare_kv_len = p->packed_kv ? random_int(rng, 0, 1) * 5000 : 0;
}

// Where the keys lie and in which type, which of them are seen, and how scores become weights.
inline void draw_features(Rng& rng, Problem* p) {
  if (rng.coin()) {
    p->page_size = 1 << rng.integer(0, 8);
    p->table_rows = rng.coin();
    p->holes = rng.integer(0, 2) == 0 ? 0.1 : 0.0;
    p->append = rng.coin();
  }
  p->fp8 = rng.coin();
  if (p->fp8 && rng.coin()) {
    p->k_scale = 0.8f;
    p->v_scale = 1.3f;
    p->scale_pointers = rng.coin();
  }
  p->layout = rng.pick(kLayouts);
  if (p->v_dim() != p->head_dim && p->layout == Layout::kInterleaved) p->layout = Layout::kPadded;
  p->shift = rng.integer(0, 9) == 0 ? 1 : 0;
  p->causal = rng.coin();
  const int most_kv = std::max(1, p->most_kv());
  if (rng.integer(0, 3) == 0) p->window_left = random_int(rng, 0, most_kv);
  if (rng.integer(0, 3) == 0) p->window_right = random_int(rng, 0, p->most_q() > 16 ? 100 : 10);
  if (rng.integer(0, 3) == 0) p->softcap = 5.0f;
  if (rng.integer(0, 5) == 0) p->scale = -0.15;
  p->sinks = rng.integer(0, 3) == 0;
  if (rng.integer(0, 3) == 0) {
    p->mask = rng.pick(kMasks);
    p->mask_short = rng.coin() ? 0 : random_int(rng, 0, 5);
  }
  p->lse = rng.integer(0, 3) != 0;
}

}  // namespace astrai::attention
