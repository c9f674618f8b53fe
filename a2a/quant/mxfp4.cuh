// quant/mxfp4: twin of mxfp4.py: packed e2m1 with one e8m0 scale per 32 elements.
#pragma once

#include "e2m1.cuh"
#include "e8m0.cuh"

struct Mxfp4 {
  static constexpr u32 BLOCK = 32, ELEMENT_BITS = 4, SCALE_BYTES = 1;

  u32 byte;
  float factor;

  __device__ __forceinline__ Mxfp4(u32 amax_bits, float) {
    byte = e8m0_scale_byte(amax_bits, 2, 0x400000);
    factor = e8m0_inverse_power(byte);
  }
  __device__ __forceinline__ u32 scale_bits() const { return byte; }
  __device__ __forceinline__ u32 encode(float x) const { return byte ? e2m1_encode(__fmul_rn(x, factor)) : 0; }
};
