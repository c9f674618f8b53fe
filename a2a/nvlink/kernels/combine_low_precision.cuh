// nvlink/kernels/combine_low_precision: rows that travel as e4m3 with one fp32 scale per 128 elements, added in fp32.
//
// Owns the elements of such rows: a wire row is `row_elements` bytes, padding to a multiple of 4, then its scales. Rows
// that were e4m3 from the start have no scales and count as they are. See a2a/config.py, low_precision_bytes_per_token.
#pragma once

#include "combine_ends.cuh"
#include "../../quant/e4m3.cuh"

constexpr u32 LOW_PRECISION_BLOCK = 128;

// Adds a segment of one token's rows, COUNT neighbouring elements per lane.
template <u32 COUNT>
__device__ __forceinline__ void sum_e4m3_unit(const CombineParams& p, u32 unit) {
  const u32 token = unit / p.segments, segment = unit % p.segments, lane = threadIdx.x % 32;
  Holders holders;
  holders.load(p, token);
  const RankSet ranks = holders.set();
  u32 begin, end;
  segment_of(p.row_elements, segment, p.segments, begin, end);
  u8* const out = reinterpret_cast<u8*>(p.output) + u64(token) * p.row_elements * size_of(p.output_type);
#pragma unroll 1
  for (u32 at = begin; at < end; at += 32 * COUNT) {
    const u32 first = at + lane * COUNT;
    float sums[COUNT] = {};
    for_each_rank(ranks, [&](u32 rank) {
      const u32 slot = holders.slot_at(rank);
      // Our own rows never left the payload.
      const u64 area = rank == p.ep_rank ? p.payload : p.workspace + rank * p.stride + p.combine_offset;
      const u8* const row = reinterpret_cast<const u8*>(area) +
                            (u64(p.ep_rank) * p.runtime_max_tokens_per_rank + slot) * p.row_pitch;
      if (first >= end) return true;
      const float* const scales = reinterpret_cast<const float*>(row + (p.row_elements + 3) / 4 * 4);
      const float scale = p.scaled ? scales[first / LOW_PRECISION_BLOCK] : 1.0f;
      const u32 bits = COUNT == 4 ? *reinterpret_cast<const u32*>(row + first) : row[first];
      // Value and sum are rounded apart, as the oracle's are: no fused multiply-add.
#pragma unroll
      for (u32 i = 0; i < COUNT; ++i)
        sums[i] = __fadd_rn(sums[i], __fmul_rn(e4m3_decode(bits >> 8 * i & 0xff), scale));
      return true;
    });
    if (first < end) store_sums<TYPE_BF16, COUNT>(out, first, p.row_elements, sums, p.output_type);
  }
}
