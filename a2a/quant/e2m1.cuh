// quant/e2m1: twin of e2m1.py: fp32 -> the 4-bit float, in integers, since few GPUs have the conversion.
#pragma once

// The nibble of one value: to nearest even, saturated at +-6, +6 for NaN, the sign of zero kept.
__device__ __forceinline__ u32 e2m1_encode(float value) {
  // NaN becomes 6 too.
  const float a = fminf(fabsf(value), 6.0f);
  // Codes are 1/2 apart up to 2, then half the power of two below them. A float 2^22 times that power has neighbours just
  // that far away, so that adding it rounds `a` to a code, ties to the even one, and counts steps in its last bits.
  const u32 power = max(__float_as_uint(a) & 0x7f800000u, 0x3f800000u), anchor = power + (22u << 23);
  const u32 steps = __float_as_uint(__fadd_rn(a, __uint_as_float(anchor))) - anchor;
  // Each doubling of the step skips two codes.
  const u32 code = steps + ((power - 0x3f800000u) >> 22), sign = __float_as_uint(value) >> 28 & 8;
  return value != value ? 7 : code | sign;
}

// Words of COUNT values times a factor, all zero where `kept` is not set.
template <u32 COUNT>
__device__ __forceinline__ void e2m1_encode_scaled(const float* x, float factor, bool kept, u32* words) {
  const u32 mask = kept ? 0xffffffffu : 0;
#pragma unroll
  for (u32 word = 0; word < COUNT / 8; ++word) {
    u32 nibbles = 0;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) nibbles |= e2m1_encode(__fmul_rn(x[word * 8 + i], factor)) << (4 * i);
    words[word] = nibbles & mask;
  }
}
