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

// Larger halves of two words.
__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
  u32 larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16;
#endif
}

// A row of the input; its width and type are the launch's.
struct InputRow {
  const u8* start;
  bool in_vectors;  // every group that it holds wholly is two aligned accesses

  // Row `number` of `rows`.
  template <typename Params>
  __device__ __forceinline__ InputRow(const Params& p, u64 rows, u32 number) {
    const u32 size = size_of(p.input_type);
    start = reinterpret_cast<const u8*>(rows) + u64(number) * p.hidden_size * size;
    in_vectors = size == 2 && common_alignment(reinterpret_cast<u64>(start)) == 16;
  }
};

// A lane's 16 elements from `first` of a row on, as they lie in memory. Loaded apart from their use, so that the loads of
// one group pass while another is being worked on.
struct Group {
  bool whole;  // they have been loaded
  Vec16 low, high;

  template <typename Params>
  __device__ __forceinline__ void load(const Params& p, const InputRow& row, u32 first) {
    whole = row.in_vectors && first + GROUP <= p.hidden_size;
    if (!whole) return;
    const u8* const from = row.start + u64(first) * 2;
    low = load16(from);
    high = load16(from + 16);
  }

  // As fp32, zero beyond the row. Returns the bits of the largest magnitude.
  template <typename Params>
  __device__ __forceinline__ u32 values(const Params& p, const InputRow& row, u32 first, float* values) const {
    u32 amax = 0;
    if (whole) {
      const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      // Magnitudes compare as integers, NaNs as the largest, in these types as in fp32.
#pragma unroll
      for (u32 i = 0; i < 8; ++i) amax = larger_halves(amax, words[i] & 0x7fff7fff);
      amax = max(amax & 0xffff, amax >> 16);
      if (p.input_type == TYPE_BF16) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
          values[2 * i] = to_float<TYPE_BF16>(words[i] & 0xffff);
          values[2 * i + 1] = to_float<TYPE_BF16>(words[i] >> 16);
        }
        return __float_as_uint(to_float<TYPE_BF16>(amax));
      }
#pragma unroll
      for (u32 i = 0; i < 8; ++i) {
        values[2 * i] = to_float<TYPE_FP16>(words[i] & 0xffff);
        values[2 * i + 1] = to_float<TYPE_FP16>(words[i] >> 16);
      }
      return __float_as_uint(to_float<TYPE_FP16>(amax));
    }
#pragma unroll
    for (u32 i = 0; i < GROUP; ++i) {
      values[i] = first + i < p.hidden_size ? load_element(row.start, first + i, p.input_type) : 0.0f;
      amax = max(amax, __float_as_uint(values[i]) & 0x7fffffff);
    }
    return amax;
  }
};

// Quantises the lane's 16 elements together with its neighbours of the block; all lanes of a warp call it. `amax`: bits of
// the lane's largest magnitude. Returns the block's scale, and the wire bytes in words[0..BYTES_OF_GROUP/4).
template <typename Format>
__device__ __forceinline__ u32 quantize_group(const float* values, u32 amax, float global_scale, u32* words) {
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
