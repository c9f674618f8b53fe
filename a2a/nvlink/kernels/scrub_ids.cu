// nvlink/kernels/scrub_ids: one value into every id of every padded slot of what a rank received.
//
// Owns where padding begins and how it is written. Refuses to know who counted. Waits for nobody.

struct alignas(16) Sixteen { u32 words[4]; };

__device__ __forceinline__ Sixteen repeated(i32 value) { return {{u32(value), u32(value), u32(value), u32(value)}}; }
__device__ __forceinline__ Sixteen repeated(i64 value) {
  const u32 low = u32(u64(value)), high = u32(u64(value) >> 32);
  return {{low, high, low, high}};
}

// Ids [begin, end) of a block that lies on a multiple of its elements' size: 16 bytes at a time, and one id at a time
// where 16 bytes of memory are not all the block's padding.
template <typename Id>
__device__ __forceinline__ void fill_ids(Id* block, i64 begin, i64 end, Id value) {
  constexpr i64 IDS = 16 / sizeof(Id);
  // Ids that share 16 bytes with the block's first and lie before it.
  const i64 before = i64(reinterpret_cast<u64>(block) % 16 / sizeof(Id));
  const i64 step = i64(gridDim.x) * blockDim.x * IDS, mine = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  for (i64 at = ((begin + before) / IDS + mine) * IDS - before; at < end; at += step) {
    if (at >= begin && at + IDS <= end) {
      *reinterpret_cast<Sixteen*>(block + at) = repeated(value);
      continue;
    }
    for (i64 id = at; id < at + IDS; ++id)
      if (id >= begin && id < end) block[id] = value;
  }
}

// Grid: CTAs that share a source's block, sources.
extern "C" __global__ void __launch_bounds__(256) scrub_ids(const __grid_constant__ ScrubParams p) {
  const i64 block_ids = i64(p.runtime_max_tokens_per_rank) * p.top_k;
  for (u32 source = blockIdx.y; source < p.ep_size; source += gridDim.y) {
    const i32 count = reinterpret_cast<const i32*>(p.recv_counts)[source];
    // A count may be anything where a round has failed.
    const i64 valid_ids = i64(count < 0 ? 0 : count) * p.top_k;
    const i64 begin = valid_ids < block_ids ? valid_ids : block_ids;
    if (p.id_bytes == 8)
      fill_ids(reinterpret_cast<i64*>(p.ids) + source * block_ids, begin, block_ids, i64(p.invalid_id));
    else
      fill_ids(reinterpret_cast<i32*>(p.ids) + source * block_ids, begin, block_ids, i32(u32(p.invalid_id)));
  }
}
