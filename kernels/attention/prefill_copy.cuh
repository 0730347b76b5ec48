// How a prefill block brings K and V tiles into shared memory: from rows at a fixed stride, or from
// the pages of a table.
//
// Tiles are copied in the order K0 V0 K1 V1 ..., each once, and a block barrier stands between two
// copies. Rows past the keys, and columns past the head dim, become zeros, so that a probability of
// 0 meets no NaN.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/attention/kv_source.cuh"
#include "kernels/attention/prefill_work.cuh"
#include "kernels/common/cp_async.cuh"
#include "kernels/common/ldmatrix.cuh"

namespace astrai::attention {

// A thread's share of a tile of `kTileRows` rows of kDim elements: one 16-byte chunk of every
// kRowsPerPass-th row.
template <typename E, int kDim, int kTileRows, int kThreads>
struct TileShare {
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(E));
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kElements = 16 / static_cast<int>(sizeof(E));  // of a chunk
  static constexpr int kFit = kThreads / kChunks;
  static constexpr int kRowsPerPass = kFit >= 32 ? 32 : kFit >= 16 ? 16 : kFit >= 8 ? 8 : 4;
  static constexpr int kPasses = kTileRows / kRowsPerPass;
  static_assert(kFit >= 4 && kTileRows % kRowsPerPass == 0, "whole passes");

  static __device__ __forceinline__ int row() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % kChunks; }
  static __device__ __forceinline__ int column() { return chunk() * kElements; }
  // Where the chunk count does not divide the threads, some have no share.
  static __device__ __forceinline__ bool takes_part() {
    return kThreads == kRowsPerPass * kChunks || row() < kRowsPerPass;
  }
  static __device__ __forceinline__ uint32_t offset(int pass) {
    return TileRows<kRowBytes>::offset(row() + pass * kRowsPerPass, chunk());
  }
};

// Keys first_key .. of one (request, kv head) at a fixed stride.
template <typename E, int kQkDim, int kVDim, int kKeys, int kThreads>
struct ContigCopy {
  using KShare = TileShare<E, kQkDim, kKeys, kThreads>;
  using VShare = TileShare<E, kVDim, kKeys, kThreads>;
  struct Shared {};

  StridedWalk<E> k_walk;
  StridedWalk<E> v_walk;
  int k_rows;  // rows from the thread's first one of tile 0 to the last key; none if its column is
  int v_rows;  // past the head dim

  template <typename Args>
  __device__ __forceinline__ ContigCopy(Shared*, const Args& args, const PrefillWork& block)
      : ContigCopy(args.kv.rows(block.work.batch, block.work.kv_head), block.tiles.first,
                   block.kv_len, args.head_dim, args.v_head_dim) {}

  __device__ __forceinline__ ContigCopy(const StridedRows<E>& rows, int first_tile, int kv_len,
                                        int head_dim, int v_head_dim)
      : k_walk(rows.walk_k(first_tile * kKeys + KShare::row(), KShare::kRowsPerPass,
                           KShare::column())),
        v_walk(rows.walk_v(first_tile * kKeys + VShare::row(), VShare::kRowsPerPass,
                           VShare::column())) {
    k_rows = (KShare::column() < head_dim ? kv_len : 0) - KShare::row();
    v_rows =
        kQkDim == kVDim ? k_rows : (VShare::column() < v_head_dim ? kv_len : 0) - VShare::row();
  }

  // The barrier between two copies that no step of the kernel stands between.
  static __device__ __forceinline__ void barrier() {}

  __device__ __forceinline__ void copy_k(uint32_t slot, int tile) {
    copy<KShare>(slot, k_walk, k_rows - tile * kKeys);
  }
  __device__ __forceinline__ void copy_v(uint32_t slot, int tile) {
    copy<VShare>(slot, v_walk, v_rows - tile * kKeys);
  }

 private:
  template <typename Share>
  static __device__ __forceinline__ void copy(uint32_t slot, StridedWalk<E>& walk, int rows) {
    if (!Share::takes_part()) return;
#pragma unroll
    for (int pass = 0; pass < Share::kPasses; ++pass) {
      cp_async_16(slot + Share::offset(pass), walk.next(0), pass * Share::kRowsPerPass < rows);
    }
  }
};

// Keys behind a page table. Each of the first kKeys threads looks one key of a tile up, once, and
// leaves the addresses of its rows in shared memory for those who copy; the table is read a tile
// ahead. One array for K and one for V will do: while K rows are copied, the addresses of the V
// rows that come next are filled in, and the other way round.
template <typename E, int kQkDim, int kVDim, int kKeys, int kThreads>
struct PagedCopy {
  using KShare = TileShare<E, kQkDim, kKeys, kThreads>;
  using VShare = TileShare<E, kVDim, kKeys, kThreads>;
  static_assert(kThreads >= kKeys && kKeys % 32 == 0, "a thread a key");
  static constexpr int kWords = kKeys / 32;
  struct Shared {
    PagedRows<E> rows;
    const E* k[kKeys];  // null: no such key
    const E* v[kKeys];
    // Bit j of a tile's words: its key j lies in no page. Tiles are copied up to two steps ahead of
    // the last one at work.
    uint32_t missing[4][kWords];
  };

  Shared* shared;
  int limit;  // keys from here on are not looked up
  int page;   // entry of this thread's key in the tile that is looked up next, and in the one after
  int page_after;
  bool k_column;
  bool v_column;

  template <typename Args>
  __device__ __forceinline__ PagedCopy(Shared* memory, const Args& args, const PrefillWork& block)
      : shared(memory),
        limit(min(block.kv_len, block.tiles.end * kKeys)),
        k_column(KShare::column() < args.head_dim),
        v_column(kQkDim == kVDim ? k_column : VShare::column() < args.v_head_dim) {
    if (threadIdx.x == 0) shared->rows = args.kv.rows(block.work.batch, block.work.kv_head);
    barrier();
    page = look_up(block.tiles.first);
    page_after = look_up(block.tiles.first + 1);
    find_k(block.tiles.first);
    barrier();
  }

  static __device__ __forceinline__ void barrier() { __syncthreads(); }

  __device__ __forceinline__ void copy_k(uint32_t slot, int tile) {
    copy<KShare>(slot, shared->k, k_column);
    if (threadIdx.x < kKeys) {
      const int key = key_of(tile);
      shared->v[threadIdx.x] =
          key < limit && page >= 0 ? shared->rows.walk_v(key, 1, 0).next(page) : nullptr;
    }
    page = page_after;
    page_after = look_up(tile + 2);
  }
  __device__ __forceinline__ void copy_v(uint32_t slot, int tile) {
    copy<VShare>(slot, shared->v, v_column);
    find_k(tile + 1);
  }

 private:
  static __device__ __forceinline__ int key_of(int tile) { return tile * kKeys + threadIdx.x; }

  __device__ __forceinline__ int look_up(int tile) const {
    const int key = key_of(tile);
    return threadIdx.x < kKeys && key < limit ? shared->rows.page(key) : 0;
  }

  __device__ __forceinline__ void find_k(int tile) const {
    if (threadIdx.x >= kKeys) return;  // whole warps
    const int key = key_of(tile);
    shared->k[threadIdx.x] =
        key < limit && page >= 0 ? shared->rows.walk_k(key, 1, 0).next(page) : nullptr;
    const uint32_t missing = __ballot_sync(0xffffffffu, page < 0);
    if (threadIdx.x % 32 == 0) shared->missing[tile % 4][threadIdx.x / 32] = missing;
  }

  template <typename Share>
  static __device__ __forceinline__ void copy(uint32_t slot, const E* const (&addresses)[kKeys],
                                              bool has_column) {
    if (!Share::takes_part()) return;
#pragma unroll
    for (int pass = 0; pass < Share::kPasses; ++pass) {
      const E* row = addresses[Share::row() + pass * Share::kRowsPerPass];
      cp_async_16(slot + Share::offset(pass), row + Share::column(), has_column && row != nullptr);
    }
  }
};

template <typename KvSource, int kQkDim, int kVDim, int kKeys, int kThreads>
using KvCopy =
    std::conditional_t<KvSource::kPaged,
                       PagedCopy<typename KvSource::Element, kQkDim, kVDim, kKeys, kThreads>,
                       ContigCopy<typename KvSource::Element, kQkDim, kVDim, kKeys, kThreads>>;

}  // namespace astrai::attention
