// quant/nvfp4: twin of nvfp4.py: packed e2m1 with one e4m3 scale per 16 elements and a scale of the whole tensor.
#pragma once

#include "e2m1.cuh"
#include "e4m3.cuh"

struct Nvfp4 {
  static constexpr u32 BLOCK = 16, ELEMENT_BITS = 4, SCALE_BYTES = 1;

  u32 byte;
  float factor;

  __device__ __forceinline__ Nvfp4(u32 amax_bits, float global_scale) {
    const float scale = __fdiv_rn(__fmul_rn(__uint_as_float(amax_bits), global_scale), 6.0f);
    byte = e4m3_encode(scale < 0.0f ? 0.0f : scale);
    factor = byte ? __fdiv_rn(global_scale, e4m3_decode(byte)) : 0.0f;
  }
  __device__ __forceinline__ u32 scale_bits() const { return byte; }

  // COUNT elements of the block as words of the wire.
  template <u32 COUNT>
  __device__ __forceinline__ void encode(const float* x, u32* words) const {
    e2m1_encode_scaled<COUNT>(x, factor, byte != 0, words);
  }
};
