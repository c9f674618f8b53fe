// nvlink/kernels/combine_bulk: rows of many tokens read where they lie.
//
// Owns the bulk regime's way back. A payload outside the combine area is copied there first, in the same launch; then
// every warp claims units of tokens and reads their rows from the ranks that hold them.
#pragma once

#include "combine_ends.cuh"
#include "combine_low_precision.cuh"

// A warp copies a segment of the payload's row to `to`, where a row of its own starts.
__device__ __forceinline__ void copy_segment(const CombineParams& p, u64 row, u8* to, u32 segment, u32 row_bytes) {
  u32 begin, end;
  segment_of(row_bytes, segment, p.segments, begin, end);
  Destinations there;
#pragma unroll
  for (u32 i = 0; i < (TOP_K + 31) / 32; ++i) there.ranks[i] = there.slots[i] = -1;
  if (threadIdx.x % 32 == 0) there.ranks[0] = there.slots[0] = 0;
  RowBytes bytes;
  copy_row(bytes, false, reinterpret_cast<const u8*>(p.payload) + row * row_bytes, begin, end,
           common_alignment(p.payload | row_bytes), there, [&](i32, i32) { return to; });
}

// Copies a segment of one payload row into this rank's combine area, if the row is anybody's but ours.
__device__ __forceinline__ void stage_unit(const CombineParams& p, const Round& round, const ActiveRanks& active,
                                           u32 unit, u32 row_bytes) {
  const u32 segment = unit % p.segments, row = unit / p.segments;
  const u32 src_rank = row / p.runtime_max_tokens_per_rank, within = row % p.runtime_max_tokens_per_rank;
  if (src_rank == p.ep_rank || !active.has(src_rank) || !is_valid(p, round, src_rank, within)) return;
  u8* const area = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride + p.combine_offset);
  copy_segment(p, row, area + u64(row) * row_bytes, segment, row_bytes);
}

// The rows of one token, in ascending rank of their holders: lane i holds where row i and row i + 32 start.
struct HeldRows {
  static constexpr u32 WORDS = (TOP_K + 31) / 32;
  u64 starts[WORDS];
  u32 count;

  // PUSHED: the holders have sent them here; otherwise they lie where the holders keep them.
  template <bool PUSHED>
  __device__ __forceinline__ void find(const CombineParams& p, const ActiveRanks& active, const Holders& holders,
                                       u32 row_bytes) {
    count = 0;
    for_each_rank(holders.set(active), [&](u32 rank) {
      // Our own rows never left the payload.
      const bool here = PUSHED && rank != p.ep_rank;
      const u64 area = here                ? p.workspace + p.ep_rank * p.stride + p.dispatch_offset
                       : rank == p.ep_rank ? p.payload
                                           : p.workspace + rank * p.stride + p.combine_offset;
      const u64 block = u64(here ? rank : p.ep_rank) * p.runtime_max_tokens_per_rank;
      const u64 start = area + (block + holders.slot_at(rank)) * row_bytes;
#pragma unroll
      for (u32 i = 0; i < WORDS; ++i)
        if (count == i * 32 + threadIdx.x % 32) starts[i] = start;
      ++count;
      return true;
    });
  }

  __device__ __forceinline__ const u8* operator[](u32 index) const {
    u64 start = __shfl_sync(ALL_LANES, starts[0], index % 32);
    if (WORDS == 2 && index >= 32) start = __shfl_sync(ALL_LANES, starts[WORDS - 1], index % 32);
    return reinterpret_cast<const u8*>(start);
  }
};

template <u32 BATCH>
__device__ __forceinline__ void load_batch(const u8* row, u32 at, u32 end, Vec16* held) {
#pragma unroll
  for (u32 i = 0; i < BATCH; ++i) {
    const u32 byte = at + (i * 32 + threadIdx.x % 32) * 16;
    held[i] = row && byte < end ? load16(row + byte) : Vec16{0, 0, 0, 0};
  }
}

template <u32 TYPE>
__device__ __forceinline__ void add_vec(float* sums, const Vec16& v) {
  constexpr u32 STEP = per_word(TYPE);
  add_word<TYPE>(sums, v.x);
  add_word<TYPE>(sums + STEP, v.y);
  add_word<TYPE>(sums + 2 * STEP, v.z);
  add_word<TYPE>(sums + 3 * STEP, v.w);
}

// A segment of a token that at most two ranks hold: both rows are in flight before either is used, and no sum waits in
// registers for a third.
template <u32 TYPE>
__device__ __forceinline__ void sum_two(const CombineParams& p, const HeldRows& rows, u8* out, u32 begin, u32 end) {
  constexpr u32 BATCH = 7, COUNT = 16 / size_of(TYPE);
  const u8* const first = rows.count > 0 ? rows[0] : nullptr;
  const u8* const second = rows.count > 1 ? rows[1] : nullptr;
#pragma unroll 1
  for (u32 at = begin; at < end; at += 32 * BATCH * 16) {
    Vec16 a[BATCH], b[BATCH];
    load_batch<BATCH>(first, at, end, a);
    load_batch<BATCH>(second, at, end, b);
#pragma unroll
    for (u32 i = 0; i < BATCH; ++i) {
      const u32 byte = at + (i * 32 + threadIdx.x % 32) * 16;
      if (byte >= end) continue;
      float sums[COUNT] = {};
      add_vec<TYPE>(sums, a[i]);
      add_vec<TYPE>(sums, b[i]);
      store_sums<TYPE, COUNT>(out, byte / size_of(TYPE), p.row_elements, sums, p.output_type);
    }
  }
}

template <u32 TYPE>
__device__ __forceinline__ void sum_many(const CombineParams& p, const HeldRows& rows, u8* out, u32 begin, u32 end) {
  constexpr u32 BATCH = 4, COUNT = 16 / size_of(TYPE);
#pragma unroll 1
  for (u32 at = begin; at < end; at += 32 * BATCH * 16) {
    float sums[BATCH * COUNT] = {};
#pragma unroll 1
    for (u32 row = 0; row < rows.count; row += 2) {
      Vec16 a[BATCH], b[BATCH];
      const u8* const second = rows[min(row + 1, rows.count - 1)];
      load_batch<BATCH>(rows[row], at, end, a);
      load_batch<BATCH>(row + 1 < rows.count ? second : nullptr, at, end, b);
#pragma unroll
      for (u32 i = 0; i < BATCH; ++i) {
        add_vec<TYPE>(sums + i * COUNT, a[i]);
        add_vec<TYPE>(sums + i * COUNT, b[i]);
      }
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; ++i) {
      const u32 byte = at + (i * 32 + threadIdx.x % 32) * 16;
      if (byte < end) store_sums<TYPE, COUNT>(out, byte / size_of(TYPE), p.row_elements, sums + i * COUNT, p.output_type);
    }
  }
}

// Element by element, for rows that do not start on 16 bytes.
template <u32 TYPE>
__device__ __forceinline__ void sum_narrow(const CombineParams& p, const HeldRows& rows, u8* out, u32 begin, u32 end) {
  constexpr u32 SIZE = size_of(TYPE);
#pragma unroll 1
  for (u32 first = begin; first < end; first += 32 * SIZE) {
    const u32 byte = first + threadIdx.x % 32 * SIZE;
    float sum = 0.0f;
#pragma unroll 1
    for (u32 row = 0; row < rows.count; ++row) {
      const u8* const from = rows[row] + byte;
      if (byte >= end) continue;
      sum += to_float<TYPE>(SIZE == 4 ? *reinterpret_cast<const u32*>(from) : *reinterpret_cast<const u16*>(from));
    }
    if (byte < end) store_sums<TYPE, 1>(out, byte / SIZE, p.row_elements, &sum, p.output_type);
  }
}

// Adds a segment of one token's rows.
template <u32 TYPE, bool PUSHED>
__device__ __forceinline__ void sum_unit(const CombineParams& p, const ActiveRanks& active, const Holders& holders, u32 unit,
                                         u32 row_bytes) {
  const u32 token = unit / p.segments, segment = unit % p.segments;
  HeldRows rows;
  rows.find<PUSHED>(p, active, holders, row_bytes);
  u32 begin, end;
  segment_of(row_bytes, segment, p.segments, begin, end);
  u8* const out = reinterpret_cast<u8*>(p.output) + u64(token) * p.row_elements * size_of(p.output_type);
  if (common_alignment(p.payload | row_bytes) != 16) sum_narrow<TYPE>(p, rows, out, begin, end);
  else if (EP_SIZE <= 2 || TOP_K <= 2 || rows.count <= 2) sum_two<TYPE>(p, rows, out, begin, end);
  else sum_many<TYPE>(p, rows, out, begin, end);
  finish_segment(p, token, begin / size_of(TYPE), end / size_of(TYPE));
}

template <u32 TYPE>
__device__ __forceinline__ void combine_bulk(const CombineParams& p) {
  __shared__ u32 verdict;
  if (threadIdx.x == 0) verdict = VERDICT_FINE;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, adders = blockDim.x / 32 - 1;
  const u32 self = warp * gridDim.x + blockIdx.x, step = adders * gridDim.x;
  const u32 row_bytes = TYPE == TYPE_E4M3 ? p.row_pitch : p.row_elements * size_of(TYPE);
  // Rows of the wire are made here, ours too, which other CTAs then read.
  const bool makes = TYPE == TYPE_E4M3 && p.staged && p.scaled;
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  touch(p);
  __syncthreads();
  await_previous_kernel();
  next_kernel_may_come();

  bool failed;
  u8* const state = mine + p.round_state_offset;
  const RoundWords words = load_round(state);
  // Orders the payload, written by earlier kernels, before the headers; said here, it passes while the words come.
  if (warp == adders && blockIdx.x == 0) release_rows();
  const Round round = begin_round(words, PHASE_COMBINE, state, p.host_words, &verdict, failed);
  const ActiveRanks active{mine + p.rank_mask_offset};
  if (failed) {
    void_combine(p, u64(blockIdx.x) * blockDim.x + threadIdx.x, u64(gridDim.x) * blockDim.x);
    return;
  }
  if (warp == adders && blockIdx.x == 0) {
    // Partner: check_header, in every rank.
    send_headers(p, round, active, p.staged ? gridDim.x : 0);
  }
  if (p.staged) {
    if (warp < adders) {
      const u32 units = EP_SIZE * p.runtime_max_tokens_per_rank * p.segments;
      for (u32 unit = self; unit < units;) {
        u32 next = 0;
        if (lane == 0) next = step + atomicAdd(round.counter(STAGE_CLAIMS, round.parity), 1);
        if (makes) stage_e4m3_unit(p, round, active, unit);
        else stage_unit(p, round, active, unit, row_bytes);
        unit = __shfl_sync(ALL_LANES, next, 0);
      }
    }
    __syncthreads();
    if (warp == adders) {
      release_rows();
      for (u32 rank = lane; rank < EP_SIZE; rank += 32)
        if ((rank != p.ep_rank || makes) && active.has(rank))
          raise_flag(reinterpret_cast<u32*>(p.workspace + rank * p.stride + p.combine_flags_offset) +
                         u64(round.parity * EP_SIZE + p.ep_rank) * MAX_CTAS + blockIdx.x,
                     round.number);
    }
  }
  // Whose rows the first unit wants is known here, and looked up while the others' words are on their way.
  const u32 units = p.num_tokens * p.segments;
  Holders holders;
  if (TYPE != TYPE_E4M3 && warp < adders && self < units) holders.load(p, self / p.segments);
  // Every CTA waits for all ranks, then reads.
  bool fine = true;
  for (u32 rank = warp; fine && rank < EP_SIZE; rank += adders + 1) {
    if (!active.has(rank)) continue;
    u32 num_flags = 0;
    fine = check_header(p, round, rank, num_flags);
    if (rank != p.ep_rank || makes) {
      const u32* const flags = reinterpret_cast<const u32*>(mine + p.combine_flags_offset) +
                               u64(round.parity * EP_SIZE + rank) * MAX_CTAS;
      for (u32 i = lane; fine && i < num_flags; i += 32) fine = await_flag(round, flags + i, rank);
    }
  }
  // Not asked of the verdict, which other warps may change by now: lanes of a warp must all go on, or none.
  if (__syncthreads_and(fine) && warp < adders) {
    for (u32 unit = self; unit < units;) {
      u32 next = 0;
      if (lane == 0) next = step + atomicAdd(round.counter(COMBINE_CLAIMS, round.parity), 1);
      if constexpr (TYPE == TYPE_E4M3) {
        const u32 alignment = common_alignment(makes ? row_bytes : p.payload | row_bytes);
        if (alignment >= 4 && p.row_elements % 4 == 0) sum_e4m3_unit<4>(p, active, unit, makes);
        else sum_e4m3_unit<1>(p, active, unit, makes);
      } else {
        if (unit != self) holders.load(p, unit / p.segments);
        sum_unit<TYPE, false>(p, active, holders, unit, row_bytes);
      }
      unit = __shfl_sync(ALL_LANES, next, 0);
    }
  }
  if (QUANTIZES) finish_rows(p, p.num_tokens + blockIdx.x, gridDim.x);
  if (end_round(round, COMBINE_EXITS, COMBINE_CLAIMS, gridDim.x, blockIdx.x == 0))
    void_combine(p, threadIdx.x, blockDim.x);
}
