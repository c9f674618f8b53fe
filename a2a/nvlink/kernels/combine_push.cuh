// nvlink/kernels/combine_push: rows of many tokens sent home by the ranks that hold them.
//
// Owns the second way back of many rows: the link carries stores faster than loads. Rows land in the dispatch area of the
// token's rank, which that rank needs no more once its combine has begun; there is no room of their own for them. Some
// warps of every CTA push, a flag behind every segment of a row; the others add what has come.
#pragma once

#include "combine_bulk.cuh"

// One flag per segment of a row, at the token's rank, by the rank that held the row and its slot there.
__device__ __forceinline__ u32* pushed_flag(const CombineParams& p, u32 at_rank, u32 of_rank, u32 slot, u32 segment) {
  u32* const flags = reinterpret_cast<u32*>(p.workspace + at_rank * p.stride + p.pushed_flags_offset);
  return flags + (u64(of_rank) * p.max_num_tokens + slot) * MAX_PUSHED_SEGMENTS + segment;
}

// Sends a segment of one payload row to the rank whose token it is. Units of one slot and all peers are neighbours, so
// that every peer's rows come in the order of its tokens.
__device__ __forceinline__ void push_unit(const CombineParams& p, const Round& round, const ActiveRanks& active, u32 unit,
                                          u32 row_bytes) {
  constexpr u32 PEERS = EP_SIZE > 1 ? EP_SIZE - 1 : 1;
  const u32 segment = unit % p.segments, row = unit / p.segments;
  const u32 slot = row / PEERS, src_rank = (p.ep_rank + 1 + row % PEERS) % EP_SIZE;
  if (src_rank == p.ep_rank || !active.has(src_rank) || !is_valid(p, round, src_rank, slot)) return;
  const u64 most = p.runtime_max_tokens_per_rank;
  u8* const area = reinterpret_cast<u8*>(p.workspace + src_rank * p.stride + p.dispatch_offset);
  copy_segment(p, src_rank * most + slot, area + (p.ep_rank * most + slot) * row_bytes, segment, row_bytes);
  // Partner: await_pushed.
  release_row(pushed_flag(p, src_rank, p.ep_rank, slot, segment), round.number);
}

// Waits for a segment of all rows of a token that other ranks hold. Every lane acquires for its own reads.
__device__ __forceinline__ bool await_pushed(const CombineParams& p, const Round& round, const ActiveRanks& active,
                                             const Holders& holders, u32 segment) {
  return for_each_rank(holders.set(active), [&](u32 rank) {
    if (rank == p.ep_rank) return true;
    const u32* const flag = pushed_flag(p, p.ep_rank, rank, holders.slot_at(rank), segment);
    return bool(__all_sync(ALL_LANES, await_flag(round, flag, rank)));
  });
}

template <u32 TYPE>
__device__ __forceinline__ void combine_push(const CombineParams& p) {
  __shared__ u32 verdict;
  if (threadIdx.x == 0) verdict = VERDICT_FINE;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 self = warp * gridDim.x + blockIdx.x, step = p.push_warps * gridDim.x;
  const u32 row_bytes = p.row_elements * size_of(TYPE);
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  touch(p);
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
  if (blockIdx.x == 0 && warp == blockDim.x / 32 - 1) {
    send_headers(p, round, active, 0);
    // Our next dispatch asks whether it may write where these rows landed.
    if (lane == 0) round.state[STATE_PUSHED_ROUND] = round.number;
  }
  // Every CTA waits for all ranks: a rank that has begun needs what it was dispatched no more. And a row that does not
  // come is then its sender's fault, not that of a third rank for which the sender waits.
  bool fine = true;
  for (u32 rank = warp; fine && rank < EP_SIZE; rank += blockDim.x / 32) {
    u32 num_flags;
    if (active.has(rank)) fine = check_header(p, round, rank, num_flags);
  }
  // Not asked of the verdict, which other warps may change by now: lanes of a warp must all go on, or none.
  fine = __syncthreads_and(fine);
  if (fine && warp < p.push_warps && EP_SIZE > 1) {
    const u32 units = (EP_SIZE - 1) * p.runtime_max_tokens_per_rank * p.segments;
    for (u32 unit = self; unit < units;) {
      u32 next = 0;
      if (lane == 0) next = step + atomicAdd(round.counter(STAGE_CLAIMS, round.parity), 1);
      push_unit(p, round, active, unit, row_bytes);
      unit = __shfl_sync(ALL_LANES, next, 0);
    }
  }
  const u32 units = p.num_tokens * p.segments;
  u32* const claims = round.counter(COMBINE_CLAIMS, round.parity);
  u32 unit = lane == 0 && fine ? atomicAdd(claims, 1) : 0;
  unit = __shfl_sync(ALL_LANES, unit, 0);
  while (fine && unit < units) {
    u32 next = 0;
    if (lane == 0) next = atomicAdd(claims, 1);
    Holders holders;
    holders.load(p, unit / p.segments);
    fine = await_pushed(p, round, active, holders, unit % p.segments);
    if (fine) sum_unit<TYPE, true>(p, active, holders, unit, row_bytes);
    unit = __shfl_sync(ALL_LANES, next, 0);
  }
  if (QUANTIZES) finish_rows(p, p.num_tokens + blockIdx.x, gridDim.x);
  if (end_round(round, COMBINE_EXITS, COMBINE_CLAIMS, gridDim.x, blockIdx.x == 0))
    void_combine(p, threadIdx.x, blockDim.x);
}
