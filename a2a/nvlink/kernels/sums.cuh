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

// 8 bytes of sums, each rounded to TYPE.
template <u32 TYPE>
__device__ __forceinline__ Vec8 rounded(const float* sums) {
  if constexpr (TYPE == TYPE_FP32) {
    return {__float_as_uint(sums[0]), __float_as_uint(sums[1])};
  } else {
    return {from_float(sums[0], TYPE) | from_float(sums[1], TYPE) << 16,
            from_float(sums[2], TYPE) | from_float(sums[3], TYPE) << 16};
  }
}

// Element by element, where a row does not lie on its vectors or ends within one.
__device__ __noinline__ float load_element(const u8* row, u32 index, u32 type) {
  if (type == TYPE_FP32) return reinterpret_cast<const float*>(row)[index];
  const u32 bits = reinterpret_cast<const u16*>(row)[index];
  return type == TYPE_BF16 ? to_float<TYPE_BF16>(bits) : to_float<TYPE_FP16>(bits);
}

__device__ __noinline__ void store_element(u8* row, u32 element, u32 type, float value) {
  if (type == TYPE_FP32) reinterpret_cast<float*>(row)[element] = value;
  else reinterpret_cast<u16*>(row)[element] = u16(from_float(value, type));
}

// Writes COUNT sums as elements `first`.. of an output row; those at or past `row_elements` do not exist. Fast where the
// output is of the rows' own type TYPE and the sums make one aligned access of it, as they nearly always do.
template <u32 TYPE, u32 COUNT>
__device__ __forceinline__ void store_sums(u8* row, u32 first, u32 row_elements, const float* sums, u32 type) {
  constexpr u32 BYTES = COUNT * size_of(TYPE);
  u8* const to = row + u64(first) * size_of(type);
  if constexpr (BYTES >= 8) {
    if (type == TYPE && first + COUNT <= row_elements && common_alignment(reinterpret_cast<u64>(to)) >= BYTES) {
      const Vec8 low = rounded<TYPE>(sums), high = rounded<TYPE>(sums + COUNT - 8 / size_of(TYPE));
      if (BYTES == 16) store16(to, {low.x, low.y, high.x, high.y});
      else *reinterpret_cast<Vec8*>(to) = low;
      return;
    }
  }
#pragma unroll
  for (u32 i = 0; i < COUNT; ++i)
    if (first + i < row_elements) store_element(row, first + i, type, sums[i]);
}
