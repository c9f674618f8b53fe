// quant/fp8_block: twin of fp8_block.py: e4m3 with one fp32 scale per 128 elements.
#pragma once

#include "e4m3.cuh"

struct Fp8Block {
  static constexpr u32 BLOCK = 128, ELEMENT_BITS = 8, SCALE_BYTES = 4;

  float scale, inverse;
  bool special, divides;

  // From the bits of the block's largest magnitude.
  __device__ __forceinline__ Fp8Block(u32 amax_bits, float) {
    special = amax_bits >= 0x7f800000;
    scale = special ? 1.0f : quotient(fmaxf(__uint_as_float(amax_bits), 1e-10f), 448.0f, 1.0f / 448.0f);
    inverse = __frcp_rn(scale);
    divides = (__float_as_uint(scale) & 0x7fffff) == 0x7fffff;
  }
  __device__ __forceinline__ u32 scale_bits() const { return __float_as_uint(scale); }

  // x / y as IEEE division has it. With the correctly rounded reciprocal, one correction step gives the correctly rounded
  // quotient unless the divisor's mantissa is all ones (Markstein, IBM J. Res. Dev. 34 (1990) 111); quotients small enough
  // for the step to lose bits are far below what e4m3 rounds to zero.
  static __device__ __forceinline__ float quotient(float x, float y, float inverse_of_y) {
    const float near = __fmul_rn(x, inverse_of_y);
    return __fmaf_rn(__fmaf_rn(-near, y, x), inverse_of_y, near);
  }
  __device__ __forceinline__ float quotient(float x) const { return quotient(x, scale, inverse); }

  // COUNT elements of the block as words of the wire.
  template <u32 COUNT>
  __device__ __forceinline__ void encode(const float* x, u32* words) const {
    if (special || divides) {
      encode_by_division<COUNT>(x, words);
      return;
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; i += 4)
      words[i / 4] = e4m3_encode_four(quotient(x[i]), quotient(x[i + 1]), quotient(x[i + 2]), quotient(x[i + 3]));
  }

  template <u32 COUNT>
  __device__ __forceinline__ void encode_by_division(const float* x, u32* words) const {
    const float by = special ? 1.0f : scale;
#pragma unroll
    for (u32 i = 0; i < COUNT; i += 4) {
      words[i / 4] = e4m3_encode_four(__fdiv_rn(x[i], by), __fdiv_rn(x[i + 1], by), __fdiv_rn(x[i + 2], by),
                                      __fdiv_rn(x[i + 3], by));
    }
  }
};
