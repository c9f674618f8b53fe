// nvlink/kernels/combine_small: rows of few tokens pushed back, their round carried in every line.
//
// Owns the small regime's way back. Row 0 of the grid exchanges headers; the others push the rows that lie here to the
// ranks they came from, then add what arrives for their own tokens. All sends of a CTA precede all its waits.
#pragma once

#include "combine_ends.cuh"

__device__ __forceinline__ u64* combine_line(const CombineParams& p, u32 at_rank, u32 of_rank, u32 slot, u32 num_lines) {
  const u64 row = u64(of_rank) * p.landing_tokens + slot;
  return reinterpret_cast<u64*>(p.workspace + at_rank * p.stride + p.combine_landing_offset +
                                row * num_lines * LINE_BYTES);
}

// The two pieces of a payload row that part `part` of its lines carries.
__device__ __forceinline__ void load_part(const u8* row, u32 row_bytes, u32 part, u64& low, u64& high) {
  const u32 at = part / 8 * LINE_DATA_BYTES + part % 8 * 16;
  low = at < row_bytes ? load_piece(row, row_bytes, at) : 0;
  high = at + 8 < row_bytes && part % 8 != 7 ? load_piece(row, row_bytes, at + 8) : 0;
}

template <u32 TYPE>
__device__ __forceinline__ void combine_small(const CombineParams& p) {
  __shared__ u32 verdict;
  constexpr u32 COUNT = 2 * per_word(TYPE);  // elements of a piece
  if (threadIdx.x == 0) verdict = VERDICT_FINE;
  const u32 lane = threadIdx.x % 32, row_bytes = p.row_elements * size_of(TYPE), tokens = p.runtime_max_tokens_per_rank;
  const u32 num_lines = (row_bytes + LINE_DATA_BYTES - 1) / LINE_DATA_BYTES;
  const u32 num_ctas = gridDim.x * gridDim.y, cta = blockIdx.y * gridDim.x + blockIdx.x;
  const u32 first_part = blockIdx.x * blockDim.x + threadIdx.x, parts = gridDim.x * blockDim.x;
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  const u8* const payload = reinterpret_cast<const u8*>(p.payload);
  touch(p);
  __syncthreads();
  await_previous_kernel();
  next_kernel_may_come();

  // Everything that needs no round is read before the round is.
  const ActiveRanks active{mine + p.rank_mask_offset};
  const u32 next_rank = (p.ep_rank + 1) % EP_SIZE, first = blockIdx.y - 1;
  u64 low = 0, high = 0;
  RowValidity validity;
  Holders holders;
  if (blockIdx.y > 0) {
    if (EP_SIZE > 1 && first < tokens) {
      load_part(payload + (u64(next_rank) * tokens + first) * row_bytes, row_bytes, first_part, low, high);
      validity.load(p, next_rank, first);
    }
    if (first < p.num_tokens) holders.load(p, first);
  }
  u8* const state = mine + p.round_state_offset;
  bool failed;
  const Round round = begin_round(load_round(state), PHASE_COMBINE, state, p.host_words, &verdict, failed);
  if (failed) {
    void_combine(p, u64(cta) * blockDim.x + threadIdx.x, u64(num_ctas) * blockDim.x);
    return;
  }
  if (blockIdx.y == 0) {
    if (cta == 0 && threadIdx.x < 32) {
      send_headers(p, round, active, 0);
      u32 num_flags;
      for (u32 rank = lane; rank < EP_SIZE; rank += 32)
        if (active.has(rank)) check_header(p, round, rank, num_flags);
    }
  } else {
    for (u32 row = first; row < tokens; row += gridDim.y - 1) {
      for (u32 i = 1; i < EP_SIZE; ++i) {
        const u32 src_rank = (p.ep_rank + i) % EP_SIZE;
        if (!active.has(src_rank)) continue;
        const bool ahead = row == first && i == 1;
        if (!ahead) validity.load(p, src_rank, row);
        const bool valid = validity.of(round, row);
        const u8* const from = payload + (u64(src_rank) * tokens + row) * row_bytes;
        for (u32 part = first_part; part < num_lines * 8; part += parts) {
          if (!ahead || part != first_part) load_part(from, row_bytes, part, low, high);
          if (part % 8 == 7) high = u64(round.number) << 32;
          if (valid) store_line_part(combine_line(p, src_rank, p.ep_rank, row, num_lines) + u64(part) * 2, low, high);
        }
      }
    }
    bool fine = true;
    for (u32 token = first; fine && token < p.num_tokens; token += gridDim.y - 1) {
      if (token != first) holders.load(p, token);
      const i32 own_slot = holders.slot_at(p.ep_rank);
      const u8* const own = payload + (u64(p.ep_rank) * tokens + u32(max(own_slot, 0))) * row_bytes;
      for (u32 part = first_part; fine && part - lane < num_lines * 8; part += parts) {
        const bool inside = part < num_lines * 8;
        // Our own row is read while others' are on the wire, whatever its place in the sum.
        u64 own_low = 0, own_high = 0;
        if (inside && own_slot >= 0) load_part(own, row_bytes, part, own_low, own_high);
        float sums[2 * COUNT] = {};
        i32 rank = -1, slot = -1;
        while (fine && holders.next(rank, slot)) {
          low = own_low;
          high = own_high;
          if (u32(rank) != p.ep_rank) {
            const u64* const from = combine_line(p, p.ep_rank, u32(rank), u32(slot), num_lines) + u64(part) * 2;
            Patience patience;
            while (true) {
              if (inside) load_line_part(from, low, high);
              const u32 seen = u32(__shfl_sync(ALL_LANES, high, lane | 7) >> 32);
              if (__all_sync(ALL_LANES, !inside || seen == round.number)) break;
              if (__any_sync(ALL_LANES, give_up(round, patience, SIGNAL_ROW, u32(rank), seen))) {
                fine = false;
                break;
              }
            }
          }
          add_word<TYPE>(sums, u32(low));
          add_word<TYPE>(sums + COUNT / 2, u32(low >> 32));
          add_word<TYPE>(sums + COUNT, u32(high));
          add_word<TYPE>(sums + COUNT + COUNT / 2, u32(high >> 32));
        }
        if (!fine || !inside) continue;
        u8* const row = reinterpret_cast<u8*>(p.output) + u64(token) * p.row_elements * size_of(p.output_type);
        const u32 element = (part / 8 * LINE_DATA_BYTES + part % 8 * 16) / size_of(TYPE);
        if (element < p.row_elements) store_sums<COUNT>(row, element, p.row_elements, sums, p.output_type);
        if (part % 8 != 7 && element + COUNT < p.row_elements)
          store_sums<COUNT>(row, element + COUNT, p.row_elements, sums + COUNT, p.output_type);
      }
    }
  }
  if (end_round(round, COMBINE_EXITS, COMBINE_CLAIMS, num_ctas, cta == 0)) void_combine(p, threadIdx.x, blockDim.x);
}
