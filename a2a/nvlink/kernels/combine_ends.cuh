// nvlink/kernels/combine_ends: what all regimes of combine do around the rows.
//
// Owns headers, who holds a token's rows, which rows are valid here, and what a void round leaves behind.
#pragma once

#include "combine_output.cuh"
#include "ranks.cuh"
#include "rows.cuh"
#include "sums.cuh"

struct ActiveRanks {
  const u8* mask;
  __device__ __forceinline__ bool has(u32 rank) const {
    return !RANK_MASK || (word(rank / 32) >> (rank % 32) & 1);
  }
  __device__ __forceinline__ u32 word(u32 index) const {
    return RANK_MASK ? load_relaxed(reinterpret_cast<const u32*>(mask) + index) : ALL_LANES;
  }
};

__device__ __forceinline__ u64* combine_header(const CombineParams& p, u32 at_rank, u32 parity, u32 of_rank) {
  return reinterpret_cast<u64*>(p.workspace + at_rank * p.stride + p.combine_header_offset +
                                (parity * EP_SIZE + of_rank) * HEADER_BYTES);
}

// One warp tells every rank, ourselves too. That a rank has started its combine also says that it needs its dispatched
// rows no more, which is why every rank hears every other before its own combine ends: its next dispatch may overwrite.
// That needs no fence: whoever read these rows did so in kernels that had ended before this one wrote anything, or moved
// them to the combine area first (Exchange._is_overwritten).
__device__ __forceinline__ void send_headers(const CombineParams& p, const Round& round, const ActiveRanks& active,
                                             u32 num_flags) {
  for (u32 rank = threadIdx.x % 32; rank < EP_SIZE; rank += 32) {
    if (!active.has(rank)) continue;
    u64* const header = combine_header(p, rank, round.parity, p.ep_rank);
    publish_word(header + 0, round.number, p.runtime_max_tokens_per_rank);
    publish_word(header + 1, round.number, p.digest);
    publish_word(header + 2, round.number, num_flags);
  }
}

// Waits for a rank's header and compares. Lanes of one warp may call it with ranks of their own, or all with the same.
__device__ __forceinline__ bool check_header(const CombineParams& p, const Round& round, u32 rank, u32& num_flags) {
  const u64* const header = combine_header(p, p.ep_rank, round.parity, rank);
  u32 tokens, digest;
  if (!await_header(round, header, rank, tokens, digest, num_flags)) return false;
  if (tokens != p.runtime_max_tokens_per_rank) {
    record_failure(round, KIND_MISMATCH_MAX_TOKENS, SIGNAL_HEADER, rank, tokens, p.runtime_max_tokens_per_rank, 0);
    return false;
  }
  if (digest != p.digest) {
    record_failure(round, KIND_MISMATCH_WIDTHS, SIGNAL_HEADER, rank, digest, p.digest, 0);
    return false;
  }
  return true;
}

// What our dispatch was told about a payload row, read before the round is known.
struct RowValidity {
  u64 words[2];
  i32 count;

  // Where it is told: by rows and sources in token order, by sources otherwise.
  static __device__ __forceinline__ const u8* place(const CombineParams& p, u32 src_rank, u32 row) {
    const u8* const mine = reinterpret_cast<const u8*>(p.workspace + p.ep_rank * p.stride);
    if (!ROW_ORDER_TOKEN) return mine + p.recv_counts_offset + src_rank * 4;
    return mine + p.valid_bits_offset + (u64(src_rank) * ((p.max_num_tokens + 31) / 32) + row / 32) * 8;
  }

  __device__ __forceinline__ void load(const CombineParams& p, const u8* place) {
    if (!ROW_ORDER_TOKEN) {
      count = i32(load_u32(reinterpret_cast<const u32*>(place)));
      return;
    }
    words[0] = load_word(place);
    words[1] = load_word(place + EP_SIZE * ((p.max_num_tokens + 31) / 32) * 8);
  }

  // Whether the row belongs to a (token, rank) pair of this round.
  __device__ __forceinline__ bool of(const Round& round, u32 row) const {
    if (!ROW_ORDER_TOKEN) return i32(row) < count;
    const u64 word = round.parity ? words[1] : words[0];
    return u32(word >> 32) == round.number && (word >> (row % 32) & 1);
  }
};

// The same for one row, asked and answered at once.
__device__ __forceinline__ bool is_valid(const CombineParams& p, const Round& round, u32 src_rank, u32 row) {
  RowValidity validity;
  validity.load(p, RowValidity::place(p, src_rank, row));
  return validity.of(round, row);
}

// The ranks that hold rows of one token: a row of both tables, spread over the lanes of a warp; lanes without a pick hold
// the last one.
struct Holders {
  i32 ranks[(TOP_K + 31) / 32];
  i32 slots[(TOP_K + 31) / 32];

  static __device__ __forceinline__ const u32* place(const CombineParams& p, u64 table_offset, u32 token) {
    return reinterpret_cast<const u32*>(p.workspace + p.ep_rank * p.stride + table_offset) + u64(token) * TOP_K;
  }

  // In token order a row's slot is its token, and the second table is not read.
  __device__ __forceinline__ void load(const u32* targets, const u32* places, u32 token) {
#pragma unroll
    for (u32 i = 0; i < (TOP_K + 31) / 32; ++i) {
      const u32 pick = min(i * 32 + threadIdx.x % 32, TOP_K - 1);
      ranks[i] = i32(load_u32(targets + pick));
      slots[i] = ROW_ORDER_TOKEN ? i32(token) : i32(load_u32(places + pick));
    }
  }

  __device__ __forceinline__ void load(const CombineParams& p, u32 token) {
    load(place(p, p.topk_target_ranks_offset, token), place(p, p.topk_send_indices_offset, token), token);
  }

  // The same in all lanes. A rank masked out since the dispatch holds nothing: its rows may never come.
  __device__ __forceinline__ RankSet set(const ActiveRanks& active) const {
    RankSet found;
    found.clear();
#pragma unroll
    for (u32 i = 0; i < (TOP_K + 31) / 32; ++i) found.add(ranks[i]);
#pragma unroll
    for (u32 i = 0; i < RANK_WORDS; ++i)
      found.words[i] = __reduce_or_sync(ALL_LANES, found.words[i]) & active.word(i);
    return found;
  }

  // Its slot at a rank that holds one.
  __device__ __forceinline__ u32 slot_at(u32 rank) const {
    if (ROW_ORDER_TOKEN) return u32(slots[0]);
    u32 found = 0;
#pragma unroll
    for (u32 i = 0; i < (TOP_K + 31) / 32; ++i)
      if (ranks[i] == i32(rank)) found = u32(slots[i]);
    return __reduce_max_sync(ALL_LANES, found);
  }
};

// Calls visit(rank) for each rank of a set, in ascending order, until it says false; whether it never did.
template <typename Visit>
__device__ __forceinline__ bool for_each_rank(const RankSet& ranks, Visit visit) {
#pragma unroll
  for (u32 i = 0; i < RANK_WORDS; ++i) {
    u32 left = ranks.words[i];
#pragma unroll 1
    while (left) {
      const u32 rank = i * 32 + __ffs(left) - 1;
      left &= left - 1;
      if (!visit(rank)) return false;
    }
  }
  return true;
}

__device__ __forceinline__ void void_element(const CombineParams& p, u64 at) {
  if (p.output_type == TYPE_FP32) reinterpret_cast<u32*>(p.output)[at] = 0x7fffffff;
  else reinterpret_cast<u16*>(p.output)[at] = 0x7fff;
}

// What a void round leaves: not a number, everywhere. All threads of a CTA call it; `step` threads share the work.
__device__ __noinline__ void void_combine(const CombineParams& p, u64 thread, u64 step) {
  if (QUANTIZES) {
    // Whoever quantises a row has written all of it.
    const u32 cta = u32(thread / blockDim.x), num_ctas = u32(step / blockDim.x);
    for (u32 row = cta; row < p.num_tokens; row += num_ctas)
      for (u32 i = threadIdx.x; i < p.row_elements; i += blockDim.x) void_element(p, u64(row) * p.row_elements + i);
    finish_rows(p, cta, num_ctas);
    return;
  }
  const u64 count = u64(p.num_tokens) * p.row_elements;
  for (u64 i = thread; i < count; i += step) void_element(p, i);
}
