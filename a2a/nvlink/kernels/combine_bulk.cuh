// nvlink/kernels/combine_bulk: rows of many tokens read where they lie.
//
// Owns the bulk regime's way back. A payload outside the combine area is copied there first, in the same launch; then
// every warp claims units of tokens and reads their rows from the ranks that hold them.
#pragma once

#include "combine_ends.cuh"
#include "combine_low_precision.cuh"

// Copies a segment of one payload row into this rank's combine area, if the row is anybody's but ours.
__device__ __forceinline__ void stage_unit(const CombineParams& p, const Round& round, const ActiveRanks& active,
                                           u32 unit, u32 row_bytes) {
  const u32 segment = unit % p.segments, row = unit / p.segments;
  const u32 src_rank = row / p.runtime_max_tokens_per_rank, within = row % p.runtime_max_tokens_per_rank;
  if (src_rank == p.ep_rank || !active.has(src_rank)) return;
  RowValidity validity;
  validity.load(p, src_rank, within);
  if (!validity.of(round, within)) return;
  u32 begin, end;
  segment_of(row_bytes, segment, p.segments, begin, end);
  Destinations here;
#pragma unroll
  for (u32 i = 0; i < (TOP_K + 31) / 32; ++i) here.ranks[i] = here.slots[i] = -1;
  if (threadIdx.x % 32 == 0) here.ranks[0] = here.slots[0] = 0;
  u8* const to = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride + p.combine_offset) + u64(row) * row_bytes;
  copy_row(reinterpret_cast<const u8*>(p.payload) + u64(row) * row_bytes, begin, end,
           common_alignment(p.payload | row_bytes), here, [&](i32, i32) { return to; });
}

// Adds a segment of one token's rows. WIDE: 16-byte accesses, BATCH of them in flight per lane and holder.
template <u32 TYPE, bool WIDE>
__device__ __forceinline__ void sum_unit(const CombineParams& p, u32 unit, u32 row_bytes) {
  constexpr u32 BYTES = WIDE ? 16 : size_of(TYPE), BATCH = WIDE ? 4 : 1, COUNT = BYTES / size_of(TYPE);
  const u32 token = unit / p.segments, segment = unit % p.segments, lane = threadIdx.x % 32;
  Holders holders;
  holders.load(p, token);
  u32 begin, end;
  segment_of(row_bytes, segment, p.segments, begin, end);
  u8* const out = reinterpret_cast<u8*>(p.output) + u64(token) * p.row_elements * size_of(p.output_type);
#pragma unroll 1
  for (u32 at = begin; at < end; at += 32 * BATCH * BYTES) {
    float sums[BATCH * COUNT] = {};
    i32 rank = -1, slot = -1;
    while (holders.next(rank, slot)) {
      // Our own rows never left the payload.
      const u64 area = u32(rank) == p.ep_rank ? p.payload : p.workspace + u32(rank) * p.stride + p.combine_offset;
      const u8* const row = reinterpret_cast<const u8*>(area) +
                            (u64(p.ep_rank) * p.runtime_max_tokens_per_rank + u32(slot)) * row_bytes;
      if (WIDE) {
        Vec16 held[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
          const u32 byte = at + (i * 32 + lane) * BYTES;
          held[i] = byte < end ? load16(row + byte) : Vec16{0, 0, 0, 0};
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
          float* const to = sums + i * COUNT;
          add_word<TYPE>(to, held[i].x);
          add_word<TYPE>(to + COUNT / 4, held[i].y);
          add_word<TYPE>(to + COUNT / 2, held[i].z);
          add_word<TYPE>(to + COUNT / 4 * 3, held[i].w);
        }
      } else {
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
          const u32 byte = at + (i * 32 + lane) * BYTES;
          if (byte >= end) continue;
          const u32 bits = BYTES == 4 ? *reinterpret_cast<const u32*>(row + byte) : *reinterpret_cast<const u16*>(row + byte);
          sums[i] += to_float<TYPE>(bits);
        }
      }
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; ++i) {
      const u32 byte = at + (i * 32 + lane) * BYTES;
      if (byte < end) store_sums<COUNT>(out, byte / size_of(TYPE), p.row_elements, sums + i * COUNT, p.output_type);
    }
  }
}

template <u32 TYPE>
__device__ __forceinline__ void combine_bulk(const CombineParams& p) {
  __shared__ u32 verdict;
  if (threadIdx.x == 0) verdict = VERDICT_FINE;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, adders = blockDim.x / 32 - 1;
  const u32 self = warp * gridDim.x + blockIdx.x, step = adders * gridDim.x;
  const u32 row_bytes = TYPE == TYPE_E4M3 ? p.row_pitch : p.row_elements * size_of(TYPE);
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  __syncthreads();
  await_previous_kernel();
  next_kernel_may_come();

  bool failed;
  u8* const state = mine + p.round_state_offset;
  const Round round = begin_round(load_round(state), PHASE_COMBINE, state, p.host_words, &verdict, failed);
  const ActiveRanks active{mine + p.rank_mask_offset};
  if (failed) {
    void_combine(p, u64(blockIdx.x) * blockDim.x + threadIdx.x, u64(gridDim.x) * blockDim.x);
    return;
  }
  if (warp == adders && blockIdx.x == 0) {
    // Partner: check_header and acquire_rows below. Orders the payload, written by earlier kernels, before the header.
    release_rows();
    send_headers(p, round, active, p.staged ? gridDim.x : 0);
  }
  if (p.staged) {
    if (warp < adders) {
      const u32 units = EP_SIZE * p.runtime_max_tokens_per_rank * p.segments;
      for (u32 unit = self; unit < units;) {
        u32 next = 0;
        if (lane == 0) next = step + atomicAdd(round.counter(STAGE_CLAIMS, round.parity), 1);
        stage_unit(p, round, active, unit, row_bytes);
        unit = __shfl_sync(ALL_LANES, next, 0);
      }
    }
    __syncthreads();
    if (warp == adders) {
      release_rows();
      for (u32 rank = lane; rank < EP_SIZE; rank += 32)
        if (rank != p.ep_rank && active.has(rank))
          raise_flag(reinterpret_cast<u32*>(p.workspace + rank * p.stride + p.combine_flags_offset) +
                         u64(round.parity * EP_SIZE + p.ep_rank) * MAX_CTAS + blockIdx.x,
                     round.number);
    }
  }
  // Every CTA waits for all ranks, then reads.
  for (u32 rank = warp; rank < EP_SIZE; rank += adders + 1) {
    if (!active.has(rank)) continue;
    u32 num_flags = 0;
    bool fine = check_header(p, round, rank, num_flags);
    if (rank != p.ep_rank) {
      const u32* const flags = reinterpret_cast<const u32*>(mine + p.combine_flags_offset) +
                               u64(round.parity * EP_SIZE + rank) * MAX_CTAS;
      for (u32 i = lane; fine && i < num_flags; i += 32) fine = await_flag(round, flags + i, rank);
    }
  }
  acquire_rows();
  __syncthreads();
  if (verdict == VERDICT_FINE && warp < adders) {
    const bool wide = common_alignment(p.payload | row_bytes) == 16;
    const u32 units = p.num_tokens * p.segments;
    for (u32 unit = self; unit < units;) {
      u32 next = 0;
      if (lane == 0) next = step + atomicAdd(round.counter(COMBINE_CLAIMS, round.parity), 1);
      if constexpr (TYPE == TYPE_E4M3) {
        if (common_alignment(p.payload | row_bytes) >= 4 && p.row_elements % 4 == 0) sum_e4m3_unit<4>(p, unit);
        else sum_e4m3_unit<1>(p, unit);
      } else if (wide) {
        sum_unit<TYPE, true>(p, unit, row_bytes);
      } else {
        sum_unit<TYPE, false>(p, unit, row_bytes);
      }
      unit = __shfl_sync(ALL_LANES, next, 0);
    }
  }
  if (end_round(round, COMBINE_EXITS, COMBINE_CLAIMS, gridDim.x, blockIdx.x == 0))
    void_combine(p, threadIdx.x, blockDim.x);
}
