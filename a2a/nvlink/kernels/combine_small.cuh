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

// What part `part` of a row's lines carries: up to two pieces, the last part of a line one and the tag.
struct RowPart {
  u32 at, low_bytes, high_bytes;
  bool words;  // both are whole and lie on multiples of 8 in every row

  __device__ __forceinline__ void locate(const CombineParams& p, u32 row_bytes, u32 part) {
    at = part / 8 * LINE_DATA_BYTES + part % 8 * 16;
    low_bytes = at < row_bytes ? min(8u, row_bytes - at) : 0;
    high_bytes = at + 8 < row_bytes && part % 8 != 7 ? min(8u, row_bytes - at - 8) : 0;
    words = common_alignment(p.payload | row_bytes) >= 8;
  }

  __device__ __forceinline__ void load(const u8* row, u64& low, u64& high, bool real) const {
    if (words) {
      if (low_bytes && real) low = load_word(row + at);
      if (high_bytes && real) high = load_word(row + at + 8);
    } else if (real) {
      low = load_bytes(row + at, low_bytes);
      high = load_bytes(row + at + 8, high_bytes);
    }
  }
};

template <u32 TYPE>
__device__ __forceinline__ void add_pieces(float* sums, u64 low, u64 high) {
  constexpr u32 STEP = per_word(TYPE);
  add_word<TYPE>(sums, u32(low));
  add_word<TYPE>(sums + STEP, u32(low >> 32));
  add_word<TYPE>(sums + 2 * STEP, u32(high));
  add_word<TYPE>(sums + 3 * STEP, u32(high >> 32));
}

// Waits for a part of another rank's row; the warp's lanes wait together.
__device__ __forceinline__ bool await_part(const CombineParams& p, const Round& round, u32 rank, u32 slot, u32 num_lines,
                                           u32 part, u64& low, u64& high) {
  const u64* const from = combine_line(p, p.ep_rank, rank, slot, num_lines) + u64(part) * 2;
  const bool inside = part < num_lines * 8;
  Patience patience;
  while (true) {
    if (inside && round.real) load_line_part(from, low, high);
    const u32 seen = u32(__shfl_sync(ALL_LANES, high, threadIdx.x % 32 | 7) >> 32);
    if (__all_sync(ALL_LANES, !inside || !round.real || seen == round.number)) return true;
    if (__any_sync(ALL_LANES, give_up(round, patience, SIGNAL_ROW, rank, seen))) return false;
  }
}

// Pushes the rows that lie here to the ranks they came from. `validity`, `low` and `high` are those of the first row.
template <u32 TYPE>
__device__ __forceinline__ void push_rows(const CombineParams& p, const Round& round, const ActiveRanks& active,
                                          RowValidity validity, RowPart here, u64 low, u64 high) {
  const u32 row_bytes = p.row_elements * size_of(TYPE), num_lines = (row_bytes + LINE_DATA_BYTES - 1) / LINE_DATA_BYTES;
  const u32 first = blockIdx.y - 1, rows = gridDim.y - 1, parts = gridDim.x * blockDim.x;
  const u32 end = round.real ? p.runtime_max_tokens_per_rank : min(p.runtime_max_tokens_per_rank, first + 1);
#pragma unroll 1
  for (u32 row = first; row < end; row += rows) {
#pragma unroll 1
    for (u32 i = 1; i < EP_SIZE; ++i) {
      const u32 src_rank = (p.ep_rank + i) % EP_SIZE;
      if (round.real && !active.has(src_rank)) continue;
      bool ahead = row == first && i == 1;
      if (!ahead) validity.load(p, src_rank, row, round.real);
      const bool valid = validity.of(round, row);
      const u8* const from =
          reinterpret_cast<const u8*>(p.payload) + (u64(src_rank) * p.runtime_max_tokens_per_rank + row) * row_bytes;
#pragma unroll 1
      for (u32 part = blockIdx.x * blockDim.x + threadIdx.x; part < num_lines * 8; part += parts) {
        if (parts < num_lines * 8) here.locate(p, row_bytes, part);
        if (!ahead) here.load(from, low, high, round.real);
        ahead = false;
        if (part % 8 == 7) high = u64(round.number) << 32;
        u64* const to = combine_line(p, src_rank, p.ep_rank, row, num_lines) + u64(part) * 2;
        if (valid && round.real) store_line_part(to, low, high);
      }
    }
  }
}

// Adds what arrives for this rank's tokens. `holders` are those of the first one.
template <u32 TYPE>
__device__ __forceinline__ bool add_rows(const CombineParams& p, const Round& round, Holders holders, RowPart here) {
  constexpr u32 COUNT = 2 * per_word(TYPE);  // elements of a piece
  const u32 row_bytes = p.row_elements * size_of(TYPE), num_lines = (row_bytes + LINE_DATA_BYTES - 1) / LINE_DATA_BYTES;
  const u32 first = blockIdx.y - 1, rows = gridDim.y - 1, parts = gridDim.x * blockDim.x, lane = threadIdx.x % 32;
  const u32 end = round.real ? p.num_tokens : min(p.num_tokens, first + 1);
#pragma unroll 1
  for (u32 token = first; token < end; token += rows) {
    if (token != first) holders.load(p, token);
    const i32 own_slot = holders.slot_at(p.ep_rank);
    const u64 own_row = u64(p.ep_rank) * p.runtime_max_tokens_per_rank + u32(max(own_slot, 0));
#pragma unroll 1
    for (u32 part = blockIdx.x * blockDim.x + threadIdx.x; part - lane < num_lines * 8; part += parts) {
      if (parts < num_lines * 8) here.locate(p, row_bytes, part);
      // Our own row is read while others' are on the wire, whatever its place in the sum.
      u64 own_low = 0, own_high = 0;
      here.load(reinterpret_cast<const u8*>(p.payload) + own_row * row_bytes, own_low, own_high,
                own_slot >= 0 && round.real);
      float sums[2 * COUNT] = {};
      i32 rank = -1, slot = -1;
#pragma unroll 1
      while (holders.next(rank, slot)) {
        u64 low = own_low, high = own_high;
        if (u32(rank) != p.ep_rank && !await_part(p, round, u32(rank), u32(slot), num_lines, part, low, high)) return false;
        add_pieces<TYPE>(sums, low, high);
      }
      u8* const row = reinterpret_cast<u8*>(p.output) + u64(token) * p.row_elements * size_of(p.output_type);
      const u32 element = here.at / size_of(TYPE);
      if (here.low_bytes) store_sums<TYPE, COUNT>(row, element, p.row_elements, sums, p.output_type, round.real);
      if (here.high_bytes)
        store_sums<TYPE, COUNT>(row, element + COUNT, p.row_elements, sums + COUNT, p.output_type, round.real);
    }
  }
  return true;
}

template <u32 TYPE>
__device__ __forceinline__ void combine_small(const CombineParams& p) {
  __shared__ u32 verdict;
  touch(p);
  if (threadIdx.x == 0) verdict = VERDICT_FINE;
  // Everything that needs no earlier kernel's result is known before the wait for it.
  const u32 lane = threadIdx.x % 32, row_bytes = p.row_elements * size_of(TYPE), tokens = p.runtime_max_tokens_per_rank;
  const u32 num_ctas = gridDim.x * gridDim.y, cta = blockIdx.y * gridDim.x + blockIdx.x;
  const u32 first_part = blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y - 1;
  const u32 next_rank = (p.ep_rank + 1) % EP_SIZE;
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  u8* const state = mine + p.round_state_offset;
  const u8* const payload = reinterpret_cast<const u8*>(p.payload);
  RowPart here;
  here.locate(p, row_bytes, first_part);
  __syncthreads();
  const ActiveRanks active{mine + p.rank_mask_offset};
  Round round = rehearsal(PHASE_COMBINE, state, p.host_words, &verdict);
#pragma unroll 1
  for (bool real = false;; real = true) {
    if (real) {
      await_previous_kernel();
      next_kernel_may_come();
    }
    // What needs no round is read before the round is.
    u64 low = 0, high = 0;
    RowValidity validity;
    Holders holders;
    if (blockIdx.y > 0) {
      if (EP_SIZE > 1 && first < tokens) {
        here.load(payload + (u64(next_rank) * tokens + first) * row_bytes, low, high, real);
        validity.load(p, next_rank, first, real);
      }
      if (first < p.num_tokens) holders.load(p, first, real);
    }
    if (real) {
      bool failed;
      round = begin_round(load_round(state), PHASE_COMBINE, state, p.host_words, &verdict, failed);
      if (failed) {
        void_combine(p, u64(cta) * blockDim.x + threadIdx.x, u64(num_ctas) * blockDim.x);
        return;
      }
    }
    if (blockIdx.y == 0) {
      if (cta == 0 && threadIdx.x < 32) {
        send_headers(p, round, active, 0);
        u32 num_flags;
#pragma unroll 1
        for (u32 rank = lane; rank < EP_SIZE; rank += 32)
          if (!real || active.has(rank)) check_header(p, round, rank, num_flags);
      }
    } else {
      push_rows<TYPE>(p, round, active, validity, here, low, high);
      add_rows<TYPE>(p, round, holders, here);
    }
    if (real) break;
  }
  if (end_round(round, COMBINE_EXITS, COMBINE_CLAIMS, num_ctas, cta == 0)) void_combine(p, threadIdx.x, blockDim.x);
}
