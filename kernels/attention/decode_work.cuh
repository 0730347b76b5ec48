// What a worker of the decode kernel does next: the pieces of WorkSplit, or one numbered piece of
// one pair, from the lengths that stand in device memory when the kernel runs.
#pragma once

#include <cstdint>

#include "kernels/attention/decode_args.cuh"
#include "kernels/attention/score.cuh"
#include "kernels/attention/work_split.cuh"

namespace astrai::attention {

// Units of the requests, summed up so that a block finds the one that has a given unit: thread t
// stands for `each` requests from t * each on.
template <int kThreads>
struct WorkIndex {
  uint32_t start[kThreads + 1];  // units before the requests of thread t
  uint32_t warp_units[kThreads / 32];

  // Fills the index with the threads' own numbers of units.
  __device__ __forceinline__ void build(uint32_t own) {
    const int lane = threadIdx.x % 32;
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t below = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += below;
    }
    if (lane == 31) warp_units[threadIdx.x / 32] = sum;
    __syncthreads();
    for (int warp = 0; warp < static_cast<int>(threadIdx.x) / 32; ++warp) sum += warp_units[warp];
    start[threadIdx.x + 1] = sum;
    if (threadIdx.x == 0) start[0] = 0;
    __syncthreads();
  }

  // The thread whose requests have `unit`, which is below start[kThreads].
  __device__ __forceinline__ int find(uint32_t unit) const {
    int low = 0;  // start[low] <= unit < start[high]
    int high = kThreads;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (start[middle] <= unit) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// A block's way through its work. It stands in shared memory, as it would fill registers that the
// loop over the keys needs: begin() is called by all threads, next() by one.
template <typename KvSource, int kThreads>
struct DecodeWork {
  using Args = DecodeArgs<KvSource>;

  WorkWalk walk;
  int numbered;   // the worker's own number until its only piece is taken, then negative
  int unit_keys;  // of the piece
  // The piece at hand, and its request.
  Piece piece;
  DecodeRequest request;

  // Makes ready for next(); the caller's barrier must follow.
  static __device__ __forceinline__ void begin(DecodeWork* work, const Args& args,
                                               WorkIndex<kThreads>* index, int worker) {
    const WorkWalk walk = begin_walk(args, index, worker);
    if (threadIdx.x == 0) {
      work->walk = walk;
      work->numbered = worker;
      work->unit_keys = args.unit_keys;
    }
  }

  // Goes on to the next piece; false if there is none.
  __device__ __forceinline__ bool next(const Args& args) {
    if (args.pieces_each > 0) return next_numbered(args);
    if (!walk.next(&piece, [&](int b) { return request_of(args, b).units(args.unit_keys); })) {
      return false;
    }
    request = request_of(args, piece.batch);
    return true;
  }

  // Keys of the piece: first_key() .. end_key() - 1.
  __device__ __forceinline__ int first_key() const { return key_of(piece.first_unit); }
  __device__ __forceinline__ int end_key() const {
    return piece.end_unit == piece.pair_units ? request.seen.end : key_of(piece.end_unit);
  }

 private:
  __device__ __forceinline__ int key_of(uint32_t unit) const {
    return request.seen.first + static_cast<int>(unit) * unit_keys;
  }

  static __device__ __forceinline__ DecodeRequest request_of(const Args& args, int batch) {
    if (args.equal_lengths) return args.equal;
    return decode_request(args.score, args.queries.length(batch), args.kv.length(batch));
  }

  static __device__ __forceinline__ WorkWalk begin_walk(const Args& args,
                                                        WorkIndex<kThreads>* index, int worker) {
    if (args.pieces_each > 0) return {};
    uint32_t head_units;
    uint32_t equal = 0;  // units of every request
    int each = 1;
    if (args.equal_lengths) {
      equal = args.equal_units;
      head_units = equal * args.batch;
    } else {
      each = (args.batch - 1) / kThreads + 1;
      uint32_t own = 0;
      const int first = static_cast<int>(threadIdx.x) * each;
#pragma unroll 4
      for (int b = first; b < min(first + each, args.batch); ++b) {
        own += request_of(args, b).units(args.unit_keys);
      }
      index->build(own);
      head_units = index->start[kThreads];
    }
    WorkSplit split = {head_units * args.kv_heads, 1};
    if (split.units > 0) {
      split.workers = used_workers(split.units, args.workers, args.batch * args.kv_heads);
    }
    const auto find = [&](uint32_t unit) -> RequestStart {
      if (args.equal_lengths) {
        const int b = static_cast<int>(unit / equal);
        return {b, b * equal};
      }
      const int thread = index->find(unit);
      RequestStart at = {thread * each, index->start[thread]};
      uint32_t units = request_of(args, at.batch).units(args.unit_keys);
      while (at.unit + units <= unit) {
        at.unit += units;
        ++at.batch;
        units = request_of(args, at.batch).units(args.unit_keys);
      }
      return at;
    };
    return WorkWalk::begin(split, head_units, args.batch, worker, find);
  }

  // Worker = (pair, number of the piece). Of a deterministic launch, a pair's pieces follow from
  // its visible keys alone; else all pairs are cut alike. Either way without the search and most of
  // the divisions that WorkWalk takes.
  __device__ __forceinline__ bool next_numbered(const Args& args) {
    if (numbered < 0) return false;
    const int worker = numbered;
    numbered = -1;
    const int each = args.pieces_each;
    const int pair = each == 1 ? worker : worker / each;
    const int number = worker - pair * each;
    const int batch = pair / args.kv_heads;
    if (batch >= args.batch) return false;
    request = request_of(args, batch);
    uint32_t units, first, end;
    int pieces = each;
    if (args.deterministic) {
      pieces = fixed_splits(request.visible());
      if (request.q_len == 0 || number >= pieces) return false;
      unit_keys = fixed_split_keys(request.visible());
      units = pieces;
      first = number;
      end = number + 1;
    } else {
      units = args.equal_lengths ? args.equal_units : request.units(unit_keys);
      pieces = static_cast<int>(min(units, static_cast<uint32_t>(each)));
      if (number >= pieces) return false;
      const WorkSplit split = {units, static_cast<uint32_t>(pieces)};
      first = pieces == 1 ? 0 : split.first_unit(number);
      end = pieces == 1 ? units : split.first_unit(number + 1);
    }
    piece = {batch, pair - batch * args.kv_heads, first, end, units, worker, pair * each, 1,
             pieces};
    return true;
  }
};

}  // namespace astrai::attention
