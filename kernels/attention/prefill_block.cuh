// The parts of a prefill block's work: on tiles, the two products and what hides keys from rows; at
// the end, what is stored.
#pragma once

#include <cstdint>

#include "kernels/attention/kv_fragments.cuh"
#include "kernels/attention/mask.cuh"
#include "kernels/attention/prefill_args.cuh"
#include "kernels/attention/prefill_copy.cuh"
#include "kernels/attention/prefill_work.cuh"
#include "kernels/attention/score.cuh"
#include "kernels/attention/softmax.cuh"
#include "kernels/common/cp_async.cuh"
#include "kernels/common/ldmatrix.cuh"
#include "kernels/common/mma.cuh"

namespace astrai::attention {

template <typename T, int kQkDim, int kVDim, int kRows, typename KvSource>
struct PrefillBlock {
  using E = typename KvSource::Element;
  static constexpr PrefillTile kTile =
      prefill_tile({kQkDim, kVDim}, kRows, static_cast<int>(sizeof(E)));
  static constexpr int kKeys = kTile.keys;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kSlots = kTile.slots;
  static constexpr int kSlotBytes = kTile.slot_bytes();
  static constexpr int kQBytes = kTile.q_bytes();
  static constexpr int kSmemBytes = kTile.smem_bytes();
  static constexpr int kWarpRows = kTile.warp_rows();
  static constexpr int kMt = kWarpRows / 16;  // m blocks per warp
  static constexpr int kKeyBlocks = kKeys / 16;
  static constexpr int kQkBlocks = kQkDim / 16;
  static constexpr int kVBlocks = kVDim / 16;
  using QShare = TileShare<T, kQkDim, kRows, kThreads>;
  using QRows = TileRows<kQkDim * 2>;
  using QWalk = LdmatrixWalk<kQkDim * 2>;
  using Copy = KvCopy<KvSource, kQkDim, kVDim, kKeys, kThreads>;
  using KFragments = KvFragments<T, E, kQkDim* static_cast<int>(sizeof(E))>;
  using VFragments = KvFragments<T, E, kVDim* static_cast<int>(sizeof(E))>;

  // Static shared memory.
  struct Shared {
    PrefillWork block;
    typename Copy::Shared copy;
    int mask_positions[kThreads];  // of the mask row that a thread reads
  };
  static_assert(kTile.smem_bytes() + static_cast<int>(sizeof(Shared)) <=
                    kTile.all_smem_bytes(KvSource::kPaged),
                "static memory is counted");
  static_assert(kMt * 16 * kTile.warps == kRows && kKeys % 32 == 0, "whole blocks");

  // Starts the copy of the block's rows of Q; rows and columns that do not exist become zeros.
  template <typename Args>
  static __device__ __forceinline__ void copy_q(uint32_t q_smem, const Args& args,
                                                const QWork& work) {
    if (!QShare::takes_part()) return;
    const T* q = static_cast<const T*>(args.q) + work.q_offset +
                 work.kv_head * args.group * args.q_head_stride + QShare::column();
    const PackedRows rows = {args.group, work.row_end};
    const bool has_column = QShare::column() < args.head_dim;
#pragma unroll 4
    for (int pass = 0; pass < QShare::kPasses; ++pass) {
      const int row = work.first_row + QShare::row() + pass * QShare::kRowsPerPass;
      const bool valid = row < rows.end && has_column;
      const int position = rows.position(valid ? row : 0);
      const int head = rows.head(valid ? row : 0, position);
      cp_async_16(q_smem + QShare::offset(pass),
                  q + position * args.q_seq_stride + head * args.q_head_stride, valid);
    }
  }

  // Brings Q, which has landed, in the form that the products need: the sign of the scale, and for
  // e4m3 keys the order of dims of their operand.
  static __device__ __forceinline__ void prepare_q(uint8_t* q_smem, bool negate) {
    const uint32_t sign = negate ? 0x80008000u : 0u;
    for (int block = threadIdx.x; block < kRows * kQkBlocks; block += kThreads) {
      const int row = block / kQkBlocks;
      const int chunk = block % kQkBlocks * 2;
      uint4* low = reinterpret_cast<uint4*>(q_smem + QRows::offset(row, chunk));
      uint4* high = reinterpret_cast<uint4*>(q_smem + QRows::offset(row, chunk + 1));
      const uint4 a = *low, b = *high;
      const uint32_t pairs[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      uint32_t to[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = pairs[KFragments::k_dim(2 * i) / 2] ^ sign;
      *low = make_uint4(to[0], to[1], to[2], to[3]);
      *high = make_uint4(to[4], to[5], to[6], to[7]);
    }
  }

  // S = Q K^T for the warp's rows and the keys of one slot. `q_rows`: shared memory address of the
  // warp's first row of Q, whose fragments are read again for every tile because registers are
  // scarce.
  static __device__ __forceinline__ void multiply_qk(float (&s)[kMt][2 * kKeyBlocks][4],
                                                     uint32_t q_rows, const QWalk& q_walk,
                                                     uint32_t slot, const KFragments& k) {
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int nt = 0; nt < 2 * kKeyBlocks; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[mt][nt][i] = 0.0f;
      }
    }
#pragma unroll
    for (int step = 0; step < kQkDim / KFragments::kDims; ++step) {
      uint32_t a[KFragments::kBlocks][kMt][4];
#pragma unroll
      for (int i = 0; i < KFragments::kBlocks; ++i) {
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt) {
          ldmatrix_x4(a[i][mt], q_rows + q_walk.at(mt * 16, step * KFragments::kBlocks + i));
        }
      }
#pragma unroll
      for (int kb = 0; kb < kKeyBlocks; ++kb) {
        uint32_t b[KFragments::kBlocks][4];
        k.load_k(b, slot, kb * 16, step);
#pragma unroll
        for (int i = 0; i < KFragments::kBlocks; ++i) {
#pragma unroll
          for (int mt = 0; mt < kMt; ++mt) {
            mma_m16n8k16<T>(s[mt][2 * kb], a[i][mt], b[i][0], b[i][1]);
            mma_m16n8k16<T>(s[mt][2 * kb + 1], a[i][mt], b[i][2], b[i][3]);
          }
        }
      }
    }
  }

  // O += P V for the keys of one slot.
  static __device__ __forceinline__ void multiply_pv(float (&o)[kMt][2 * kVBlocks][4],
                                                     const uint32_t (&p)[kMt][kKeyBlocks][4],
                                                     uint32_t slot, const VFragments& v) {
#pragma unroll
    for (int kb = 0; kb < kKeyBlocks; ++kb) {
#pragma unroll
      for (int step = 0; step < kVDim / VFragments::kDims; ++step) {
        uint32_t b[VFragments::kBlocks][4];
        v.load_v(b, slot, kb * 16, step);
#pragma unroll
        for (int i = 0; i < VFragments::kBlocks; ++i) {
          const int db = step * VFragments::kBlocks + i;
#pragma unroll
          for (int mt = 0; mt < kMt; ++mt) {
            mma_m16n8k16<T>(o[mt][2 * db], p[mt][kb], b[i][0], b[i][1]);
            mma_m16n8k16<T>(o[mt][2 * db + 1], p[mt][kb], b[i][2], b[i][3]);
          }
        }
      }
    }
  }

  // Sets scores of keys outside of each row's window to -inf.
  template <typename Args>
  static __device__ __forceinline__ void apply_limits(float (&s)[kMt][2 * kKeyBlocks][4],
                                                      const Args& args, const PrefillWork& block,
                                                      int warp_row, int first_key) {
    const PackedRows rows = {args.group, block.work.row_end};
    const int first_row = block.work.first_row + warp_row;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int position = rows.position(first_row + mt * 16 + half * 8 + lane / 4);
        const KeyRange seen =
            keys_in_window(args.score, position, position, block.diagonal, block.kv_len);
        // The lane's first column relative to the window; below 0 it counts as very large.
        const unsigned column = first_key + lane % 4 * 2 - seen.first;
        const unsigned width = seen.end - seen.first;
#pragma unroll
        for (int nt = 0; nt < 2 * kKeyBlocks; ++nt) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (column + nt * 8 + i >= width) s[mt][nt][2 * half + i] = neg_inf();
          }
        }
      }
    }
  }

  // Sets scores of keys that lie in no page to -inf.
  static __device__ __forceinline__ void apply_missing(float (&s)[kMt][2 * kKeyBlocks][4],
                                                       const uint32_t* missing) {
    uint32_t any = 0;
#pragma unroll
    for (int word = 0; word < kKeys / 32; ++word) any |= missing[word];
    if (any == 0) return;
#pragma unroll
    for (int word = 0; word < kKeys / 32; ++word) {
      const uint32_t bits = missing[word] >> (threadIdx.x % 4 * 2);
#pragma unroll
      for (int nt = 0; nt < 4; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if ((bits >> (nt * 8 + i % 2) & 1u) == 0) continue;
#pragma unroll
          for (int mt = 0; mt < kMt; ++mt) s[mt][word * 4 + nt][i] = neg_inf();
        }
      }
    }
  }

  // A tile of the mask, as bits. A lane reads one row of the warp (kWarpRows of 16: two lanes a
  // row) and hands its words to the lanes that hold the scores.
  static constexpr int kMaskWords = kKeys / 32;  // per row
  static constexpr int kMaskRowLanes = 32 / kWarpRows;
  static constexpr int kMaskTurns = kMaskWords / kMaskRowLanes > 0 ? kMaskWords / kMaskRowLanes : 1;

  // The packed row whose mask this lane reads. Rows that do not exist take the last one's: nothing
  // of them is stored.
  static __device__ __forceinline__ int lane_mask_row(const QWork& work, int warp_row) {
    return min(work.first_row + warp_row + static_cast<int>(threadIdx.x) % kWarpRows,
               work.row_end - 1);
  }

  static __device__ __forceinline__ void load_mask(uint32_t (&words)[kMaskTurns],
                                                   const MaskView& mask, const Shared& shared,
                                                   int group, int warp_row, int first_key) {
    const int position = shared.mask_positions[threadIdx.x];
    const int head = lane_mask_row(shared.block.work, warp_row) - position * group;
    const uint8_t* row = shared.block.mask + head * mask.head_stride + position * mask.q_stride;
    // Rows that the mask does not have allow nothing.
    const int end = position < mask.rows ? shared.block.mask_end : 0;
    const int first_word = threadIdx.x % 32 / kWarpRows % kMaskWords;
#pragma unroll
    for (int turn = 0; turn < kMaskTurns; ++turn) {
      words[turn] = mask_bits_32(row, first_key + (first_word + turn * kMaskRowLanes) * 32, end);
    }
  }

  // Sets scores where the mask is false to -inf.
  static __device__ __forceinline__ void apply_mask(float (&s)[kMt][2 * kKeyBlocks][4],
                                                    const uint32_t (&words)[kMaskTurns]) {
    const int lane = threadIdx.x % 32;
    uint32_t all = words[0];
#pragma unroll
    for (int turn = 1; turn < kMaskTurns; ++turn) all &= words[turn];
    if (__all_sync(0xffffffffu, all == 0xffffffffu)) return;
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int word = 0; word < kMaskWords; ++word) {
          const int source = word % kMaskRowLanes * kWarpRows + mt * 16 + half * 8 + lane / 4;
          const uint32_t bits =
              __shfl_sync(0xffffffffu, words[word / kMaskRowLanes], source) >> (lane % 4 * 2);
#pragma unroll
          for (int nt = 0; nt < 4; ++nt) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if ((bits >> (nt * 8 + i) & 1u) == 0) {
                s[mt][word * 4 + nt][2 * half + i] = neg_inf();
              }
            }
          }
        }
      }
    }
  }

  // Hands the lane's outputs on: 4 neighbouring columns, or twice 2 of them, at a time.
  template <typename Put>
  static __device__ __forceinline__ void for_each_output(const float (&o)[2 * kVBlocks][4],
                                                         int half, Put put) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int db = 0; db < kVBlocks; ++db) {
      const float* first = o[2 * db] + 2 * half;
      const float* second = o[2 * db + 1] + 2 * half;
      if constexpr (VFragments::kIsFp8) {
        // The n blocks hold the even and the odd dims.
        const int at = db * 16 + VFragments::v_dim(0, column);
        put(at, first[0], second[0]);
        put(at + 2, first[1], second[1]);
      } else {
        put(db * 16 + column, first[0], first[1]);
        put(db * 16 + 8 + column, second[0], second[1]);
      }
    }
  }

  // Leaves the block's rows as a partial result.
  template <typename Args>
  static __device__ __forceinline__ void store_partial(const Args& args, const QWork& work,
                                                       int warp_row, int slot,
                                                       const SoftmaxRows<kMt>& softmax,
                                                       const float (&o)[kMt][2 * kVBlocks][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = warp_row + mt * 16 + half * 8 + lane / 4;
        if (work.first_row + r >= work.row_end) continue;
        const int64_t at = static_cast<int64_t>(slot) * args.slot_rows + r;
        float* out = args.workspace.out + at * kVDim;
        for_each_output(o[mt], half, [&](int column, float low, float high) {
          *reinterpret_cast<float2*>(out + column) = make_float2(low, high);
        });
        if (lane % 4 == 0) {
          *reinterpret_cast<float2*>(args.workspace.max_sum + at * 2) =
              make_float2(softmax.max[mt][half], softmax.sum[mt][half]);
        }
      }
    }
  }

  // Normalises the block's rows and stores them, by way of `smem`.
  template <typename Args>
  static __device__ __forceinline__ void store(uint8_t* smem, const Args& args, const QWork& work,
                                               int warp_row, const SoftmaxRows<kMt>& softmax,
                                               const float (&o)[kMt][2 * kVBlocks][4],
                                               float scale) {
    using OutRows = TileRows<kVDim * 2>;
    constexpr int kChunks = kVDim / 8;
    const int lane = threadIdx.x % 32;
    const int first_row = work.first_row + warp_row;
    const int first_head = work.kv_head * args.group;
    const PackedRows rows = {args.group, work.row_end};
    const float v_scale = value_scale(args.score);
    uint8_t* staged = smem + warp_row * OutRows::kStride;
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = mt * 16 + half * 8 + lane / 4;
        const int row = min(first_row + r, rows.end - 1);
        const int position = rows.position(row);
        const int head = first_head + rows.head(row, position);
        const RowEnd end = end_of_row(softmax.max[mt][half], softmax.sum[mt][half], scale, v_scale,
                                      sink_of(args.score, head));
        if (args.lse != nullptr && lane % 4 == 0 && first_row + r < rows.end) {
          args.lse[(work.lse_row + position) * args.q_heads + head] = end.lse;
        }
        // A row without keys is 0 even if V holds NaN.
        const bool none = end.factor == 0.0f;
        for_each_output(o[mt], half, [&](int column, float low, float high) {
          *reinterpret_cast<uint32_t*>(staged + OutRows::offset(r, column / 8) + column % 8 * 2) =
              pack2<T>(none ? 0.0f : low * end.factor, none ? 0.0f : high * end.factor);
        });
      }
    }
    __syncwarp();
    T* out = static_cast<T*>(args.out) + work.out_offset + first_head * args.out_head_stride;
#pragma unroll 2
    for (int i = lane; i < kWarpRows * kChunks; i += 32) {
      const int r = i / kChunks;
      const int chunk = i % kChunks;
      const int row = first_row + r;
      if (row >= rows.end || chunk * 8 >= args.v_head_dim) continue;
      const int position = rows.position(row);
      T* target = out + position * args.out_seq_stride +
                  rows.head(row, position) * args.out_head_stride + chunk * 8;
      *reinterpret_cast<uint4*>(target) =
          *reinterpret_cast<const uint4*>(staged + OutRows::offset(r, chunk));
    }
  }
};

}  // namespace astrai::attention
