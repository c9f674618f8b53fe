// nvlink/kernels/combine_output: what becomes of sums that have been written.
//
// Owns the last step of modules with the constant QUANTIZED_OUTPUT: the sums, rounded to their own type, are read again by
// those who wrote them and made into a format. In other modules they are the output, and nothing is left to do.
#pragma once

#ifdef QUANTIZED_OUTPUT
#include "quantize_rows.cuh"

constexpr bool QUANTIZES = true;

// By the warp that has written elements [begin, end) of a token's sums; a segment begins on a multiple of a block.
__device__ __forceinline__ void finish_segment(const CombineParams& p, u32 token, u32 begin, u32 end) {
  if (begin >= end) return;
  __syncwarp();
  quantize_part(p.quantized, token, begin, end);
}

// By a CTA that has written rows `first`, `first` + `step`, ... of the sums, all of each; rows behind the last are the
// layout's padding.
__device__ __forceinline__ void finish_rows(const CombineParams& p, u32 first, u32 step) {
  __syncthreads();
  quantize_rows_of_cta(p.quantized, first, step);
}

#else

constexpr bool QUANTIZES = false;

__device__ __forceinline__ void finish_segment(const CombineParams&, u32, u32, u32) {}
__device__ __forceinline__ void finish_rows(const CombineParams&, u32, u32) {}

#endif
