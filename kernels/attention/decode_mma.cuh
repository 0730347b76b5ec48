// Decode attention (up to 16 query rows a kv head) on tensor cores, for sm_80 and newer: streams K
// and V once.
//
// The rows of an MMA are the packed rows of one (request, kv head): row r is query position r /
// group and head r % group. A worker, which is a block or on sm_90 a cluster of blocks, takes
// pieces of such pairs' keys (work_split.cuh). The warps of a worker share nothing while they
// stream: each takes every n-th slice of 16 keys, through two rings of its own (K slices and V
// slices), with its own softmax state and output, so the loop has no block barrier.
//
//   smem of one warp:  K ring [slots][16][qk dim] | V ring [v slots][16][v dim]
//
// As soon as a slice has been used, the copy of the slice as many turns ahead as the ring has slots
// goes into its place.
// At the end of a piece the warps' results are merged through the same memory, then those of the
// blocks of a cluster through distributed shared memory, then those of the pieces of a pair through
// global memory (decode_merge.cuh).
#pragma once

#include <cstdint>

#include "kernels/attention/decode_args.cuh"
#include "kernels/attention/decode_merge.cuh"
#include "kernels/attention/decode_work.cuh"
#include "kernels/attention/kv_append.cuh"
#include "kernels/attention/kv_fragments.cuh"
#include "kernels/attention/mask.cuh"
#include "kernels/attention/score.cuh"
#include "kernels/attention/softmax.cuh"
#include "kernels/common/cluster.cuh"
#include "kernels/common/cp_async.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/ldmatrix.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/smem.cuh"
#include "kernels/common/vec.cuh"

namespace astrai::attention {

// How a warp copies a slice: rows of kRowBytes, whole rows in each pass.
template <typename E, int kRowBytes>
struct SliceCopy {
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kFit = 32 / kChunks;
  static constexpr int kRowsPerPass = kFit >= 16  ? 16
                                      : kFit >= 8 ? 8
                                      : kFit >= 4 ? 4
                                      : kFit >= 2 ? 2
                                                  : 1;
  static constexpr int kLanes = kRowsPerPass * kChunks;  // that take part
  static constexpr int kElements = 16 / sizeof(E);       // of a chunk
  static_assert(kChunks <= 32, "a warp copies whole rows");

  static __device__ __forceinline__ int row() { return threadIdx.x % 32 / kChunks; }
  static __device__ __forceinline__ int column() { return threadIdx.x % 32 % kChunks * kElements; }

  // Starts the copy of 16 rows into a slot. Of those, `valid` exist (0 in lanes whose columns do
  // not), and with kPaged those of them whose page, held by lane r for row r, is not negative. The
  // others become zeros, so that a probability of 0 meets no NaN.
  template <bool kPaged, typename Walk>
  static __device__ __forceinline__ void start(uint32_t slot, int valid, int pages, Walk walk,
                                               uint64_t policy) {
    const int chunk = threadIdx.x % 32 % kChunks;
    constexpr int kPasses = DecodeTile::kSliceKeys / kRowsPerPass;
    // 16 addresses at a time are too many, and 8 where rows do not fill the warp's lanes.
    [[maybe_unused]] constexpr int kUnroll = kPasses > 8 || kLanes < 32 ? 4 : kPasses;
#pragma unroll kUnroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int r = row() + pass * kRowsPerPass;
      const int page = kPaged ? __shfl_sync(0xffffffffu, pages, r) : 0;
      const E* source = walk.next(page);
      if (kLanes == 32 || threadIdx.x % 32 < kLanes) {
        cp_async_16(slot + TileRows<kRowBytes>::offset(r, chunk), source,
                    r < valid && (!kPaged || page >= 0), policy);
      }
    }
  }
};

// What a block knows about the packed rows of the pair it works on.
struct DecodeRow {
  int first_key;  // keys first_key .. end_key - 1 are in the row's window
  int end_key;
  const uint8_t* mask;  // of key 0; null = no key is allowed (looked at only if there is a mask)
  int64_t out;          // elements to the row in out
  int64_t lse;          // index in lse
  int head;
};

template <typename T, int kQkDim, int kVDim, typename KvSource>
struct DecodeBlock {
  using E = typename KvSource::Element;
  static constexpr DecodeTile kTile = DecodeKernel<T, kQkDim, kVDim, KvSource>::kTile;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kSlots = kTile.slots;
  static constexpr int kVSlots = kTile.v_slots;
  static constexpr int kTurnKeys = kTile.keys();  // of all warps of the block
  static constexpr int kSliceKeys = DecodeTile::kSliceKeys;
  static constexpr int kKSliceBytes = kTile.k_slice_bytes();
  static constexpr int kVSliceBytes = kTile.v_slice_bytes();
  static constexpr int kWarpBytes = kTile.warp_bytes();
  static constexpr int kSmemBytes = kTile.smem_bytes();
  static constexpr int kQkBlocks = kQkDim / 16;
  static constexpr int kVBlocks = kVDim / 16;
  // Blocks of 16 dims of Q that stay in registers; those of the largest head dims do not all fit
  // beside the output, and the rest is read from shared memory in each turn.
  static constexpr int kHeldBlocks = kVBlocks <= 8 ? kQkBlocks : kVBlocks <= 12 ? 10 : 3;
  static constexpr int kRestBlocks = kQkBlocks - kHeldBlocks;
  using KCopy = SliceCopy<E, kQkDim* int{sizeof(E)}>;
  using VCopy = SliceCopy<E, kVDim* int{sizeof(E)}>;
  using KFragments = KvFragments<T, E, kQkDim* int{sizeof(E)}>;
  using VFragments = KvFragments<T, E, kVDim* int{sizeof(E)}>;

  // The A operand of the first product: rows 0 .. rows - 1 of the pair, zeros below and beyond
  // head_dim.
  static __device__ __forceinline__ void load_q(uint32_t (&a)[kQkBlocks][4],
                                                const DecodeArgs<KvSource>& args, const T* q,
                                                int rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = mma_a_coord(lane, half, 0).row;
      const int position = row / args.group;
      const T* source =
          q + position * args.q.seq_stride + (row - position * args.group) * args.q.head_stride;
#pragma unroll
      for (int reg = half; reg < 4; reg += 2) {
        const int column = KFragments::k_dim(mma_a_coord(lane, reg, 0).col);
#pragma unroll
        for (int db = 0; db < kQkBlocks; ++db) {
          a[db][reg] = 0;
          if (row < rows && db * 16 + column < args.head_dim) {
            a[db][reg] = *reinterpret_cast<const uint32_t*>(source + db * 16 + column);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void negate(uint32_t (&a)[kQkBlocks][4]) {
#pragma unroll
    for (int db = 0; db < kQkBlocks; ++db) {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) a[db][reg] ^= 0x80008000u;
    }
  }

  // Sets scores to -inf where the row may not see the key: outside its window, in no page (bit j of
  // `present`: key first_key + j has one), or not allowed by the mask.
  static __device__ __forceinline__ void apply_limits(float (&s)[2][4], const DecodeRow* rows,
                                                      int first_key, uint32_t present,
                                                      const MaskView& mask) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const DecodeRow& row = rows[mma_c_coord(lane, 2 * half).row];
#pragma unroll
      for (int nt = 0; nt < 2; ++nt) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int j = nt * 8 + mma_c_coord(lane, i).col;
          const int key = first_key + j;
          bool seen = key >= row.first_key && key < row.end_key && (present >> j & 1u) != 0;
          if (seen && mask.data != nullptr) {
            seen = row.mask != nullptr && key < mask.width && row.mask[key] != 0;
          }
          if (!seen) s[nt][2 * half + i] = neg_inf();
        }
      }
    }
  }

  // Fills the table of rows; called by the first kMmaRows threads.
  static __device__ __forceinline__ void describe_row(DecodeRow* row,
                                                      const DecodeArgs<KvSource>& args, int batch,
                                                      int kv_head, const DecodeRequest& request) {
    const int r = threadIdx.x;
    const int position = r / args.group;
    *row = {0, 0, nullptr, 0, 0, 0};
    if (r >= request.q_len * args.group) return;
    const KeyRange seen = keys_in_window(args.score, position, position,
                                         request.kv_len - request.q_len, request.kv_len);
    row->first_key = seen.first;
    row->end_key = seen.end;
    row->head = kv_head * args.group + r - position * args.group;
    if (args.score.mask.data != nullptr && position < args.score.mask.rows) {
      row->mask = mask_row(args.score.mask, batch, row->head, position);
    }
    row->out = args.queries.offset(batch, args.out_batch_stride, args.out_seq_stride) +
               position * args.out_seq_stride + row->head * args.out_head_stride;
    row->lse = (args.queries.token(batch) + position) * (args.kv_heads * args.group) + row->head;
  }
};

template <typename T, int kQkDim, int kVDim, typename KvSource>
__global__ __launch_bounds__(
    DecodeBlock<T, kQkDim, kVDim, KvSource>::kThreads,
    kDecodeBlocksPerSm) void decode_mma_kernel(const __grid_constant__ DecodeArgs<KvSource> args) {
  using Block = DecodeBlock<T, kQkDim, kVDim, KvSource>;
  using Merge = DecodeMerge<Block::kWarps, kVDim>;
  constexpr int kSliceKeys = Block::kSliceKeys;
  constexpr int kSlots = Block::kSlots;
  constexpr int kVSlots = Block::kVSlots;
  constexpr bool kPaged = KvSource::kPaged;
  static_assert(
      Merge::kSmemBytes <= Block::kSmemBytes && Merge::kPartialsSmemBytes <= Block::kSmemBytes,
      "rings take the merge");

  uint8_t* const smem = dynamic_smem;
  // Used one after the other, with a barrier between.
  union Tables {
    WorkIndex<Block::kThreads> index;                                   // to find the first piece
    uint4 q_rest[Block::kRestBlocks > 0 ? Block::kRestBlocks : 1][32];  // the same for all warps
    typename Merge::State state;
  };
  __shared__ Tables tables;
  __shared__ DecodeRow rows[kMmaRows];
  __shared__ DecodeWork<KvSource, Block::kThreads> work;
  __shared__ bool has_work;
  __shared__ int rank;  // of the block in its cluster; not in a register, which the loop needs
  __shared__ KeyRange in_all_windows;                  // keys that every row's window has
  __shared__ uint32_t present[Block::kWarps][kSlots];  // bit per key of the slices in flight
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int cluster = args.cluster_blocks;

  const uint32_t k_ring = shared_address(smem) + warp * Block::kWarpBytes;
  const uint32_t v_ring = k_ring + kSlots * Block::kKSliceBytes;
  const typename Block::KFragments k_fragments(lane);
  const typename Block::VFragments v_fragments(lane);
  const uint64_t policy = evict_first_policy();
  const ScoreRule rule(args.score);
  // Keys that the worker takes in one turn of all its warps.
  const int turn_keys = cluster * Block::kTurnKeys;

  let_next_kernel_start();
  // What the first piece is can be found out while the kernel before still runs, if that takes no
  // look at memory.
  const bool work_is_known = args.pieces_each > 0 && args.equal_lengths;
  if (!work_is_known) wait_for_previous_kernel();
  if (threadIdx.x == 0) rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  DecodeWork<KvSource, Block::kThreads>::begin(&work, args, &tables.index,
                                               static_cast<int>(blockIdx.x) / cluster);
  while (true) {
    // Also the barrier after which the rings and the table of rows may be filled again.
    __syncthreads();
    if (threadIdx.x == 0) has_work = work.next(args);
    __syncthreads();
    if (work_is_known) wait_for_previous_kernel();
    if (!has_work) break;
    const Piece& piece = work.piece;
    const DecodeRequest& request = work.request;
    // Read again where it is needed: the loop over the keys has no register for it.
    const auto pair_rows = [&] { return work.request.q_len * args.group; };
    const auto kv_rows = args.kv.rows(piece.batch, piece.kv_head);
    const int begin = work.first_key();
    const int end = work.end_key();

    uint32_t q[Block::kQkBlocks][4];
    const auto load_q = [&] {
      Block::load_q(q, args,
                    static_cast<const T*>(args.q.data) +
                        args.queries.offset(piece.batch, args.q.batch_stride, args.q.seq_stride) +
                        piece.kv_head * args.group * args.q.head_stride,
                    pair_rows());
    };
    // Before the copies, in whose queue the rows would wait, and looked at only after them; unless
    // there are too many of them for the registers that the copies need.
    if (Block::kRestBlocks == 0) load_q();

    if constexpr (kPaged) {
      if (args.append.k.data != nullptr) {
        append_tokens<T, 8, KvSource>(
            args.append, args.queries, kv_rows, piece.batch, piece.kv_head, request.q_len,
            request.kv_len, args.head_dim, args.v_head_dim, begin, end,
            [&](int key) { return (key - begin) / Block::kTurnKeys % cluster == rank; });
        // What the block has stored its own copies read: both go through the L2 cache.
        __syncthreads();
      }
    }

    // ---- Stream: of the piece's slices the warp takes every (cluster * warps)-th. A slice is
    // known by the number of keys from its first one to the end of the piece; 0 or less: there is
    // none ----
    int left = end - begin - (rank * Block::kWarps + warp) * kSliceKeys;
    const bool k_column = Block::KCopy::column() < args.head_dim;
    const bool v_column = Block::VCopy::column() < args.v_head_dim;
    // Table entries of a slice, one a lane; -1 where there is no key.
    const auto load_pages = [&](int keys_left) {
      if constexpr (kPaged) {
        return lane < min(keys_left, kSliceKeys) ? kv_rows.page(end - keys_left + lane) : -1;
      } else {
        return 0;
      }
    };
    const auto copy_k = [&](int slot, int keys_left, int pages) {
      if (keys_left > 0) {
        Block::KCopy::template start<kPaged>(
            k_ring + slot * Block::kKSliceBytes, k_column ? keys_left : 0, pages,
            kv_rows.walk_k(end - keys_left + Block::KCopy::row(), Block::KCopy::kRowsPerPass,
                           Block::KCopy::column()),
            policy);
        if constexpr (kPaged) {
          const uint32_t bits = __ballot_sync(0xffffffffu, pages >= 0);
          if (lane == 0) present[warp][slot] = bits;
        }
      }
      cp_async_commit();
    };
    const auto copy_v = [&](int slot, int keys_left, int pages) {
      if (keys_left > 0) {
        Block::VCopy::template start<kPaged>(
            v_ring + slot * Block::kVSliceBytes, v_column ? keys_left : 0, pages,
            kv_rows.walk_v(end - keys_left + Block::VCopy::row(), Block::VCopy::kRowsPerPass,
                           Block::VCopy::column()),
            policy);
      }
      cp_async_commit();
    };
    int next_pages;    // of the K slice after those in flight
    int next_v_pages;  // of the V slice after those in flight, if that is another one
    {
      int pages[kSlots];
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) pages[slot] = load_pages(left - slot * turn_keys);
      next_pages = load_pages(left - kSlots * turn_keys);
      next_v_pages = pages[kSlots - 1];
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        copy_k(slot, left - slot * turn_keys, pages[slot]);
        // As in the loop: V slices are copied kVSlots turns ahead.
        const int v = slot - (kSlots - kVSlots);
        if (v < 0) {
          cp_async_commit();
        } else {
          copy_v(v, left - v * turn_keys, pages[v]);
        }
      }
    }

    if (threadIdx.x < kMmaRows) {
      Block::describe_row(&rows[threadIdx.x], args, piece.batch, piece.kv_head, request);
    }
    if (Block::kRestBlocks > 0) load_q();
    if (args.score.negate_q) Block::negate(q);
    if constexpr (Block::kRestBlocks > 0) {
      if (warp == 0) {
#pragma unroll
        for (int db = Block::kHeldBlocks; db < Block::kQkBlocks; ++db) {
          tables.q_rest[db - Block::kHeldBlocks][lane] =
              make_uint4(q[db][0], q[db][1], q[db][2], q[db][3]);
        }
      }
    }
    if (threadIdx.x == 0) {
      // The window's left edge and its right one move with the position.
      const int last = request.q_len - 1;
      const int diagonal = request.kv_len - request.q_len;
      in_all_windows.first = keys_in_window(args.score, last, last, diagonal, request.kv_len).first;
      in_all_windows.end = keys_in_window(args.score, 0, 0, diagonal, request.kv_len).end;
    }
    __syncthreads();  // the tables are filled
    const bool masked = args.score.mask.data != nullptr;

    SoftmaxRows<1> softmax;
    float o[1][2 * Block::kVBlocks][4] = {};
    int slot = 0;
    int v_slot = 0;
    for (; left > 0; left -= turn_keys) {
      // Each turn starts a group for K and then one for V; so many are younger than the slice.
      cp_async_wait<2 * kSlots - 1>();
      __syncwarp();
      const uint32_t k_slot = k_ring + slot * Block::kKSliceBytes;
      float s[1][2][4] = {};
#pragma unroll
      for (int step = 0; step < kQkDim / Block::KFragments::kDims; ++step) {
        uint32_t b[Block::KFragments::kBlocks][4];
        k_fragments.load_k(b, k_slot, 0, step);
#pragma unroll
        for (int i = 0; i < Block::KFragments::kBlocks; ++i) {
          const int db = step * Block::KFragments::kBlocks + i;
          uint32_t rest[4];
          if (db >= Block::kHeldBlocks) {
            const uint4 a = tables.q_rest[db - Block::kHeldBlocks][lane];
            rest[0] = a.x, rest[1] = a.y, rest[2] = a.z, rest[3] = a.w;
          }
          const uint32_t (&a)[4] = db < Block::kHeldBlocks ? q[db] : rest;
          mma_m16n8k16<T>(s[0][0], a, b[i][0], b[i][1]);
          mma_m16n8k16<T>(s[0][1], a, b[i][2], b[i][3]);
        }
      }
      const uint32_t bits = kPaged ? present[warp][slot] : 0xffffu;
      const int pages = next_pages;
      __syncwarp();
      copy_k(slot, left - kSlots * turn_keys, pages);
      next_pages = load_pages(left - (kSlots + 1) * turn_keys);

      rule.apply_softcap(s);
      const int key = end - left;
      if (key < in_all_windows.first || key + kSliceKeys > in_all_windows.end || masked ||
          bits != 0xffffu) {
        Block::apply_limits(s[0], rows, key, bits, args.score.mask);
      }
      float factor[1][2];
      const bool changed = softmax.update(s, rule.scale, factor);
      rescale(o, factor, changed);
      const uint32_t p[4] = {pack2<T>(s[0][0][0], s[0][0][1]), pack2<T>(s[0][0][2], s[0][0][3]),
                             pack2<T>(s[0][1][0], s[0][1][1]), pack2<T>(s[0][1][2], s[0][1][3])};

      cp_async_wait<2 * kVSlots - 1>();
      __syncwarp();
      const uint32_t v_tile = v_ring + v_slot * Block::kVSliceBytes;
#pragma unroll
      for (int step = 0; step < kVDim / Block::VFragments::kDims; ++step) {
        uint32_t b[Block::VFragments::kBlocks][4];
        v_fragments.load_v(b, v_tile, 0, step);
#pragma unroll
        for (int i = 0; i < Block::VFragments::kBlocks; ++i) {
          const int db = step * Block::VFragments::kBlocks + i;
          mma_m16n8k16<T>(o[0][2 * db], p, b[i][0], b[i][1]);
          mma_m16n8k16<T>(o[0][2 * db + 1], p, b[i][2], b[i][3]);
        }
      }
      __syncwarp();
      copy_v(v_slot, left - kVSlots * turn_keys, kVSlots == kSlots ? pages : next_v_pages);
      next_v_pages = pages;
      slot = slot + 1 == kSlots ? 0 : slot + 1;
      v_slot = v_slot + 1 == kVSlots ? 0 : v_slot + 1;
    }
    softmax.finish();

    // ---- The rings become the merge area: the groups still in flight are empty ----
    __syncthreads();
    Merge::template put_warp<typename Block::VFragments>(smem, tables.state, o[0], softmax,
                                                         pair_rows());
    const auto store_final = [&](int row, int column, float max, float sum, float4 value) {
      if (column >= args.v_head_dim) return;
      const DecodeRow& at = rows[row];
      const RowEnd result =
          end_of_row(max, sum, rule.scale, value_scale(args.score), sink_of(args.score, at.head));
      // A row without keys is 0 even if V holds NaN.
      const bool none = result.factor == 0.0f;
      const float f = result.factor;
      *reinterpret_cast<uint2*>(static_cast<T*>(args.out) + at.out + column) =
          make_uint2(pack2<T>(none ? 0.0f : value.x * f, none ? 0.0f : value.y * f),
                     pack2<T>(none ? 0.0f : value.z * f, none ? 0.0f : value.w * f));
      if (args.lse != nullptr && column == 0) args.lse[at.lse] = result.lse;
    };
    const auto store = [&](int row, int column, float max, float sum, float4 value) {
      if (piece.group_size == 1) {
        store_final(row, column, max, sum, value);
      } else {
        Merge::put_partial(args.workspace, piece.own_slot, row, column, max, sum, value);
      }
    };
    __syncthreads();
    if (!has_clusters() || cluster == 1) {
      Merge::merge_warps(smem, tables.state, pair_rows(), rule.scale, store);
    } else {
      Merge::merge_cluster(smem, tables.state, pair_rows(), rule.scale, rank, cluster, store);
      // What the cluster's other blocks have stored is published as this block's own.
      if (piece.group_size > 1) cluster_sync();
    }
    if (piece.group_size > 1 && rank == 0) {
      const auto slot_of = [&piece](int i) { return piece.slot(i); };
      if (publish_and_check(args.workspace.flags, piece.own_slot, piece.group_size, slot_of)) {
        Merge::merge_partials(smem, tables.state, args.workspace, piece, pair_rows(), rule.scale,
                              store_final);
        clear_flags(args.workspace.flags, piece.group_size, slot_of);
      }
    }
  }
}

}  // namespace astrai::attention
