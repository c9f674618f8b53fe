// quant/mxfp8: twin of mxfp8.py: e4m3 with one e8m0 scale per 32 elements.
#pragma once

#include "e4m3.cuh"
#include "e8m0.cuh"

struct Mxfp8 {
  static constexpr u32 BLOCK = 32, ELEMENT_BITS = 8, SCALE_BYTES = 1;

  u32 byte;
  float factor;

  __device__ __forceinline__ Mxfp8(u32 amax_bits, float) {
    byte = e8m0_scale_byte(amax_bits, 8, 0x600000);
    factor = e8m0_inverse_power(byte);
  }
  __device__ __forceinline__ u32 scale_bits() const { return byte; }

  // COUNT elements of the block as words of the wire.
  template <u32 COUNT>
  __device__ __forceinline__ void encode(const float* x, u32* words) const {
    // The product with 0 would keep a sign.
    const u32 kept = byte ? 0xffffffffu : 0;
#pragma unroll
    for (u32 i = 0; i < COUNT; i += 4) {
      words[i / 4] = kept & e4m3_encode_four(__fmul_rn(x[i], factor), __fmul_rn(x[i + 1], factor),
                                             __fmul_rn(x[i + 2], factor), __fmul_rn(x[i + 3], factor));
    }
  }
};
