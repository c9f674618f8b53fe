// nvlink/kernels/quantize_rows: rows into a wire format outside an exchange, by the code that dispatch has for it.
//
// Owns where a scale lies in each layout (twin of a2a/quant/scale_layout.py). Refuses to know the formats' arithmetic. For
// formats with scales of one byte. Rows need not be aligned.

#include "quantize.cuh"

__device__ __forceinline__ u64 scale_at(const QuantizeParams& p, u32 row, u32 column) {
  const u64 tiles = (p.scale_columns + 3) / 4;
  if (p.scale_layout == 0) return u64(row) * p.scale_columns + column;
  if (p.scale_layout == 1) return (row / 128 * tiles + column / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
  return (row / 8 * tiles + column / 4) * 32 + row % 8 * 4 + column % 4;
}

// Each warp takes 512 elements of a row at a time, 16 a lane.
extern "C" __global__ void __launch_bounds__(256) quantize_rows(const __grid_constant__ QuantizeParams p) {
  const u32 lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
  const u32 groups = p.row_elements / GROUP, chunks = (groups + 31) / 32;
  DispatchParams from;
  from.payload_rows[DATA_PAYLOAD] = p.rows;
  from.hidden_size = p.hidden_size;
  from.input_type = p.input_type;
  for (u64 unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; unit < u64(p.num_rows) * chunks; unit += warps) {
    const u32 row = u32(unit / chunks), group = u32(unit % chunks) * 32 + lane;
    float values[GROUP];
    u32 words[GROUP_BYTES / 4];
    Group loaded;
    loaded.load(from, row, group * GROUP);
    loaded.values(from, values);
    // All lanes of the warp: those past the row hold zeros and share their block with none that is not.
    const u32 scale = quantize_group(values, 1.0f, words);
    if (group >= groups) continue;
    store16(reinterpret_cast<u8*>(p.data) + u64(row) * p.row_elements + group * GROUP, {words[0], words[1], words[2], words[3]});
    if (group % BLOCK_LANES == 0) reinterpret_cast<u8*>(p.scales)[scale_at(p, row, group / BLOCK_LANES)] = u8(scale);
  }
}
