// nvlink/kernels/combine_low_precision: rows that travel as e4m3 with one fp32 scale per 128 elements, added in fp32.
//
// Owns how such rows are made on their way into the combine area, and their elements: a wire row is `row_elements` bytes,
// padding to a multiple of 4, then its scales. Rows that were e4m3 from the start have no scales and count as they are.
// See a2a/config.py, low_precision_bytes_per_token.
#pragma once

#include "combine_ends.cuh"
#include "../../quant/fp8_block.cuh"

constexpr u32 LOW_PRECISION_BLOCK = 128;

// Four elements from `first` on as fp32, zero beyond the row.
__device__ __forceinline__ void load_four(const CombineParams& p, const u8* row, u32 first, float* values) {
  const u32 size = size_of(p.payload_type);
  const u8* const from = row + u64(first) * size;
  if (first + 4 <= p.row_elements && common_alignment(reinterpret_cast<u64>(from)) >= 4 * size) {
    const Vec16 v = size == 4 ? load16(from) : Vec16{};
    const u64 word = size == 2 ? load_word(from) : 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 bits = u32(word >> (16 * i)) & 0xffff;
      if (p.payload_type == TYPE_BF16) values[i] = to_float<TYPE_BF16>(bits);
      else if (p.payload_type == TYPE_FP16) values[i] = to_float<TYPE_FP16>(bits);
      else values[i] = __uint_as_float(i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w);
    }
    return;
  }
#pragma unroll
  for (u32 i = 0; i < 4; ++i)
    values[i] = first + i < p.row_elements ? load_element(row, first + i, p.payload_type) : 0.0f;
}

// Makes a segment of one payload row into a row of the wire in this rank's combine area, whoever's token it is: ours are
// rounded as the others' are. A warp takes 128 elements at a time, four a lane.
__device__ __forceinline__ void stage_e4m3_unit(const CombineParams& p, const Round& round, const ActiveRanks& active,
                                                u32 unit) {
  const u32 segment = unit % p.segments, row = unit / p.segments, lane = threadIdx.x % 32;
  const u32 src_rank = row / p.runtime_max_tokens_per_rank, within = row % p.runtime_max_tokens_per_rank;
  if (!active.has(src_rank) || !is_valid(p, round, src_rank, within)) return;
  const u32 blocks = (p.row_elements + LOW_PRECISION_BLOCK - 1) / LOW_PRECISION_BLOCK;
  const u32 part = (blocks + p.segments - 1) / p.segments;
  const u32 begin = min(blocks, segment * part), end = min(blocks, begin + part);
  const u8* const from = reinterpret_cast<const u8*>(p.payload) + u64(row) * p.row_elements * size_of(p.payload_type);
  u8* const to = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride + p.combine_offset) + u64(row) * p.row_pitch;
  u32* const scales = reinterpret_cast<u32*>(to + (p.row_elements + 3) / 4 * 4);
#pragma unroll 2
  for (u32 block = begin; block < end; ++block) {
    const u32 first = block * LOW_PRECISION_BLOCK + lane * 4;
    float values[4];
    load_four(p, from, first, values);
    u32 amax = 0, word;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) amax = max(amax, __float_as_uint(values[i]) & 0x7fffffff);
    const Fp8Block format(__reduce_max_sync(ALL_LANES, amax), 1.0f);
    format.encode<4>(values, &word);
    // The row is padded to whole words.
    if (first < p.row_elements) *reinterpret_cast<u32*>(to + first) = word;
    if (lane == 0) scales[block] = format.scale_bits();
  }
}

// Adds a segment of one token's rows, COUNT neighbouring elements per lane.
template <u32 COUNT>
__device__ __forceinline__ void sum_e4m3_unit(const CombineParams& p, const ActiveRanks& active, u32 unit, bool made_here) {
  const u32 token = unit / p.segments, segment = unit % p.segments, lane = threadIdx.x % 32;
  Holders holders;
  holders.load(p, token);
  const RankSet ranks = holders.set(active);
  u32 begin, end;
  segment_of(p.row_elements, segment, p.segments, begin, end);
  u8* const out = reinterpret_cast<u8*>(p.output) + u64(token) * p.row_elements * size_of(p.output_type);
#pragma unroll 1
  for (u32 at = begin; at < end; at += 32 * COUNT) {
    const u32 first = at + lane * COUNT;
    float sums[COUNT] = {};
    for_each_rank(ranks, [&](u32 rank) {
      const u32 slot = holders.slot_at(rank);
      // Our own rows never left the payload, unless they had to be made.
      const bool kept = rank == p.ep_rank && !made_here;
      const u64 area = kept ? p.payload : p.workspace + rank * p.stride + p.combine_offset;
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
  finish_segment(p, token, begin, end);
}
