// quant/e8m0: twin of e8m0.py: the rule from a block's amax to the mx scale byte, and its inverse power of two.
#pragma once

// `mantissa` and `shift` describe the largest value of the element format, (1 + mantissa / 2^23) * 2^shift.
__device__ __forceinline__ u32 e8m0_scale_byte(u32 amax_bits, u32 shift, u32 mantissa) {
  if (amax_bits >= 0x7f800000) return 254;
  // The one value whose quotient rounds down across a power of two; see e8m0.py.
  if (amax_bits == (shift << 23 | mantissa) + 1) --amax_bits;
  const i32 byte = i32((amax_bits + (0x7fffff - mantissa)) >> 23) - i32(shift);
  return u32(max(byte, 0));
}

// 2^(127 - byte); 0 for 0, whose elements are 0 by rule.
__device__ __forceinline__ float e8m0_inverse_power(u32 byte) {
  return __uint_as_float(byte == 0 ? 0u : byte == 254 ? 0x400000u : (254 - byte) << 23);
}
