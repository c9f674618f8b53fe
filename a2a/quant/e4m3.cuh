// quant/e4m3: twin of e4m3.py: fp32 -> e4m3 with the formats' saturation and NaN rule, and back.
#pragma once

// The byte of one value: to nearest even, +-448 beyond, 0x7F for every NaN.
__device__ __forceinline__ u32 e4m3_encode(float value) {
  if (value != value) return 0x7f;
#if __CUDA_ARCH__ >= 890
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  return pair & 0xff;
#else
  const u32 bits = __float_as_uint(value), sign = bits >> 31 << 7;
  const float magnitude = fminf(fabsf(value), 448.0f);
  // Below the smallest normal, 2^-6, codes count multiples of 2^-9; 8 of them are the first normal code.
  if (magnitude < 0.015625f) return sign | u32(__float2int_rn(magnitude * 512.0f));
  u32 normal = __float_as_uint(magnitude);
  normal += 0x7ffff + (normal >> 20 & 1);
  return sign | ((normal >> 20) - (120 << 3));
#endif
}

// Bytes of four values, the first in the lowest. The instruction takes two at a time and makes 0x7F of every NaN itself.
__device__ __forceinline__ u32 e4m3_encode_four(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return low | u32(high) << 16;
#else
  return e4m3_encode(a) | e4m3_encode(b) << 8 | e4m3_encode(c) << 16 | e4m3_encode(d) << 24;
#endif
}

__device__ __forceinline__ float e4m3_decode(u32 byte) {
  const u32 magnitude = byte & 0x7f;
  if (magnitude == 0x7f) return __uint_as_float(0x7fffffff);
  const float value = magnitude < 8 ? float(magnitude) * 0.001953125f : __uint_as_float((magnitude << 20) + (120u << 23));
  return byte & 0x80 ? -value : value;
}
