// quant/e2m1: twin of e2m1.py: fp32 -> the 4-bit float, in integers, since few GPUs have the conversion.
#pragma once

// The nibble of one value: to nearest even, saturated at +-6, +6 for NaN, the sign of zero kept.
__device__ __forceinline__ u32 e2m1_encode(float value) {
  if (value != value) return 7;
  const float a = fabsf(value);
  // Midpoints between codes; one that lies at an even code's upper side belongs to it.
  const u32 code = u32(a > 0.25f) + u32(a >= 0.75f) + u32(a > 1.25f) + u32(a >= 1.75f) + u32(a > 2.5f) + u32(a >= 3.5f) +
                   u32(a > 5.0f);
  return code | __float_as_uint(value) >> 31 << 3;
}

// Words of COUNT values times a factor, all zero where `kept` is not set.
template <u32 COUNT>
__device__ __forceinline__ void e2m1_encode_scaled(const float* x, float factor, bool kept, u32* words) {
#pragma unroll
  for (u32 word = 0; word < COUNT / 8; ++word) {
    words[word] = 0;
#pragma unroll
    for (u32 i = 0; i < 8; ++i)
      words[word] |= (kept ? e2m1_encode(__fmul_rn(x[word * 8 + i], factor)) : 0) << (4 * i);
  }
}
