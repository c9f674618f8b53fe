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
    scale = special ? 1.0f : __fdiv_rn(fmaxf(__uint_as_float(amax_bits), 1e-10f), 448.0f);
    inverse = __frcp_rn(scale);
    divides = (__float_as_uint(scale) & 0x7fffff) == 0x7fffff;
  }
  __device__ __forceinline__ u32 scale_bits() const { return __float_as_uint(scale); }

  // x / scale as IEEE division has it. With the correctly rounded reciprocal, one correction step gives the correctly
  // rounded quotient unless the divisor's mantissa is all ones (Markstein, IBM J. Res. Dev. 34 (1990) 111); quotients
  // small enough for the step to lose bits are far below what e4m3 rounds to zero.
  __device__ __forceinline__ u32 encode(float x) const {
    if (special) return e4m3_encode(x);
    if (divides) return e4m3_encode(__fdiv_rn(x, scale));
    const float quotient = __fmul_rn(x, inverse);
    return e4m3_encode(__fmaf_rn(__fmaf_rn(-quotient, scale, x), inverse, quotient));
  }
};
