// nvlink/kernels/quantize_rows: rows into a wire format outside an exchange, by the code that dispatch has for it.
//
// Owns where a scale lies in each layout (twin of a2a/quant/scale_layout.py). Refuses to know the formats' arithmetic. For
// formats with scales of one byte. Neither rows nor what becomes of them need be aligned.

#include "quantize.cuh"

__device__ __forceinline__ u64 scale_at(const QuantizeParams& p, u32 row, u32 column) {
  const u64 tiles = (p.scale_columns + 3) / 4;
  if (p.scale_layout == 0) return u64(row) * p.scale_columns + column;
  if (p.scale_layout == 1) return (row / 128 * tiles + column / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
  return (row / 8 * tiles + column / 4) * 32 + row % 8 * 4 + column % 4;
}

__device__ __forceinline__ void store_group(u8* to, const u32* words) {
  if (common_alignment(reinterpret_cast<u64>(to)) >= GROUP_BYTES) {
    if (GROUP_BYTES == 16) store16(to, {words[0], words[1], words[GROUP_BYTES / 4 - 2], words[GROUP_BYTES / 4 - 1]});
    else *reinterpret_cast<Vec8*>(to) = {words[0], words[1]};
    return;
  }
#pragma unroll
  for (u32 i = 0; i < GROUP_BYTES; ++i) to[i] = u8(words[i / 4] >> (i % 4 * 8));
}

// Each warp takes 512 elements of a row at a time, 16 a lane, and the scales that belong to them in the layout: those of
// its padding are 0, in columns behind the row's as in rows behind the last.
extern "C" __global__ void __launch_bounds__(256) quantize_rows(const __grid_constant__ QuantizeParams p) {
  const u32 lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
  const u32 groups = p.row_elements / GROUP, chunks = (p.layout_columns * BLOCK_LANES + 31) / 32;
  const float global_scale = p.global_scale ? *reinterpret_cast<const float*>(p.global_scale) : 1.0f;
  DispatchParams from;
  from.payload_rows[DATA_PAYLOAD] = p.rows;
  from.hidden_size = p.hidden_size;
  from.input_type = p.input_type;
  for (u64 unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; unit < u64(p.layout_rows) * chunks; unit += warps) {
    const u32 row = u32(unit / chunks), group = u32(unit % chunks) * 32 + lane, column = group / BLOCK_LANES;
    u32 scale = 0;
    if (row < p.num_rows) {
      float values[GROUP];
      u32 words[GROUP_BYTES / 4];
      Group loaded;
      loaded.load(from, row, group * GROUP);
      loaded.values(from, values);
      // All lanes of the warp: those past the row hold zeros and share their block with none that is not.
      scale = quantize_group(values, global_scale, words);
      if (group < groups) store_group(reinterpret_cast<u8*>(p.data) + (u64(row) * groups + group) * GROUP_BYTES, words);
    }
    if (group % BLOCK_LANES == 0 && column < p.layout_columns)
      reinterpret_cast<u8*>(p.scales)[scale_at(p, row, column)] = column < p.scale_columns ? u8(scale) : u8(0);
  }
}
