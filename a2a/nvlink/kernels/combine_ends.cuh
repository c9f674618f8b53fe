// nvlink/kernels/combine_ends: what both regimes of combine do around the rows.
//
// Owns headers, who holds a token's rows, which rows are valid here, and what a void round leaves behind.
#pragma once

#include "rows.cuh"
#include "sums.cuh"

struct ActiveRanks {
  const u8* mask;
  __device__ __forceinline__ bool has(u32 rank) const {
    return !RANK_MASK || (load_relaxed(reinterpret_cast<const u32*>(mask) + rank / 32) >> (rank % 32) & 1);
  }
};

__device__ __forceinline__ u64* combine_header(const CombineParams& p, u32 at_rank, u32 parity, u32 of_rank) {
  return reinterpret_cast<u64*>(p.workspace + at_rank * p.stride + p.combine_header_offset +
                                (parity * EP_SIZE + of_rank) * HEADER_BYTES);
}

// One warp tells every rank, ourselves too. That a rank has started its combine also says that it needs its dispatched
// rows no more, which is why every rank hears every other before its own combine ends: its next dispatch may overwrite.
__device__ __forceinline__ void send_headers(const CombineParams& p, const Round& round, const ActiveRanks& active,
                                             u32 num_flags) {
  for (u32 rank = threadIdx.x % 32; rank < EP_SIZE; rank += 32) {
    if (!active.has(rank)) continue;
    u64* const header = combine_header(p, rank, round.parity, p.ep_rank);
    publish_word(round, header + 0, p.runtime_max_tokens_per_rank);
    publish_word(round, header + 1, p.digest);
    publish_word(round, header + 2, num_flags);
  }
}

// One lane per rank waits for its header and compares; lanes of one warp may call it with ranks of their own.
__device__ __forceinline__ bool check_header(const CombineParams& p, const Round& round, u32 rank, u32& num_flags) {
  const u64* const header = combine_header(p, p.ep_rank, round.parity, rank);
  u32 tokens = p.runtime_max_tokens_per_rank, digest = p.digest;
  if (!await_two_words(round, header, SIGNAL_HEADER, rank, tokens, digest)) return false;
  if (!await_releasing_word(round, header + 2, SIGNAL_HEADER, rank, num_flags)) return false;
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

  __device__ __forceinline__ void load(const CombineParams& p, u32 src_rank, u32 row, bool real = true) {
    const u8* const mine = reinterpret_cast<const u8*>(p.workspace + p.ep_rank * p.stride);
    count = 0;
    words[0] = words[1] = 0;
    if (!real) return;
    if (!ROW_ORDER_TOKEN) {
      count = reinterpret_cast<const i32*>(mine + p.recv_counts_offset)[src_rank];
      return;
    }
    const u32 per_rank = (p.max_num_tokens + 31) / 32;
    const u64* const of_rank = reinterpret_cast<const u64*>(mine + p.valid_bits_offset) + u64(src_rank) * per_rank;
#pragma unroll
    for (u32 parity = 0; parity < 2; ++parity) words[parity] = of_rank[u64(parity * EP_SIZE) * per_rank + row / 32];
  }

  // Whether the row belongs to a (token, rank) pair of this round.
  __device__ __forceinline__ bool of(const Round& round, u32 row) const {
    if (!ROW_ORDER_TOKEN) return i32(row) < count;
    const u64 word = round.parity ? words[1] : words[0];
    return u32(word >> 32) == round.number && (word >> (row % 32) & 1);
  }
};

// The ranks that hold rows of one token, visited in ascending order by a warp together.
struct Holders {
  i32 ranks[(TOP_K + 31) / 32];
  i32 slots[(TOP_K + 31) / 32];

  // Not `real`: one holder that is not this rank, see `rehearsal`.
  __device__ __forceinline__ void load(const CombineParams& p, u32 token, bool real = true) {
    const u8* const mine = reinterpret_cast<const u8*>(p.workspace + p.ep_rank * p.stride);
#pragma unroll
    for (u32 i = 0; i < (TOP_K + 31) / 32; ++i) {
      const u32 pick = i * 32 + threadIdx.x % 32;
      const u64 at = u64(token) * TOP_K + pick;
      ranks[i] = real || pick ? -1 : i32((p.ep_rank + 1) % EP_SIZE);
      slots[i] = ranks[i];
      if (pick >= TOP_K || !real) continue;
      ranks[i] = reinterpret_cast<const i32*>(mine + p.topk_target_ranks_offset)[at];
      slots[i] = reinterpret_cast<const i32*>(mine + p.topk_send_indices_offset)[at];
    }
  }

  // Its slot at one rank, -1 if it has none there.
  __device__ __forceinline__ i32 slot_at(u32 rank) const {
    u32 found = 0;
#pragma unroll
    for (u32 i = 0; i < (TOP_K + 31) / 32; ++i)
      if (ranks[i] == i32(rank)) found = u32(slots[i]) + 1;
    // A rank is named once per token, so one lane has found it.
    return i32(__reduce_max_sync(ALL_LANES, found)) - 1;
  }

  // The next holder after `rank` (-1 to begin); false when there is none.
  __device__ __forceinline__ bool next(i32& rank, i32& slot) const {
    u32 lowest = ALL_LANES;
#pragma unroll
    for (u32 i = 0; i < (TOP_K + 31) / 32; ++i)
      if (ranks[i] > rank) lowest = min(lowest, u32(ranks[i]));
    lowest = __reduce_min_sync(ALL_LANES, lowest);
    if (lowest == ALL_LANES) return false;
    rank = i32(lowest);
    slot = slot_at(lowest);
    return true;
  }
};

// What a void round leaves: not a number, everywhere.
__device__ __noinline__ void void_combine(const CombineParams& p, u64 thread, u64 step) {
  const u64 count = u64(p.num_tokens) * p.row_elements;
  for (u64 i = thread; i < count; i += step) {
    if (p.output_type == TYPE_FP32) reinterpret_cast<u32*>(p.output)[i] = 0x7fffffff;
    else reinterpret_cast<u16*>(p.output)[i] = 0x7fff;
  }
}
