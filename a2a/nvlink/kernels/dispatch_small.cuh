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

// What part `part` of a token's lines carries: two pieces; the last part of a line one, and the tag.
struct Part {
  u32 part;
  Piece low, high;

  __device__ __forceinline__ Part(const DispatchParams& p, u32 part) : part(part) {
    low.locate(p, at());
    high.locate(p, part % 8 == 7 ? ALL_LANES : at() + 8);
  }

  __device__ __forceinline__ u32 at() const { return part / 8 * LINE_DATA_BYTES + part % 8 * 16; }

  // A row of ours: what came, or the padded slot that nothing came for.
  template <bool WORDS>
  __device__ __forceinline__ void settle(const DispatchParams& p, u32 row, bool hit, u64 low_word, u64 high_word) const {
    if (hit) {
      low.store<WORDS>(row, low_word);
      high.store<WORDS>(row, high_word);
    } else {
      scrub_piece(p, at(), row);
      if (part % 8 != 7) scrub_piece(p, at() + 8, row);
    }
    if (ROW_ORDER_TOKEN && part == 0)
      reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride)[p.row_valid_offset + row] = hit;
  }
};

// Where a part of the lines of a token lies in the landing areas: a row of lines per parity, source and token.
struct Landing {
  u64 ours;  // in rank 0's area, from us; other ranks' lie a stride further each
  u64 mine;  // in our area, from rank 0
  u32 of_source;

  __device__ __forceinline__ Landing(const DispatchParams& p, u32 token, u32 part, u32 num_lines) {
    of_source = p.landing_tokens * num_lines * LINE_BYTES;
    mine = p.workspace + p.dispatch_landing_offset + (token * num_lines * LINE_BYTES + part * 16);
    ours = mine + u64(p.ep_rank) * of_source;
    mine += p.ep_rank * p.stride;
  }
};

// Whether our own rows need no line. In token order they are put in their places at once, in compact order from where they
// came once their slots are known; what has been quantised is nowhere else.
constexpr bool OWN_STAYS = ROW_ORDER_TOKEN || !WIRE_FORMAT;

// Sends one part to every rank of its token, `line` being where it goes at rank 0.
__device__ __forceinline__ void send_part(const DispatchParams& p, const RankSet& ranks, u64 line, u64 low, u64 high) {
#pragma unroll
  for (u32 i = 0; i < RANK_WORDS; ++i) {
    u32 left = ranks.words[i];
    if (OWN_STAYS && p.ep_rank / 32 == i) left &= ~(1u << p.ep_rank % 32);
#pragma unroll 1
    while (left) {
      const u32 dst_rank = i * 32 + __ffs(left) - 1;
      left &= left - 1;
      store_line_part(reinterpret_cast<u64*>(line + dst_rank * p.stride), low, high);
    }
  }
}

// What the grid's row 0 does. Words first: every receiver's copying waits for them. What a warp does besides is spread, so
// that few do two things one after the other. `ranks` and `place`: of the warp's first word.
__device__ __forceinline__ void route_and_count(const DispatchParams& p, const Round& round, const RankSet& active,
                                                const RankSet& ranks, const WordPlace& place, Placing& placing) {
  const u32 warps = blockDim.x / 32, warp = blockIdx.x * warps + threadIdx.x / 32, step = gridDim.x * warps;
  const u32 words = (p.runtime_max_tokens_per_rank + 31) / 32;
  if (warp < words) publish_bits(p, round, active, place, ranks);
#pragma unroll 1
  for (u32 word = warp + step; word < words; word += step)
    publish_bits(p, round, active, WordPlace(p, word), word_ranks(p, active, word));
  if (warp == step - 1) send_headers(p, round, active, 0);
  if (p.num_eplb_stats) send_eplb(p, round, active, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
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
  if (p.num_eplb_stats) receive_eplb(p, round, active, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

// The grid's row 0. As in every kernel of this regime, what needs no earlier kernel's result is computed before the wait
// for it: nothing hides the instructions between that wait and the first store, and few tokens take little else.
__device__ __forceinline__ void dispatch_small_routing(const DispatchParams& p, u32* verdict) {
  __shared__ Placing placings[MAX_THREADS / 32];
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  u8* const state = mine + p.round_state_offset;
  const u32 first_word = (blockIdx.x * blockDim.x + threadIdx.x) / 32, num_ctas = gridDim.x * gridDim.y;
  const u32 token = first_word * 32 + threadIdx.x % 32;
  const WordPlace place(p, first_word);
  const u32* const ids = ids_of(p, token);
  if (!known_by_now(place.theirs, place.sent, ids, state)) return;
  await_previous_kernel();
  next_kernel_may_come();
  const RankSet active = active_ranks(mine + p.rank_mask_offset);
  const RoundWords round_words = load_round(state);
  RankSet ranks;
  ranks.clear();
  if (token < p.num_tokens) ranks = ranks_of(p, active, ids);
  bool failed;
  const Round round = begin_round(round_words, PHASE_DISPATCH, state, p.host_words, verdict, failed);
  if (failed) {
    void_dispatch(p, u64(blockIdx.x) * blockDim.x + threadIdx.x, u64(num_ctas) * blockDim.x);
    return;
  }
  __syncwarp();
  route_and_count(p, round, active, ranks, place, placings[threadIdx.x / 32]);
  if (end_round(round, DISPATCH_EXITS, DISPATCH_CLAIMS, num_ctas, blockIdx.x == 0))
    void_dispatch(p, threadIdx.x, blockDim.x);
}

// Waits for a part of one row from one source, and puts it in its place: its line has come, or the words that say that
// there will be none and, in compact order, how many come before it. OWN: it is ours, and lies where it came from.
template <bool WORDS, bool OWN>
__device__ __forceinline__ bool receive_part(const DispatchParams& p, const Round& round, u32 src_rank, bool active,
                                             u32 token, const u64* words, const u64* line, bool inside,
                                             const Part& here) {
  // All up to the token's count in compact order, and a lane has one of them: the small regime has no more.
  static_assert(MAX_LANDING_TOKENS <= 32 * 32, "");
  const u32 at = ROW_ORDER_TOKEN ? token / 32 : threadIdx.x % 32;
  u64 low = 0, high = 0, word = 0;
  bool hit = false;
  if (OWN && inside && token < p.num_tokens) {
    low = here.low.load<WORDS>(token);
    high = here.high.load<WORDS>(token);
  }
  // Both are looked at together: neither waits for the other, and a line that is here needs no word in token order.
  Patience patience;
  while (active) {
    word = load_relaxed(words + min(at, token / 32));
    if (!OWN && inside) load_line_part(line, low, high);
    bool told = u32(word >> 32) == round.number;
    u32 bits = u32(word);
    if (!ROW_ORDER_TOKEN) {
      told = __all_sync(ALL_LANES, told);
      bits = __shfl_sync(ALL_LANES, bits, token / 32);
    }
    const bool comes = bits >> (token % 32) & 1;
    const u32 tag = OWN ? 0 : u32(__shfl_sync(ALL_LANES, high, threadIdx.x % 32 | 7) >> 32);
    hit = inside && (OWN ? told && comes : tag == round.number);
    const bool settled = hit || (told && !comes) || !inside;
    if (__all_sync(ALL_LANES, settled && (ROW_ORDER_TOKEN || told))) break;
    if (__any_sync(ALL_LANES, give_up(round, patience, told ? SIGNAL_ROW : SIGNAL_BITS, src_rank,
                                      told ? tag : u32(word >> 32))))
      return false;
  }
  u32 slot = token;
  if (!ROW_ORDER_TOKEN) {
    const u32 earlier = at < token / 32 ? ALL_LANES : (1u << token % 32) - 1;
    const u32 before = __reduce_add_sync(ALL_LANES, at > token / 32 ? 0 : __popc(u32(word) & earlier));
    // Padded slots are shared out among the tokens that did not come, from the block's end: no count is needed.
    slot = hit ? before : p.runtime_max_tokens_per_rank - 1 - (token - before);
  }
  if (inside) here.settle<WORDS>(p, src_rank * p.runtime_max_tokens_per_rank + slot, hit, low, high);
  return true;
}

// The grid's other rows. Each sweep moves as many parts of every token as a row of the grid has threads. All sends of a
// sweep precede its waits. WORDS: one sweep moves all, and all payloads are of whole words that lie on multiples of 8; it
// is nearly always so.
template <bool WORDS>
__device__ __forceinline__ void dispatch_small_rows(const DispatchParams& p, u32* verdict) {
#if WIRE_FORMAT
  extern __shared__ u64 image[];
  bool has_image = false;
#endif
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  const u8* const state = mine + p.round_state_offset;
  const u32 tokens = p.runtime_max_tokens_per_rank, first = blockIdx.y - 1, rows = gridDim.y - 1;
  const u32 num_lines = (image_bytes(p) + LINE_DATA_BYTES - 1) / LINE_DATA_BYTES;
  const u32 num_ctas = gridDim.x * gridDim.y, cta = blockIdx.y * gridDim.x + blockIdx.x;
  const u32 own_row = p.ep_rank * tokens;
  RankSet active;
  Round round;
  bool fine = true, begun = false;
  u32 part = blockIdx.x * blockDim.x + threadIdx.x;
  do {
    const Part here(p, part);
    const Landing landing(p, first, part, num_lines);
    const u32* const first_ids = ids_of(p, first);
#if WIRE_FORMAT
    TokenParts parts;
    parts.locate(p);
#endif
    const bool inside = part < num_lines * 8, is_tag = part % 8 == 7;
    const u8* const low_from = here.low.from + u64(first) * here.low.row_bytes;
    const u8* const high_from = here.high.from + u64(first) * here.high.row_bytes;
    if (WORDS || !begun) {
      if (!known_by_now(landing.ours, landing.mine, landing.of_source, state, first_ids, low_from, high_from, here.low.to,
                        here.high.to))
        return;
      await_previous_kernel();
      next_kernel_may_come();
    }
    TokenIds ids;
    u64 low = 0, high = 0;
    if (first < p.num_tokens) {
      ids.load(p, first_ids);
#if WIRE_FORMAT
      parts.load<WORDS>(p, first);
#else
      low = here.low.load_at<WORDS>(low_from);
      high = here.high.load_at<WORDS>(high_from);
#endif
    }
    if (WORDS || !begun) {
      active = active_ranks(mine + p.rank_mask_offset);
      bool failed;
      round = begin_round(load_round(state), PHASE_DISPATCH, mine + p.round_state_offset, p.host_words, verdict, failed);
      if (failed) {
        void_dispatch(p, u64(cta) * blockDim.x + threadIdx.x, u64(num_ctas) * blockDim.x);
        return;
      }
      begun = true;
    }
    const u32 in_parity = round.parity * EP_SIZE * landing.of_source;
    const u64 tag = u64(round.number) << 32;
    u64 line = landing.ours + in_parity;
#pragma unroll 1
    for (u32 token = first; token < tokens; token += rows) {
      RankSet ranks;
      ranks.clear();
      if (token < p.num_tokens) {
#if WIRE_FORMAT
        // The image before has been taken by all threads.
        if (has_image) __syncthreads();
        has_image = true;
        quantize_image<WORDS>(p, token, parts, image);
        __syncthreads();
        low = here.low.count ? image[here.at() / 8] : 0;
        high = here.high.count ? image[here.at() / 8 + 1] : 0;
#endif
        ranks = ids.ranks(p, active);
      }
      if (!inside) ranks.clear();
      send_part(p, ranks, line, low, is_tag ? tag : high);
      if (ROW_ORDER_TOKEN && inside) here.settle<WORDS>(p, own_row + token, ranks.has(p.ep_rank), low, high);
      line += rows * num_lines * LINE_BYTES;
      if (token + rows >= p.num_tokens) continue;
      ids.load(p, ids_of(p, token + rows));
#if WIRE_FORMAT
      parts.load<WORDS>(p, token + rows);
#else
      low = here.low.load<WORDS>(token + rows);
      high = here.high.load<WORDS>(token + rows);
#endif
    }
    if (OWN_STAYS && !ROW_ORDER_TOKEN) {
      // While the others' are on the wire.
      const u64* const words = valid_words(mine, p.valid_bits_offset, p.max_num_tokens, round.parity, p.ep_rank);
#pragma unroll 1
      for (u32 token = first; fine && token < tokens; token += rows)
        fine = receive_part<WORDS, true>(p, round, p.ep_rank, !RANK_MASK || active.has(p.ep_rank), token, words, nullptr,
                                         inside, here);
    }
    u64 inbox = landing.mine + in_parity;
#pragma unroll 1
    for (u32 token = first; fine && token < tokens; token += rows) {
#pragma unroll 1
      for (u32 i = OWN_STAYS; fine && i < EP_SIZE; ++i) {
        // Ours first, where it has a line: it is here already.
        const u32 src_rank = (p.ep_rank + i) % EP_SIZE;
        const u64* const words = valid_words(mine, p.valid_bits_offset, p.max_num_tokens, round.parity, src_rank);
        fine = receive_part<WORDS, false>(p, round, src_rank, !RANK_MASK || active.has(src_rank), token, words,
                                          reinterpret_cast<const u64*>(inbox + src_rank * landing.of_source), inside, here);
      }
      inbox += rows * num_lines * LINE_BYTES;
    }
    part += gridDim.x * blockDim.x;
    // All warps of a CTA make the same sweeps, also behind a failure: there are barriers in them.
  } while (!WORDS && part - threadIdx.x < num_lines * 8);
  if (end_round(round, DISPATCH_EXITS, DISPATCH_CLAIMS, num_ctas, false)) void_dispatch(p, threadIdx.x, blockDim.x);
}

template <bool WORDS>
__device__ __forceinline__ void dispatch_small(const DispatchParams& p) {
  __shared__ u32 verdict;
  touch(p);
  if (threadIdx.x == 0) verdict = VERDICT_FINE;
  __syncthreads();
  if (blockIdx.y == 0) dispatch_small_routing(p, &verdict);
  else dispatch_small_rows<WORDS>(p, &verdict);
}

// Bound by how many CTAs are resident, so registers are few; but where quantising or sets of many ranks would spill.
constexpr bool SMALL_IS_LEAN = !WIRE_FORMAT && !RANK_MASK && RANK_WORDS == 1;

#define DISPATCH_SMALL(name, words, max_threads, min_ctas)           \
  extern "C" __global__ void __launch_bounds__(max_threads, min_ctas) \
      name(const __grid_constant__ DispatchParams p) {                \
    dispatch_small<words>(p);                                         \
  }

DISPATCH_SMALL(dispatch_small_bytes, false, SMALL_IS_LEAN ? MAX_SMALL_THREADS : MAX_THREADS, SMALL_IS_LEAN ? 2 : 1)
DISPATCH_SMALL(dispatch_small_words, true, WIRE_FORMAT ? MAX_THREADS : MAX_SMALL_THREADS, SMALL_IS_LEAN ? 3 : 1)
