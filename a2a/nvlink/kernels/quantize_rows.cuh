// nvlink/kernels/quantize_rows: rows that do not travel made into a format whose scales are of one byte.
//
// Owns where a scale lies in each layout (twin of a2a/quant/scale_layout.py), and which format it is, known at run time
// alone. Refuses to know the formats' arithmetic and who has made the rows. Neither rows nor what becomes of them need be
// aligned.
#pragma once

#include "quantize_groups.cuh"
#include "../../quant/mxfp4.cuh"
#include "../../quant/mxfp8.cuh"
#include "../../quant/nvfp4.cuh"

constexpr u32 CHUNK = 32 * GROUP;  // elements that a warp takes at a time

__device__ __forceinline__ u64 scale_at(const QuantizeParams& q, u32 row, u32 column) {
  const u64 tiles = (q.scale_columns + 3) / 4;
  if (q.scale_layout == 0) return u64(row) * q.scale_columns + column;
  if (q.scale_layout == 1) return (row / 128 * tiles + column / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
  return (row / 8 * tiles + column / 4) * 32 + row % 8 * 4 + column % 4;
}

// Elements [first, first + CHUNK) of a row by a warp, 16 a lane, as far as `end`, and the scales of the layout that belong
// to them: those of its padding are 0, in columns behind the row's as in rows behind the last.
template <typename Format>
__device__ __forceinline__ void quantize_chunk(const QuantizeParams& q, u32 row, u32 first, u32 end) {
  const u32 group = first / GROUP + threadIdx.x % 32, column = group / LANES_OF_BLOCK<Format>;
  const bool ours = group * GROUP < end;
  u32 scale = 0;
  if (row < q.num_rows) {
    float values[GROUP];
    u32 words[BYTES_OF_GROUP<Format> / 4];
    const InputRow input(q, q.rows, row);
    // All lanes of the warp: those past the end hold zeros and share their block with none that is not.
    const u32 from = ours ? group * GROUP : q.hidden_size;
    Group loaded;
    loaded.load(q, input, from);
    const u32 amax = loaded.values(q, input, from, values);
    const float global_scale = q.global_scale ? *reinterpret_cast<const float*>(q.global_scale) : 1.0f;
    scale = quantize_group<Format>(values, amax, global_scale, words);
    if (ours && group * GROUP < q.row_elements) {
      constexpr u32 BYTES = BYTES_OF_GROUP<Format>;
      u8* const to = reinterpret_cast<u8*>(q.data) + (u64(row) * (q.row_elements / GROUP) + group) * BYTES;
      if (common_alignment(reinterpret_cast<u64>(to)) >= BYTES) {
        store_group<Format>(to, words);
      } else {
#pragma unroll
        for (u32 i = 0; i < BYTES; ++i) to[i] = u8(words[i / 4] >> (i % 4 * 8));
      }
    }
  }
  if (ours && group % LANES_OF_BLOCK<Format> == 0 && column < q.layout_columns)
    reinterpret_cast<u8*>(q.scales)[scale_at(q, row, column)] = column < q.scale_columns ? u8(scale) : u8(0);
}

// A warp takes elements [begin, end) of a row of the layout; both lie on multiples of a block, or end at the row's, and
// all that pads the row and the layout's columns is then among them.
__device__ __noinline__ void quantize_part(const QuantizeParams& q, u32 row, u32 begin, u32 end) {
  const u32 block = q.row_elements / q.scale_columns;
  if (end >= q.hidden_size) end = q.layout_columns * block;
#pragma unroll 1
  for (u32 first = begin; first < end; first += CHUNK) {
    if (q.wire_format == WIRE_MXFP8) quantize_chunk<Mxfp8>(q, row, first, end);
    else if (q.wire_format == WIRE_NVFP4) quantize_chunk<Nvfp4>(q, row, first, end);
    else quantize_chunk<Mxfp4>(q, row, first, end);
  }
}

// The warps of a CTA take rows `first`, `first` + `step`, ... of the layout.
__device__ __forceinline__ void quantize_rows_of_cta(const QuantizeParams& q, u32 first, u32 step) {
#pragma unroll 1
  for (u32 row = first; row < q.layout_rows; row += step) {
#pragma unroll 1
    for (u32 begin = threadIdx.x / 32 * CHUNK; begin < q.hidden_size; begin += blockDim.x / 32 * CHUNK)
      quantize_part(q, row, begin, min(begin + CHUNK, q.hidden_size));
  }
}
