// nvlink/kernels/combine_small: rows of few tokens pushed back, their round carried in every line.
//
// Owns the small regime's way back. Row 0 of the grid exchanges headers; the others push the rows that lie here to the
// ranks they came from, then add what arrives for their own tokens. All sends of a CTA precede all its waits.
#pragma once

#include "combine_ends.cuh"

// What part `part` of a row's lines carries: up to two pieces, the last part of a line one and the tag.
struct RowPart {
  u32 part, at, low_bytes, high_bytes;

  __device__ __forceinline__ RowPart(u32 row_bytes, u32 part) : part(part) {
    at = part / 8 * LINE_DATA_BYTES + part % 8 * 16;
    low_bytes = at < row_bytes ? min(8u, row_bytes - at) : 0;
    high_bytes = at + 8 < row_bytes && part % 8 != 7 ? min(8u, row_bytes - at - 8) : 0;
    if (!low_bytes) at = 0;
  }

  // WORDS: all pieces are whole, and what a part has none of may be loaded, as it is not used: the bytes at `at`.
  template <bool WORDS>
  __device__ __forceinline__ void load(const u8* row, u64& low, u64& high) const {
    const u8* const from = row + at;
    if (WORDS) {
      low = load_word(from);
      high = load_word(from + (high_bytes ? 8 : 0));
    } else {
      low = load_bytes(from, low_bytes);
      high = load_bytes(from + 8, high_bytes);
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
__device__ __forceinline__ bool await_part(const Round& round, u32 rank, const u64* line, bool inside, u64& low,
                                           u64& high) {
  Patience patience;
  while (true) {
    if (inside) load_line_part(line, low, high);
    const u32 seen = u32(__shfl_sync(ALL_LANES, high, threadIdx.x % 32 | 7) >> 32);
    if (__all_sync(ALL_LANES, !inside || seen == round.number)) return true;
    if (__any_sync(ALL_LANES, give_up(round, patience, SIGNAL_ROW, rank, seen))) return false;
  }
}

// Writes a part's sums. WORDS: the output is of the rows' type, and its rows lie on multiples of 8.
template <u32 TYPE, bool WORDS>
__device__ __forceinline__ void store_part(const CombineParams& p, u32 token, const RowPart& here, const float* sums) {
  constexpr u32 COUNT = 8 / size_of(TYPE);  // elements of a piece
  u8* const row = reinterpret_cast<u8*>(p.output) + u64(token) * p.row_elements * size_of(WORDS ? TYPE : p.output_type);
  if (WORDS) {
    if (here.low_bytes) *reinterpret_cast<Vec8*>(row + here.at) = rounded<TYPE>(sums);
    if (here.high_bytes) *reinterpret_cast<Vec8*>(row + here.at + 8) = rounded<TYPE>(sums + COUNT);
  } else {
    const u32 element = here.at / size_of(TYPE);
    if (here.low_bytes) store_sums<TYPE, COUNT>(row, element, p.row_elements, sums, p.output_type);
    if (here.high_bytes) store_sums<TYPE, COUNT>(row, element + COUNT, p.row_elements, sums + COUNT, p.output_type);
  }
}

// The grid's row 0: headers alone.
__device__ __forceinline__ void combine_small_headers(const CombineParams& p, u32* verdict) {
  u8* const state = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride) + p.round_state_offset;
  const u32 num_ctas = gridDim.x * gridDim.y;
  const ActiveRanks active{state - p.round_state_offset + p.rank_mask_offset};
  if (!known_by_now(state)) return;
  await_previous_kernel();
  next_kernel_may_come();
  bool failed;
  const Round round = begin_round(load_round(state), PHASE_COMBINE, state, p.host_words, verdict, failed);
  if (failed) {
    void_combine(p, u64(blockIdx.x) * blockDim.x + threadIdx.x, u64(num_ctas) * blockDim.x);
    return;
  }
  if (blockIdx.x == 0 && threadIdx.x < 32) {
    send_headers(p, round, active, 0);
    u32 num_flags;
#pragma unroll 1
    for (u32 rank = threadIdx.x; rank < EP_SIZE; rank += 32)
      if (active.has(rank)) check_header(p, round, rank, num_flags);
  }
  if (end_round(round, COMBINE_EXITS, COMBINE_CLAIMS, num_ctas, blockIdx.x == 0))
    void_combine(p, threadIdx.x, blockDim.x);
}

// The grid's other rows, in sweeps as those of dispatch_small. WORDS: one sweep moves all, rows of the payload and of the
// output are of one type, of whole words, and lie on multiples of 8; it is nearly always so.
template <u32 TYPE, bool WORDS>
__device__ __forceinline__ void combine_small_rows(const CombineParams& p, u32* verdict) {
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  u8* const state = mine + p.round_state_offset;
  const u32 row_bytes = p.row_elements * size_of(TYPE), tokens = p.runtime_max_tokens_per_rank;
  const u32 num_lines = (row_bytes + LINE_DATA_BYTES - 1) / LINE_DATA_BYTES;
  const u32 num_ctas = gridDim.x * gridDim.y, cta = blockIdx.y * gridDim.x + blockIdx.x;
  const u32 next_rank = (p.ep_rank + 1) % EP_SIZE, first = blockIdx.y - 1, rows = gridDim.y - 1;
  const u32 line_bytes = num_lines * LINE_BYTES, of_rank = p.landing_tokens * line_bytes;
  const u8* const payload = reinterpret_cast<const u8*>(p.payload);
  const u8* const first_row = payload + (u64(next_rank) * tokens + first) * row_bytes;
  const u8* const own_rows = payload + u64(p.ep_rank) * tokens * row_bytes;
  const u8* const own_first = own_rows + u64(first) * row_bytes;
  const u8* const first_validity = RowValidity::place(p, next_rank, first);
  const u32* const targets = Holders::place(p, p.topk_target_ranks_offset, first);
  const u32* const places = Holders::place(p, p.topk_send_indices_offset, first);
  const ActiveRanks active{mine + p.rank_mask_offset};
  Round round;
  bool fine = true, begun = false;
  u32 part = blockIdx.x * blockDim.x + threadIdx.x;
  do {
    const RowPart here(row_bytes, part);
    const bool inside = part < num_lines * 8, is_tag = part % 8 == 7;
    // Where our lines lie in rank 0's area, other ranks' a stride further each; and lines from rank 0 in ours.
    const u64 area = p.workspace + p.combine_landing_offset + part * 16;
    const u64 ours = area + u64(p.ep_rank) * of_rank, inbox = area + p.ep_rank * p.stride;
    if (WORDS || !begun) {
      if (!known_by_now(ours, inbox, first_row + here.at, own_first + here.at, first_validity, targets, places, state,
                        here.high_bytes))
        return;
      await_previous_kernel();
      next_kernel_may_come();
    }
    // All reads at once. In token order our own row of the first token is read without knowing that there is one: a
    // padded row is readable as well.
    u64 low = 0, high = 0, own_low = 0, own_high = 0;
    RowValidity validity;
    Holders holders;
    if (first < tokens) {
      if (EP_SIZE > 1) {
        here.load<WORDS>(first_row, low, high);
        validity.load(p, first_validity);
      }
      if (ROW_ORDER_TOKEN) here.load<WORDS>(own_first, own_low, own_high);
    }
    if (first < p.num_tokens) holders.load(targets, places, first);
    if (WORDS || !begun) {
      bool failed;
      round = begin_round(load_round(state), PHASE_COMBINE, state, p.host_words, verdict, failed);
      if (failed) {
        void_combine(p, u64(cta) * blockDim.x + threadIdx.x, u64(num_ctas) * blockDim.x);
        return;
      }
      begun = true;
    }
    const u64 tag = u64(round.number) << 32;
#pragma unroll 1
    for (u32 row = first; row < tokens; row += rows) {
#pragma unroll 1
      for (u32 i = 1; i < EP_SIZE; ++i) {
        const u32 src_rank = (p.ep_rank + i) % EP_SIZE;
        if (!active.has(src_rank)) continue;
        if (row != first || i != 1) {
          here.load<WORDS>(payload + (u64(src_rank) * tokens + row) * row_bytes, low, high);
          validity.load(p, RowValidity::place(p, src_rank, row));
        }
        if (inside && validity.of(round, row))
          store_line_part(reinterpret_cast<u64*>(ours + src_rank * p.stride + row * line_bytes), low, is_tag ? tag : high);
      }
    }
#pragma unroll 1
    for (u32 token = first; fine && token < p.num_tokens; token += rows) {
      if (token != first) holders.load(p, token);
      const RankSet ranks = holders.set(active);
      // Our own row is read while others' are on the wire, whatever its place in the sum.
      if (ranks.has(p.ep_rank) && !(ROW_ORDER_TOKEN && token == first))
        here.load<WORDS>(own_rows + u64(holders.slot_at(p.ep_rank)) * row_bytes, own_low, own_high);
      float sums[16 / size_of(TYPE)] = {};
      fine = for_each_rank(ranks, [&](u32 rank) {
        u64 its_low = own_low, its_high = own_high;
        if (rank != p.ep_rank) {
          const u64 line = inbox + rank * of_rank + holders.slot_at(rank) * line_bytes;
          if (!await_part(round, rank, reinterpret_cast<const u64*>(line), inside, its_low, its_high)) return false;
        }
        add_pieces<TYPE>(sums, its_low, its_high);
        return true;
      });
      if (fine) store_part<TYPE, WORDS>(p, token, here, sums);
    }
    part += gridDim.x * blockDim.x;
  } while (!WORDS && part - threadIdx.x < num_lines * 8);
  if (QUANTIZES) finish_rows(p, first, rows);
  if (end_round(round, COMBINE_EXITS, COMBINE_CLAIMS, num_ctas, false)) void_combine(p, threadIdx.x, blockDim.x);
}

template <u32 TYPE, bool WORDS>
__device__ __forceinline__ void combine_small(const CombineParams& p) {
  __shared__ u32 verdict;
  touch(p);
  if (threadIdx.x == 0) verdict = VERDICT_FINE;
  __syncthreads();
  if (blockIdx.y == 0) combine_small_headers(p, &verdict);
  else combine_small_rows<TYPE, WORDS>(p, &verdict);
}
