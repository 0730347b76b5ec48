// Row tiles of prefill whose keys are shared by several blocks: which tiles of keys each block
// takes, and how the last one merges their partial results (split_merge.cuh).
#pragma once

#include <cstdint>

#include "kernels/attention/prefill_args.cuh"
#include "kernels/attention/softmax.cuh"
#include "kernels/attention/split_merge.cuh"
#include "kernels/common/vec.cuh"

namespace astrai::attention {

template <typename T, int kVDim, int kRows, int kThreads>
struct PrefillMerge {
  static constexpr int kQuads = kVDim / 4;  // of columns, in a row
  // Shared memory: the softmax state of every part's rows, and how each row ends.
  static constexpr int kSmemBytes =
      kMostPrefillSplits * kRows * static_cast<int>(sizeof(float2)) + kRows * 4;

  // Merges the parts, in the order of their keys, as publish_and_check allows, and stores the rows'
  // results. The parts' slots follow each other from `first_slot` on.
  template <typename Args>
  static __device__ __forceinline__ void merge(uint8_t* smem, const Args& args, const QWork& work,
                                               int first_slot, int parts, float scale) {
    float2* states = reinterpret_cast<float2*>(smem);  // [parts][count]
    float* factors = reinterpret_cast<float*>(states + kMostPrefillSplits * kRows);
    const PackedRows rows = {args.group, work.row_end};
    const int count = work.row_end - work.first_row;
    const int first_head = work.kv_head * args.group;
    const int64_t first_slot_row = static_cast<int64_t>(first_slot) * args.slot_rows;
#pragma unroll 8
    for (int i = threadIdx.x; i < parts * count; i += kThreads) {
      const int part = i / count;
      const int64_t at = first_slot_row + part * args.slot_rows + (i - part * count);
      states[i] = __ldcg(reinterpret_cast<const float2*>(args.workspace.max_sum + at * 2));
    }
    __syncthreads();
    // The weights take the place of the maxima.
    if (static_cast<int>(threadIdx.x) < count) {
      float2* state = states + threadIdx.x;
      float max = neg_inf();
      for (int part = 0; part < parts; ++part) max = fmaxf(max, state[part * count].x);
      const float base = row_base(max, scale);
      float sum = 0.0f;
      for (int part = 0; part < parts; ++part) {
        float2& x = state[part * count];
        x.x = x.y == 0.0f ? 0.0f : exp2_of_part(x.x, max, scale, base);
        sum = fmaf(x.x, x.y, sum);
      }
      const int row = work.first_row + threadIdx.x;
      const int position = rows.position(row);
      const int head = first_head + rows.head(row, position);
      const RowEnd end =
          end_of_row(max, sum, scale, value_scale(args.score), sink_of(args.score, head));
      factors[threadIdx.x] = end.factor;
      if (args.lse != nullptr) {
        args.lse[(work.lse_row + position) * args.q_heads + head] = end.lse;
      }
    }
    __syncthreads();
    T* out = static_cast<T*>(args.out) + work.out_offset + first_head * args.out_head_stride;
    for (int i = threadIdx.x; i < count * kQuads; i += kThreads) {
      const int r = i / kQuads;
      const int column = i % kQuads * 4;
      if (column >= args.v_head_dim) continue;
      const float* part_out = args.workspace.out + (first_slot_row + r) * kVDim + column;
      float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
      // kBatch loads are in flight at a time. A part too many is read where the last one lies, with
      // a weight of 0, and a part without keys may hold anything.
      constexpr int kBatch = 8;
      for (int first = 0; first < parts; first += kBatch) {
        float4 x[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          x[i] = __ldcg(reinterpret_cast<const float4*>(
              part_out + static_cast<int64_t>(min(first + i, parts - 1)) * args.slot_rows * kVDim));
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const float weight = first + i < parts ? states[(first + i) * count + r].x : 0.0f;
          if (weight == 0.0f) continue;
          o.x = fmaf(weight, x[i].x, o.x);
          o.y = fmaf(weight, x[i].y, o.y);
          o.z = fmaf(weight, x[i].z, o.z);
          o.w = fmaf(weight, x[i].w, o.w);
        }
      }
      const float f = factors[r];
      if (f == 0.0f) o = {0.0f, 0.0f, 0.0f, 0.0f};
      const int position = rows.position(work.first_row + r);
      T* target = out + position * args.out_seq_stride +
                  rows.head(work.first_row + r, position) * args.out_head_stride + column;
      *reinterpret_cast<uint2*>(target) =
          make_uint2(pack2<T>(o.x * f, o.y * f), pack2<T>(o.z * f, o.w * f));
    }
  }

 private:
  // What a part counts in a sum whose largest maximum is `max`: in the order of
  // SoftmaxRows::update.
  static __device__ __forceinline__ float exp2_of_part(float part_max, float max, float scale,
                                                       float base) {
    if (fabsf(base) > kLargestSharedBase) return exp2_of_difference(part_max, max, scale);
    return exp2_approx(__fmul_rn(part_max, scale) - base);
  }
};

}  // namespace astrai::attention
