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
