// nvlink/kernels/quantize_rows: rows into a wire format outside an exchange, by the code that dispatch and combine have.
//
// Owns who takes which part of which row.

#include "quantize_rows.cuh"

extern "C" __global__ void __launch_bounds__(256) quantize_rows(const __grid_constant__ QuantizeParams p) {
  const u32 warps = gridDim.x * (blockDim.x / 32), chunks = (p.hidden_size + CHUNK - 1) / CHUNK;
  for (u64 unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; unit < u64(p.layout_rows) * chunks; unit += warps) {
    const u32 begin = u32(unit % chunks) * CHUNK;
    quantize_part(p, u32(unit / chunks), begin, min(begin + CHUNK, p.hidden_size));
  }
}
