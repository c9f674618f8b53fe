// nvlink/kernels/dispatch_small: rows of few tokens, their round carried in every line.
//
// Owns the small regime's way out and in. Row 0 of the grid routes, tells and counts; the others send the tokens
// 0..R-1 as lines into the receivers' landing areas, then copy arrived lines to where the rows belong. All sends of a
// CTA precede all its waits, so that resident CTAs of all ranks always make progress.
#pragma once

#include "routing.cuh"
#include "rows.cuh"
#include "dispatch_ends.cuh"
#if WIRE_FORMAT
#include "quantize.cuh"
#endif

__device__ __forceinline__ u64* dispatch_line(const DispatchParams& p, u32 rank, u32 parity, u32 src_rank, u32 token,
                                              u32 num_lines) {
  const u64 row = (u64(parity * EP_SIZE + src_rank) * p.landing_tokens + token) * num_lines;
  return reinterpret_cast<u64*>(p.workspace + rank * p.stride + p.dispatch_landing_offset + row * LINE_BYTES);
}

// What part `part` of a token's lines carries: two pieces; the last part of a line one, and the tag.
struct Part {
  u32 part;
  Piece low, high;

  __device__ __forceinline__ void locate(const DispatchParams& p, u32 which) {
    part = which;
    low.locate(p, at());
    high.locate(p, part % 8 == 7 ? ALL_LANES : at() + 8);
  }

  __device__ __forceinline__ u32 at() const { return part / 8 * LINE_DATA_BYTES + part % 8 * 16; }

  // A row of ours: what came, or the padded slot that nothing came for.
  __device__ __forceinline__ void settle(const DispatchParams& p, u32 row, bool hit, u64 low_word, u64 high_word,
                                         bool real) const {
    if (hit) {
      low.store(row, low_word, real);
      high.store(row, high_word, real);
    } else if (real) {
      scrub_piece(p, at(), row);
      if (part % 8 != 7) scrub_piece(p, at() + 8, row);
    }
    if (ROW_ORDER_TOKEN && part == 0 && real)
      reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride)[p.row_valid_offset + row] = hit;
  }
};

// Sends one part to every rank of its token.
__device__ __forceinline__ void send_part(const DispatchParams& p, const Round& round, const RankSet& ranks, u32 token,
                                          u32 part, u32 num_lines, u64 low, u64 high) {
  if (part % 8 == 7) high = u64(round.number) << 32;
#pragma unroll
  for (u32 i = 0; i < RANK_WORDS; ++i) {
    u32 left = ranks.words[i];
    while (left) {
      const u32 dst_rank = i * 32 + __ffs(left) - 1;
      left &= left - 1;
      // In token order our own row has been put in its place.
      if (ROW_ORDER_TOKEN && dst_rank == p.ep_rank) continue;
u64* const to = dispatch_line(p, dst_rank, round.parity, p.ep_rank, token, num_lines) + u64(part) * 2;
      if (round.real) store_line_part(to, low, high);
    }
  }
}

// What the grid's row 0 does. Words first: every receiver's copying waits for them. What a warp does besides is spread, so
// that few do two things one after the other. `ranks`: of the warp's first word.
__device__ __forceinline__ void route_and_count(const DispatchParams& p, const Round& round, const RankSet& active,
                                                RankSet ranks, Placing& placing) {
  const u32 warps = blockDim.x / 32, warp = blockIdx.x * warps + threadIdx.x / 32, step = gridDim.x * warps;
  const u32 words = (p.runtime_max_tokens_per_rank + 31) / 32;
#pragma unroll 1
  for (u32 word = warp; word < words; word += step) {
    if (word != warp) ranks = word_ranks(p, active, word, round.real);
    publish_bits(p, round, active, word, ranks);
  }
  if (warp == step - 1) send_headers(p, round, active, 0);
  if (p.num_eplb_stats && round.real)
    send_eplb(p, round, active, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
  // Task 0 checks headers, 1.. count what came from each rank and what went to each.
#pragma unroll 1
  for (u32 task = step - 1 - warp; task < 1 + 2 * EP_SIZE; task += step) {
    if (task == 0) check_headers(p, round, active);
    else if (task <= EP_SIZE) count_received(p, round, active, task - 1);
    else count_sent(p, round, active, task - 1 - EP_SIZE);
  }
#pragma unroll 1
  for (u32 word = (warp + step / 2) % step; word < words; word += step)
    if (!write_tables(p, round, active, word, placing)) return;
  if (p.num_eplb_stats && round.real)
    receive_eplb(p, round, active, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

// The grid's row 0.
__device__ __forceinline__ void dispatch_small_routing(const DispatchParams& p, u32* verdict) {
  __shared__ Placing placings[MAX_THREADS / 32];
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  u8* const state = mine + p.round_state_offset;
  const u32 first_word = (blockIdx.x * blockDim.x + threadIdx.x) / 32, num_ctas = gridDim.x * gridDim.y;
  Round round = rehearsal(PHASE_DISPATCH, state, p.host_words, verdict);
#pragma unroll 1
  for (bool real = false;; real = true) {
    RoundWords round_words;
    if (real) {
      await_previous_kernel();
      next_kernel_may_come();
      round_words = load_round(state);
    }
    const RankSet active = active_ranks(mine + p.rank_mask_offset, real);
    RankSet ranks;
    ranks.clear();
    if (first_word * 32 < p.runtime_max_tokens_per_rank) ranks = word_ranks(p, active, first_word, real);
    if (real) {
      bool failed;
      round = begin_round(round_words, PHASE_DISPATCH, state, p.host_words, verdict, failed);
      if (failed) {
        void_dispatch(p, u64(blockIdx.x) * blockDim.x + threadIdx.x, u64(num_ctas) * blockDim.x);
        return;
      }
    }
    route_and_count(p, round, active, ranks, placings[threadIdx.x / 32]);
    if (real) break;
  }
  if (end_round(round, DISPATCH_EXITS, DISPATCH_CLAIMS, num_ctas, blockIdx.x == 0))
    void_dispatch(p, threadIdx.x, blockDim.x);
}

// Waits for a part of one row from one source, and puts it in its place: its line in the landing area has come, or the
// word that says that there will be none.
__device__ __forceinline__ bool receive_part(const DispatchParams& p, const Round& round, u32 src_rank, bool active,
                                             u32 token, u32 num_lines, const Part& here) {
  const u32 lane = threadIdx.x % 32;
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  const u64* const words = valid_words(mine, p.valid_bits_offset, p.max_num_tokens, round.parity, src_rank);
  const u64* const from = dispatch_line(p, p.ep_rank, round.parity, src_rank, token, num_lines) + u64(here.part) * 2;
  const bool inside = here.part < num_lines * 8;
  u64 low = 0, high = 0;
  bool hit = false;
  // Both are looked at together: neither waits for the other, and a line that is here needs no word.
  Patience patience;
  while (active) {
    const u64 word = round.real ? load_relaxed(words + token / 32) : 0;
    if (inside && round.real) load_line_part(from, low, high);
    const u32 tag = u32(__shfl_sync(ALL_LANES, high, lane | 7) >> 32);
    const bool told = u32(word >> 32) == round.number;
    hit = inside && tag == round.number;
    const bool missing = told && !(word >> (token % 32) & 1);
    if (__all_sync(ALL_LANES, hit || missing || !inside)) break;
    if (__any_sync(ALL_LANES, give_up(round, patience, told ? SIGNAL_ROW : SIGNAL_BITS, src_rank,
                                      told ? tag : u32(word >> 32))))
      return false;
  }
  u32 slot = token;
  if (!ROW_ORDER_TOKEN) {
    u32 before = 0;
    if (active && !bits_before(round, words, token, src_rank, before)) return false;
    // Padded slots are shared out among the tokens that did not come, from the block's end: no count is needed.
    slot = hit ? before : p.runtime_max_tokens_per_rank - 1 - (token - before);
  }
  if (inside) here.settle(p, src_rank * p.runtime_max_tokens_per_rank + slot, hit, low, high, round.real);
  return true;
}

// The grid's other rows. Each sweep moves as many parts of every token as a row of the grid has threads; one does, unless
// rows are very long. All sends of a sweep precede its waits.
__device__ __forceinline__ void dispatch_small_rows(const DispatchParams& p, u32* verdict) {
#if WIRE_FORMAT
  extern __shared__ u64 image[];
#endif
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  u8* const state = mine + p.round_state_offset;
  const u32 tokens = p.runtime_max_tokens_per_rank, first = blockIdx.y - 1, rows = gridDim.y - 1;
  const u32 num_lines = (image_bytes(p) + LINE_DATA_BYTES - 1) / LINE_DATA_BYTES;
  const u32 num_ctas = gridDim.x * gridDim.y, cta = blockIdx.y * gridDim.x + blockIdx.x;
  const u32 first_part = blockIdx.x * blockDim.x + threadIdx.x, parts = gridDim.x * blockDim.x;
  Part here;
  here.locate(p, first_part);
  RankSet active = active_ranks(nullptr, false);
  Round round = rehearsal(PHASE_DISPATCH, state, p.host_words, verdict);
  bool fine = true;
  // Sweep 0 is a rehearsal of sweep 1.
#pragma unroll 1
  for (u32 sweep = 0;; ++sweep) {
    const bool real = sweep > 0;
    if (sweep == 1) {
      await_previous_kernel();
      next_kernel_may_come();
    }
    if (sweep > 1) here.locate(p, here.part + parts);
    const bool inside = here.part < num_lines * 8;
    // The first token's bytes and ids first: they take longest to come.
    TokenIds ids;
    u64 low = 0, high = 0;
    if (first < p.num_tokens) {
#if !WIRE_FORMAT
      low = here.low.load(first, real);
      high = here.high.load(first, real);
#endif
      ids.load(p, first, real);
    }
    if (sweep == 1) {
      active = active_ranks(mine + p.rank_mask_offset);
      bool failed;
      round = begin_round(load_round(state), PHASE_DISPATCH, state, p.host_words, verdict, failed);
      if (failed) {
        void_dispatch(p, u64(cta) * blockDim.x + threadIdx.x, u64(num_ctas) * blockDim.x);
        return;
      }
    }
    const u32 end = real ? tokens : min(tokens, first + 1);
#pragma unroll 1
    for (u32 token = first; token < end; token += rows) {
      RankSet ranks;
      ranks.clear();
      if (token < p.num_tokens) {
#if WIRE_FORMAT
        __syncthreads();
        if (real) quantize_image(p, token, image);
        __syncthreads();
        low = here.low.count ? image[here.at() / 8] : 0;
        high = here.high.count ? image[here.at() / 8 + 1] : 0;
#endif
        ranks = ids.ranks(p, active);
      }
      // What is sent next is read before what is sent now is stored.
      u64 next_low = 0, next_high = 0;
      if (token + rows < p.num_tokens && real) {
#if !WIRE_FORMAT
        next_low = here.low.load(token + rows);
        next_high = here.high.load(token + rows);
#endif
        ids.load(p, token + rows);
      }
      if (inside) {
        send_part(p, round, ranks, token, here.part, num_lines, low, high);
        if (ROW_ORDER_TOKEN) here.settle(p, p.ep_rank * tokens + token, ranks.has(p.ep_rank), low, high, real);
      }
      low = next_low;
      high = next_high;
    }
#pragma unroll 1
    for (u32 token = first; fine && token < end; token += rows)
#pragma unroll 1
      for (u32 i = ROW_ORDER_TOKEN; fine && i < EP_SIZE; ++i) {
        // Ours first: it is here while the others' are still on the wire.
        const u32 src_rank = (p.ep_rank + i) % EP_SIZE;
        fine = receive_part(p, round, src_rank, !RANK_MASK || active.has(src_rank), token, num_lines, here);
      }
    // All warps of a CTA make the same sweeps, also behind a failure: there are barriers in them.
    if (real && here.part - threadIdx.x + parts >= num_lines * 8) break;
  }
  if (end_round(round, DISPATCH_EXITS, DISPATCH_CLAIMS, num_ctas, false)) void_dispatch(p, threadIdx.x, blockDim.x);
}

// Bound by how many CTAs are resident, so registers are few; but where quantising or sets of many ranks would spill.
constexpr bool SMALL_IS_LEAN = !WIRE_FORMAT && !RANK_MASK && RANK_WORDS == 1;

extern "C" __global__ void __launch_bounds__(SMALL_IS_LEAN ? MAX_SMALL_THREADS : MAX_THREADS, SMALL_IS_LEAN ? 2 : 1)
    dispatch_small(const __grid_constant__ DispatchParams p) {
  __shared__ u32 verdict;
  touch(p);
  if (threadIdx.x == 0) verdict = VERDICT_FINE;
  __syncthreads();
  if (blockIdx.y == 0) dispatch_small_routing(p, &verdict);
  else dispatch_small_rows(p, &verdict);
}
