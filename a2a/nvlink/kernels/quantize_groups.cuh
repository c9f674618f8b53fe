// nvlink/kernels/quantize_groups: 16 elements a lane, made into a wire format together with the lanes that share their block.
//
// Owns loading them and how lanes share a block's scale. Refuses to know the formats' arithmetic (a2a/quant/*.cuh, twins of
// the Python files beside them) and where data and scales go.
#pragma once

#include "rows.cuh"
#include "sums.cuh"

constexpr u32 GROUP = 16;  // elements of a lane

// Lanes that share a scale, and bytes of a lane's elements on the wire.
template <typename Format>
constexpr u32 LANES_OF_BLOCK = Format::BLOCK / GROUP;
template <typename Format>
constexpr u32 BYTES_OF_GROUP = GROUP * Format::ELEMENT_BITS / 8;

// A lane's 16 elements as they lie in memory. Loaded apart from their use, so that the loads of one group pass while
// another is being worked on.
struct Group {
  const u8* row;
  u32 first;
  bool whole;  // they are two aligned accesses
  Vec16 low, high;

  // Of row `number` of `rows`; their width and type are the launch's.
  template <typename Params>
  __device__ __forceinline__ void load(const Params& p, u64 rows, u32 number, u32 first_element) {
    const u32 size = size_of(p.input_type);
    row = reinterpret_cast<const u8*>(rows) + u64(number) * p.hidden_size * size;
    first = first_element;
    const u8* const from = row + u64(first) * size;
    whole = size == 2 && first + GROUP <= p.hidden_size && common_alignment(reinterpret_cast<u64>(from)) == 16;
    if (!whole) return;
    low = load16(from);
    high = load16(from + 16);
  }

  // As fp32, zero beyond the row.
  template <typename Params>
  __device__ __forceinline__ void values(const Params& p, float* values) const {
    if (whole) {
      const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      if (p.input_type == TYPE_BF16) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
          values[2 * i] = to_float<TYPE_BF16>(words[i] & 0xffff);
          values[2 * i + 1] = to_float<TYPE_BF16>(words[i] >> 16);
        }
      } else {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
          values[2 * i] = to_float<TYPE_FP16>(words[i] & 0xffff);
          values[2 * i + 1] = to_float<TYPE_FP16>(words[i] >> 16);
        }
      }
      return;
    }
#pragma unroll
    for (u32 i = 0; i < GROUP; ++i)
      values[i] = first + i < p.hidden_size ? load_element(row, first + i, p.input_type) : 0.0f;
  }
};

// Quantises the lane's 16 elements together with its neighbours of the block; all lanes of a warp call it. Returns the
// block's scale, and the wire bytes in words[0..BYTES_OF_GROUP/4).
template <typename Format>
__device__ __forceinline__ u32 quantize_group(const float* values, float global_scale, u32* words) {
  u32 amax = 0;
#pragma unroll
  for (u32 i = 0; i < GROUP; ++i) amax = max(amax, __float_as_uint(values[i]) & 0x7fffffff);
#pragma unroll
  for (u32 step = 1; step < LANES_OF_BLOCK<Format>; step *= 2)
    amax = max(amax, __shfl_xor_sync(ALL_LANES, amax, step));
  const Format format(amax, global_scale);
  format.template encode<GROUP>(values, words);
  return format.scale_bits();
}

// Writes them to a place on a multiple of their number of bytes.
template <typename Format>
__device__ __forceinline__ void store_group(u8* to, const u32* words) {
  constexpr u32 BYTES = BYTES_OF_GROUP<Format>;
  if (BYTES == 16) store16(to, {words[0], words[1], words[BYTES / 4 - 2], words[BYTES / 4 - 1]});
  else *reinterpret_cast<Vec8*>(to) = {words[0], words[1]};
}
