// How launch_decode cuts its work: tiles, workers, workspace. Plain host code.
//
// Lengths live on the device, so a plan only says how many workers there are and in which units the
// keys are counted; which keys a worker takes is decided by the kernel (work_split.cuh).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/attention/variant.h"
#include "kernels/common/device.h"

namespace astrai::attention {

// Each warp streams slices of 16 keys through two rings of its own, one for K and one for V.
struct DecodeTile {
  int warps;
  int slots;    // K slices that a ring holds
  int v_slots;  // V slices: as many, or one less where memory is short
  int qk_dim;
  int v_dim;
  int element_bytes;

  static constexpr int kSliceKeys = 16;
  constexpr int threads() const { return warps * 32; }
  constexpr int keys() const { return warps * kSliceKeys; }  // of one step of the whole block
  constexpr int k_slice_bytes() const { return kSliceKeys * tile_row_bytes(qk_dim, element_bytes); }
  constexpr int v_slice_bytes() const { return kSliceKeys * tile_row_bytes(v_dim, element_bytes); }
  constexpr int warp_bytes() const { return slots * k_slice_bytes() + v_slots * v_slice_bytes(); }
  constexpr int smem_bytes() const { return warps * warp_bytes(); }  // dynamic
  // Bound on the static part of a block, which holds the rows of Q that registers cannot.
  constexpr int static_smem_bytes() const { return qk_dim == 256 ? 7680 : 3072; }
};

// 78 to 96 KB of rings: two blocks on an SM of 228 KB, one where 99 KB is the limit.
constexpr DecodeTile decode_tile(int qk_dim, int v_dim, int element_bytes) {
  const auto tile = [=](int warps, int slots) {
    // The largest kernels need some of an SM's 99 KB for Q.
    return DecodeTile{warps,  slots, qk_dim == 256 ? slots - 1 : slots,
                      qk_dim, v_dim, element_bytes};
  };
  if (element_bytes == 1) {
    if (qk_dim == 64) return tile(4, 9);
    if (qk_dim == 96) return tile(4, 6);
    if (qk_dim == 128) return tile(4, 6);
    if (qk_dim == 192) return v_dim == 128 ? tile(4, 4) : tile(4, 3);
    return tile(3, 4);
  }
  if (qk_dim == 64) return tile(4, 6);
  if (qk_dim == 96) return tile(4, 3);
  if (qk_dim == 128) return tile(4, 3);
  if (qk_dim == 192) return v_dim == 128 ? tile(3, 3) : tile(2, 4);
  return tile(2, 3);
}

inline constexpr int kDecodeBlocksPerSm = 2;  // that registers allow
inline constexpr int kClusterSizes = 5;       // 1, 2, 4, 8 and 16 blocks
inline constexpr int kMostClusterBlocks = 1 << (kClusterSizes - 1);
inline constexpr int kMostWorkers = 512;  // that may share a pair

// Clusters of each size of a kernel that the device holds at a time; 0 = none.
struct Residency {
  int clusters[kClusterSizes] = {};  // of 1 << i blocks
};

// Blocks of the decode kernel that the device holds, without clusters.
int resident_decode_blocks(const DecodeTile& tile, const DeviceInfo& device);

struct DecodePlan {
  Variant variant = Variant::kScalar;
  HeadDims dims = {0, 0};
  int cluster_blocks = 1;  // blocks that work as one
  int workers = 0;
  int unit_keys = 0;     // see work_split.cuh
  int fixed_splits = 0;  // deterministic: splits that a pair has room for; a worker is one of them
  int64_t blocks = 0;
  size_t workspace_bytes = 0;  // that the launch may use
};

// The plan for arguments that why_not_implemented accepts, with none of batch and q_len 0 and with
// q_len * q_heads / kv_heads at most kMmaRows for Variant::kMma. At most `workspace_limit` bytes
// are planned for, except for deterministic launches, which take what they need.
// `forced_workers` > 0 (for tests) is taken as it is, with as many workers used as there are units.
DecodePlan plan_decode(const AttentionParams& params, const Residency& residency,
                       size_t workspace_limit, int forced_workers = 0);

// Whether all query rows that share a kv head fit the decode kernel; the others go to prefill.
constexpr bool fits_decode(const AttentionParams& p) {
  return static_cast<int64_t>(p.q_len) * (p.q_heads / p.kv_heads) <= kMmaRows;
}

// Launches with a plan made above, on plan.workspace_bytes of workspace.
cudaError_t launch_decode(const AttentionParams& params, const DecodePlan& plan, void* workspace,
                          cudaStream_t stream);

}  // namespace astrai::attention
