// nvlink/kernels/dispatch_bulk: rows of many tokens, written where they belong, published by flags.
//
// Owns the bulk regime's way out and in. Warps route 32 tokens each, then claim units of rows from a counter: a static
// share leaves the link idle while the slowest CTA finishes. The last warp of a CTA pushes nothing; it fences and raises
// the CTA's flag at every receiver once the others are done.
#pragma once

#include "routing.cuh"
#include "rows.cuh"
#include "dispatch_ends.cuh"
#if WIRE_FORMAT
#include "quantize.cuh"
#endif

// A segment of one payload's row.
struct PayloadPart {
  const u8* from;  // the row
  u32 row_bytes, begin, end;
  u32 alignment;  // of every row

  __device__ __forceinline__ PayloadPart(const DispatchParams& p, u32 payload, u32 token, u32 segment) {
    row_bytes = p.payload_bytes[payload];
    segment_of(row_bytes, segment, p.segments, begin, end);
    from = reinterpret_cast<const u8*>(p.payload_rows[payload]) + u64(token) * row_bytes;
    alignment = common_alignment(p.payload_rows[payload] | row_bytes);
  }
};

// Copies one unit, a segment of every payload of a token, to all its destinations. Its first loads pass while these are
// being found.
__device__ __forceinline__ bool push_unit(const DispatchParams& p, const Round& round, const RankSet& active, u32 unit) {
  const u32 token = unit / p.segments, segment = unit % p.segments, lane = threadIdx.x % 32;
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
#if WIRE_FORMAT
  QuantizedSegment quantized(p, token, segment);
#endif
  RowBytes bytes;
#if !WIRE_FORMAT
  const PayloadPart first(p, 0, token, segment);
  if (first.alignment == 16) bytes.load(first.from, first.begin, first.end);
#endif
  Destinations to;
  if (ROW_ORDER_TOKEN) {
    // The slot is the token: nothing of the tables is needed, and the first rows leave without waiting for them.
    TokenIds ids;
    ids.load(p, ids_of(p, token));
    ids.destinations(p, active, token, to);
  } else {
    const u32* const ready = reinterpret_cast<const u32*>(mine + p.tables_ready_offset) + token / 32;
    if (!__all_sync(ALL_LANES, await_tables(round, ready, p.ep_rank))) return false;
#pragma unroll
    for (u32 i = 0; i < (TOP_K + 31) / 32; ++i) {
      const u32 pick = i * 32 + lane;
      const u64 at = u64(token) * TOP_K + pick;
      to.ranks[i] = pick < TOP_K ? reinterpret_cast<const i32*>(mine + p.topk_target_ranks_offset)[at] : -1;
      to.slots[i] = pick < TOP_K ? reinterpret_cast<const i32*>(mine + p.topk_send_indices_offset)[at] : -1;
    }
  }
#if WIRE_FORMAT
  quantized.push(p, to);
  u32 payload = SCALES_PAYLOAD + 1;
#else
  u32 payload = 0;
#endif
#pragma unroll 1
  for (; payload < p.num_payloads; ++payload) {
    const PayloadPart part(p, payload, token, segment);
    copy_row(bytes, payload == 0, part.from, part.begin, part.end, part.alignment, to, [&](i32 rank, i32 slot) {
      return reinterpret_cast<u8*>(p.workspace + u32(rank) * p.stride + p.payload_offsets[payload]) +
             (u64(p.ep_rank) * p.runtime_max_tokens_per_rank + u32(slot)) * part.row_bytes;
    });
  }
  return true;
}

// Waits until every rank has begun this round, and so has read what was pushed to it in the last one.
__device__ __forceinline__ bool await_readers(const DispatchParams& p, const Round& round, const RankSet& active) {
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  bool fine = true;
  for (u32 rank = threadIdx.x % 32; fine && rank < EP_SIZE; rank += 32) {
    if (rank == p.ep_rank || (RANK_MASK && !active.has(rank))) continue;
    u32 tokens;
    fine = await_word(round, header_of(mine, p.dispatch_header_offset, round.parity, rank), SIGNAL_HEADER, rank, tokens);
  }
  return __all_sync(ALL_LANES, fine);
}

// A warp each: validity and scrubbing of 32 rows from one source. It needs the source's words only, not its rows.
__device__ __forceinline__ bool scrub_rows(const DispatchParams& p, const Round& round, bool active, u32 src_rank,
                                           u32 word) {
  const u32 lane = threadIdx.x % 32, row = word * 32 + lane, tokens = p.runtime_max_tokens_per_rank;
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  const u64* const words = valid_words(mine, p.valid_bits_offset, p.max_num_tokens, round.parity, src_rank);
  bool valid = false;
  if (active) {
    u32 value = 0;
    if (ROW_ORDER_TOKEN) {
      if (!__all_sync(ALL_LANES, await_word(round, words + word, SIGNAL_BITS, src_rank, value))) return false;
      valid = value >> lane & 1;
    } else {
      if (!bits_before(round, words, tokens, src_rank, value)) return false;
      valid = row < value;
    }
  }
  const u64 slot = u64(src_rank) * tokens + row;
  if (ROW_ORDER_TOKEN && row < tokens) mine[p.row_valid_offset + slot] = valid;
  const u32 padded = __ballot_sync(ALL_LANES, row < tokens && !valid);
  if (!padded) return true;
  for (u32 payload = 0; payload < p.num_payloads; ++payload) {
    const u32 row_bytes = p.payload_bytes[payload];
    if (i32(payload) == p.ids_payload) {
      if (padded >> lane & 1) scrub_ids(mine + p.payload_offsets[payload] + slot * row_bytes, row_bytes, p.invalid_id);
    } else if (p.payload_fill[payload] >= 0) {
      for (u32 left = padded; left; left &= left - 1) {
        const u64 which = u64(src_rank) * tokens + word * 32 + __ffs(left) - 1;
        fill_row(mine + p.payload_offsets[payload] + which * row_bytes, row_bytes, p.payload_fill[payload]);
      }
    }
  }
  return true;
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) dispatch_bulk(const __grid_constant__ DispatchParams p) {
  __shared__ u32 verdict;
  __shared__ Placing placings[MAX_THREADS / 32];
  if (threadIdx.x == 0) verdict = VERDICT_FINE;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, pushers = blockDim.x / 32 - 1;
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  touch(p);
  __syncthreads();
  await_previous_kernel();
  next_kernel_may_come();

  bool failed;
  u8* const state = mine + p.round_state_offset;
  const RoundWords words_of_round = load_round(state);
  const Round round = begin_round(words_of_round, PHASE_DISPATCH, state, p.host_words, &verdict, failed);
  const RankSet active = active_ranks(mine + p.rank_mask_offset);
  if (failed) {
    void_dispatch(p, u64(blockIdx.x) * blockDim.x + threadIdx.x, u64(gridDim.x) * blockDim.x);
    return;
  }
  const u32 words = (p.runtime_max_tokens_per_rank + 31) / 32;
  if (warp < pushers) {
    // Neighbouring words on different CTAs: the first rows can leave while later tokens are still being routed.
    const u32 self = warp * gridDim.x + blockIdx.x, step = pushers * gridDim.x;
    for (u32 word = self; word < words; word += step)
      publish_bits(p, round, active, WordPlace(p, word), word_ranks(p, active, word));
    bool fine = true;
    for (u32 word = self; fine && word < words; word += step) {
      fine = write_tables(p, round, active, word, placings[warp]);
      release_tables(round, reinterpret_cast<u32*>(mine + p.tables_ready_offset) + word);
    }
    // What our last combine pushed lies where our rows go now.
    if (words_of_round.pushed_round == words_of_round.dispatch_round) fine = fine && await_readers(p, round, active);
    // The first unit of a warp is its number; later ones are claimed one ahead, behind the copying of the last.
    const u32 units = p.num_tokens * p.segments;
    u32* const claims = round.counter(DISPATCH_CLAIMS, round.parity);
    for (u32 unit = self; fine && unit < units;) {
      u32 next = 0;
      if (lane == 0) next = step + atomicAdd(claims, 1);
      fine = push_unit(p, round, active, unit);
      unit = __shfl_sync(ALL_LANES, next, 0);
    }
  } else {
    if (blockIdx.x == 0) send_headers(p, round, active, gridDim.x);
    send_eplb(p, round, active, blockIdx.x * 32 + lane, gridDim.x * 32);
  }
  __syncthreads();
  if (warp == pushers) {
    // A failed CTA raises no flag: its rows are not all there.
    if (verdict == VERDICT_FINE) {
      release_rows();
      for (u32 rank = lane; rank < EP_SIZE; rank += 32) {
        if (rank == p.ep_rank || (RANK_MASK && !active.has(rank))) continue;
        u8* const theirs = reinterpret_cast<u8*>(p.workspace + rank * p.stride);
        raise_flag(reinterpret_cast<u32*>(theirs + p.dispatch_flags_offset) +
                       u64(round.parity * EP_SIZE + p.ep_rank) * MAX_CTAS + blockIdx.x,
                   round.number);
      }
    }
    receive_eplb(p, round, active, blockIdx.x * 32 + lane, gridDim.x * 32);
    if (blockIdx.x == 0) check_headers(p, round, active);
  } else {
    const u32 self = warp * gridDim.x + blockIdx.x, step = pushers * gridDim.x;
    for (u32 rank = self; rank < EP_SIZE; rank += step) {
      count_sent(p, round, active, rank);
      count_received(p, round, active, rank);
    }
    bool fine = true;
    for (u32 task = self; fine && task < EP_SIZE * words; task += step) {
      const u32 src_rank = task / words;
      fine = scrub_rows(p, round, !RANK_MASK || active.has(src_rank), src_rank, task % words);
    }
    if (blockIdx.x == 0) {
      // One CTA waits for everybody's rows; the end of this kernel hands them to later ones. Ours need no flag.
      for (u32 rank = warp; fine && rank < EP_SIZE; rank += pushers) {
        if (rank == p.ep_rank || (RANK_MASK && !active.has(rank))) continue;
        u32 num_flags = 0;
        fine = __all_sync(ALL_LANES, await_word(round, header_of(mine, p.dispatch_header_offset, round.parity, rank) + 2,
                                                SIGNAL_HEADER, rank, num_flags));
        const u32* const flags = reinterpret_cast<const u32*>(mine + p.dispatch_flags_offset) +
                                 u64(round.parity * EP_SIZE + rank) * MAX_CTAS;
        for (u32 i = lane; fine && i < num_flags; i += 32) fine = await_flag(round, flags + i, rank);
        // Lanes give up one by one, but go on together.
        fine = __all_sync(ALL_LANES, fine);
      }
    }
  }
  if (end_round(round, DISPATCH_EXITS, DISPATCH_CLAIMS, gridDim.x, blockIdx.x == 0))
    void_dispatch(p, threadIdx.x, blockDim.x);
}
