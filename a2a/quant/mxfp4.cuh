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

  // COUNT elements of the block as words of the wire.
  template <u32 COUNT>
  __device__ __forceinline__ void encode(const float* x, u32* words) const {
    e2m1_encode_scaled<COUNT>(x, factor, byte != 0, words);
  }
};
