// nvlink/kernels/sums: rows of numbers added in fp32 and rounded once.
//
// Owns the conversion of bf16, fp16 and fp32 elements and their accumulation. Refuses to know where rows come from.
#pragma once

#include "rows.cuh"

constexpr u32 TYPE_BF16 = 0, TYPE_FP16 = 1, TYPE_FP32 = 2, TYPE_E4M3 = 3;

__host__ __device__ constexpr u32 size_of(u32 type) { return type == TYPE_FP32 ? 4 : type == TYPE_E4M3 ? 1 : 2; }

template <u32 TYPE>
__device__ __forceinline__ float to_float(u32 bits) {
  if (TYPE == TYPE_BF16) return __uint_as_float(bits << 16);
  if (TYPE == TYPE_FP16) {
    float value;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(bits));
    return value;
  }
  return __uint_as_float(bits);
}

// To nearest, ties to even.
__device__ __forceinline__ u32 from_float(float value, u32 type) {
  u32 bits = __float_as_uint(value);
  if (type == TYPE_BF16) {
    asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, %1; cvt.u32.u16 %0, h; }" : "=r"(bits) : "f"(value));
  } else if (type == TYPE_FP16) {
    asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h; }" : "=r"(bits) : "f"(value));
  }
  return bits;
}

// Elements that lie in one 4-byte word.
__host__ __device__ constexpr u32 per_word(u32 type) { return 4 / size_of(type); }

template <u32 TYPE>
__device__ __forceinline__ void add_word(float* sums, u32 word) {
  if (TYPE == TYPE_FP32) {
    sums[0] += __uint_as_float(word);
  } else {
    sums[0] += to_float<TYPE>(word & 0xffff);
    sums[1] += to_float<TYPE>(word >> 16);
  }
}

// Writes COUNT sums as elements `first`.. of an output row; those at or past `row_elements` do not exist.
template <u32 COUNT>
__device__ __forceinline__ void store_sums(u8* row, u32 first, u32 row_elements, const float* sums, u32 type) {
  u8* const to = row + u64(first) * size_of(type);
  const bool whole = first + COUNT <= row_elements;
  if (type == TYPE_FP32) {
    if (whole && COUNT % 4 == 0 && common_alignment(reinterpret_cast<u64>(to)) >= 16) {
#pragma unroll
      for (u32 i = 0; i + 3 < COUNT; i += 4)
        store16(to + 4 * i, {__float_as_uint(sums[i]), __float_as_uint(sums[i + 1]), __float_as_uint(sums[i + 2]),
                             __float_as_uint(sums[i + 3])});
    } else {
#pragma unroll
      for (u32 i = 0; i < COUNT; ++i)
        if (first + i < row_elements) reinterpret_cast<float*>(to)[i] = sums[i];
    }
    return;
  }
  if (whole && COUNT % 2 == 0 && common_alignment(reinterpret_cast<u64>(to)) >= 2 * COUNT) {
    u32 words[(COUNT + 1) / 2];
#pragma unroll
    for (u32 i = 0; i + 1 < COUNT; i += 2)
      words[i / 2] = from_float(sums[i], type) | from_float(sums[i + 1], type) << 16;
    if (COUNT == 8) store16(to, {words[0], words[1], words[2], words[COUNT / 2 - 1]});
    else if (COUNT == 4) *reinterpret_cast<Vec8*>(to) = {words[0], words[COUNT / 2 - 1]};
    else *reinterpret_cast<u32*>(to) = words[0];
  } else {
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i)
      if (first + i < row_elements) reinterpret_cast<u16*>(to)[i] = u16(from_float(sums[i], type));
  }
}
