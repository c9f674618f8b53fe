// nvlink/kernels/dispatch_ends: what both regimes of dispatch do around the rows.
//
// Owns headers, counts, gathered statistics and what a void round leaves behind. Refuses to know how rows move.
#pragma once

#include "routing.cuh"
#include "rows.cuh"

__device__ __forceinline__ u64* header_of(u8* workspace, u64 offset, u32 parity, u32 src_rank) {
  return reinterpret_cast<u64*>(workspace + offset + (parity * EP_SIZE + src_rank) * HEADER_BYTES);
}

// One warp tells every rank, ourselves too, what this rank believes the round to be, and how many CTAs raise flags.
__device__ __forceinline__ void send_headers(const DispatchParams& p, const Round& round, const RankSet& active,
                                             u32 num_flags) {
#pragma unroll 1
  for (u32 rank = threadIdx.x % 32; rank < EP_SIZE; rank += 32) {
    if (RANK_MASK && !active.has(rank)) continue;
    u8* const theirs = reinterpret_cast<u8*>(p.workspace + rank * p.stride);
    u64* const header = header_of(theirs, p.dispatch_header_offset, round.parity, p.ep_rank);
    publish_word(header + 0, round.number, p.runtime_max_tokens_per_rank);
    publish_word(header + 1, round.number, p.digest);
    publish_word(header + 2, round.number, num_flags);
  }
}

// One warp compares every rank's header with ours. A difference voids the round.
__device__ __forceinline__ bool check_headers(const DispatchParams& p, const Round& round, const RankSet& active) {
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  bool fine = true;
#pragma unroll 1
  for (u32 rank = threadIdx.x % 32; rank < EP_SIZE; rank += 32) {
    if (RANK_MASK && !active.has(rank)) continue;
    const u64* const header = header_of(mine, p.dispatch_header_offset, round.parity, rank);
    u32 tokens = p.runtime_max_tokens_per_rank, digest = p.digest;
    fine &= await_two_words(round, header, SIGNAL_HEADER, rank, tokens, digest);
    if (!fine) continue;
    if (tokens != p.runtime_max_tokens_per_rank) {
      record_failure(round, KIND_MISMATCH_MAX_TOKENS, SIGNAL_HEADER, rank, tokens, p.runtime_max_tokens_per_rank, 0);
      fine = false;
    } else if (digest != p.digest) {
      record_failure(round, KIND_MISMATCH_WIDTHS, SIGNAL_HEADER, rank, digest, p.digest, 0);
      fine = false;
    }
  }
  return __all_sync(ALL_LANES, fine);
}

// A warp each: how many tokens we sent to a rank, and how many it sent to us.
__device__ __forceinline__ void count_sent(const DispatchParams& p, const Round& round, const RankSet& active, u32 rank) {
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  u32 count = 0;
  if (!RANK_MASK || active.has(rank))
    bits_before(round, sent_word(p, mine, rank, 0), p.runtime_max_tokens_per_rank, p.ep_rank, count);
  if (threadIdx.x % 32 == 0) reinterpret_cast<i32*>(mine + p.send_counts_offset)[rank] = i32(count);
}

__device__ __forceinline__ bool count_received(const DispatchParams& p, const Round& round, const RankSet& active,
                                               u32 rank) {
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  u32 count = 0;
  bool fine = true;
  if (!RANK_MASK || active.has(rank))
    fine = bits_before(round, valid_words(mine, p.valid_bits_offset, p.max_num_tokens, round.parity, rank),
                       p.runtime_max_tokens_per_rank, rank, count);
  if (threadIdx.x % 32 == 0) reinterpret_cast<i32*>(mine + p.recv_counts_offset)[rank] = i32(fine ? count : 0);
  return fine;
}

// Statistics travel as words. Called by `step` threads, this one being number `thread`.
__device__ __noinline__ void send_eplb(const DispatchParams& p, const Round& round, const RankSet& active,
                                          u32 thread, u32 step) {
  for (u32 i = thread; i < EP_SIZE * p.num_eplb_stats; i += step) {
    const u32 rank = i / p.num_eplb_stats, entry = i % p.num_eplb_stats;
    if (RANK_MASK && !active.has(rank)) continue;
    u64* const landing = reinterpret_cast<u64*>(p.workspace + rank * p.stride + p.eplb_landing_offset);
    publish_word(landing + u64(round.parity * EP_SIZE + p.ep_rank) * p.num_eplb_stats + entry, round.number,
                 reinterpret_cast<const u32*>(p.eplb_local_stats)[entry]);
  }
}

__device__ __noinline__ void receive_eplb(const DispatchParams& p, const Round& round, const RankSet& active,
                                             u32 thread, u32 step) {
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  for (u32 i = thread; i < EP_SIZE * p.num_eplb_stats; i += step) {
    const u32 rank = i / p.num_eplb_stats, entry = i % p.num_eplb_stats;
    u32 value = 0;
    if (!RANK_MASK || active.has(rank)) {
      const u64* const landing = reinterpret_cast<const u64*>(mine + p.eplb_landing_offset);
      const u64* const from = landing + u64(round.parity * EP_SIZE + rank) * p.num_eplb_stats + entry;
      if (!await_word(round, from, SIGNAL_EPLB, rank, value)) return;
    }
    reinterpret_cast<u32*>(mine + p.eplb_gathered_stats_offset)[i] = value;
  }
}

// What a void round leaves: nothing received, every id invalid. Called by `step` threads.
__device__ __noinline__ void void_dispatch(const DispatchParams& p, u64 thread, u64 step) {
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  const u64 rows = u64(EP_SIZE) * p.runtime_max_tokens_per_rank;
  for (u64 row = thread; row < rows; row += step) {
    if (row < EP_SIZE) reinterpret_cast<i32*>(mine + p.recv_counts_offset)[row] = 0;
    if (ROW_ORDER_TOKEN) mine[p.row_valid_offset + row] = 0;
    if (p.ids_payload >= 0) {
      const u32 row_bytes = p.payload_bytes[p.ids_payload];
      scrub_ids(mine + p.payload_offsets[p.ids_payload] + row * row_bytes, row_bytes, p.invalid_id);
    }
  }
}
