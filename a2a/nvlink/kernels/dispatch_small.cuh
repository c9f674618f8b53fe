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

// The two pieces of a token that part `part` of its lines carries; the last part of a line has room for one.
__device__ __forceinline__ void load_part(const DispatchParams& p, u32 token, u32 part, u64& low, u64& high) {
  u64 pieces[2] = {0, 0};
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    if (half == 1 && part % 8 == 7) continue;
    u32 within;
    const u32 payload = payload_at(p, part / 8 * LINE_DATA_BYTES + part % 8 * 16 + half * 8, within);
    if (payload >= p.num_payloads) continue;
    const u32 row_bytes = p.payload_bytes[payload];
    const u8* const row = reinterpret_cast<const u8*>(p.payload_rows[payload]) + u64(token) * row_bytes;
    pieces[half] = load_piece(row, row_bytes, within);
  }
  low = pieces[0];
  high = pieces[1];
}

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
      store_line_part(dispatch_line(p, dst_rank, round.parity, p.ep_rank, token, num_lines) + u64(part) * 2, low, high);
    }
  }
}

// What the grid's row 0 does. Words first: every receiver's copying waits for them. What a warp does besides is spread
// from the last warp down, so that few do two things one after the other. `ranks`: of the warp's first word.
__device__ __forceinline__ void route_and_count(const DispatchParams& p, const Round& round, const RankSet& active,
                                                RankSet ranks, Placing& placing) {
  const u32 warps = blockDim.x / 32, warp = blockIdx.x * warps + threadIdx.x / 32, step = gridDim.x * warps;
  const u32 words = (p.runtime_max_tokens_per_rank + 31) / 32;
  for (u32 word = warp; word < words; word += step) {
    if (word != warp) ranks = word_ranks(p, active, word);
    publish_bits(p, round, active, word, ranks);
  }
  if (warp == step - 1) send_headers(p, round, active, 0);
  send_eplb(p, round, active, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
  for (u32 word = warp; word < words; word += step)
    if (!write_tables(p, round, active, word, placing)) return;
  // Task 0 checks headers, 1.. count what came from each rank, the rest what went to each.
  for (u32 task = step - 1 - warp; task < 1 + 2 * EP_SIZE; task += step) {
    if (task == 0) check_headers(p, round, active);
    else if (task <= EP_SIZE) count_received(p, round, active, task - 1);
    else count_sent(p, round, active, task - 1 - EP_SIZE);
  }
  receive_eplb(p, round, active, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

// Copies or scrubs one row from one source: lines of the landing area, or the invalid values, piece by piece.
__device__ __forceinline__ bool receive_row(const DispatchParams& p, const Round& round, u32 src_rank, bool active,
                                            u32 token, u32 num_lines) {
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  const u64* const words =
      valid_words(mine, p.valid_bits_offset, p.max_num_tokens, round.parity, src_rank);
  const u64* const landed = dispatch_line(p, p.ep_rank, round.parity, src_rank, token, num_lines);
  const u32 lane = threadIdx.x % 32;
  bool placed = false, hit = false;
  u32 slot = token;
  for (u32 part = blockIdx.x * blockDim.x + threadIdx.x; part - lane < num_lines * 8; part += gridDim.x * blockDim.x) {
    const bool inside = part < num_lines * 8;
    const u64* const from = landed + u64(part) * 2;
    u64 low = 0, high = 0;
    // The line and the word that says whether there will be one are looked at together: neither waits for the other, and a
    // line that is here needs no word.
    Patience patience;
    while (active) {
      const u64 word = load_relaxed(words + token / 32);
      if (inside) load_line_part(from, low, high);
      const u32 tag = u32(__shfl_sync(ALL_LANES, high, lane | 7) >> 32);
      const bool told = u32(word >> 32) == round.number;
      hit = inside && tag == round.number;
      const bool missing = told && !(word >> (token % 32) & 1);
      if (__all_sync(ALL_LANES, hit || missing || !inside)) break;
      if (__any_sync(ALL_LANES, give_up(round, patience, told ? SIGNAL_ROW : SIGNAL_BITS, src_rank,
                                        told ? tag : u32(word >> 32))))
        return false;
    }
    if (!placed && !ROW_ORDER_TOKEN) {
      u32 before = 0;
      if (active && !bits_before(round, words, token, src_rank, before)) return false;
      // Padded slots are shared out among the tokens that did not come, from the block's end: no count is needed.
      slot = hit ? before : p.runtime_max_tokens_per_rank - 1 - (token - before);
      placed = true;
    }
    if (!inside) continue;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      if (half == 1 && lane % 8 == 7) continue;
      u32 within;
      const u32 payload = payload_at(p, part / 8 * LINE_DATA_BYTES + part % 8 * 16 + half * 8, within);
      if (payload >= p.num_payloads) continue;
      const u32 row_bytes = p.payload_bytes[payload];
      u64 value = half ? high : low;
      if (!hit) {
        const i32 fill = p.payload_fill[payload];
        if (i32(payload) == p.ids_payload) {
          value = row_bytes / TOP_K == 8 ? u64(i64(p.invalid_id)) : u64(u32(p.invalid_id)) * 0x100000001ull;
        } else if (fill >= 0) {
          value = u64(u32(fill)) * 0x0101010101010101ull;
        } else {
          continue;
        }
      }
      const u64 row = u64(src_rank) * p.runtime_max_tokens_per_rank + slot;
      store_piece(mine + p.payload_offsets[payload] + row * row_bytes, row_bytes, within, value);
    }
  }
  if (ROW_ORDER_TOKEN && blockIdx.x == 0 && threadIdx.x == 0)
    mine[p.row_valid_offset + u64(src_rank) * p.runtime_max_tokens_per_rank + token] = hit;
  return true;
}

// Bound by how many CTAs are resident, so registers are few; but where quantising or sets of many ranks would spill.
constexpr u32 SMALL_MIN_CTAS = WIRE_FORMAT || RANK_MASK || RANK_WORDS > 1 ? 1 : 2;

extern "C" __global__ void __launch_bounds__(MAX_THREADS, SMALL_MIN_CTAS)
    dispatch_small(const __grid_constant__ DispatchParams p) {
  __shared__ u32 verdict;
  __shared__ Placing placings[MAX_THREADS / 32];
#if WIRE_FORMAT
  extern __shared__ u64 image[];
#endif
  if (threadIdx.x == 0) verdict = VERDICT_FINE;
  const u32 num_lines = (image_bytes(p) + LINE_DATA_BYTES - 1) / LINE_DATA_BYTES;
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  touch(p);
  __syncthreads();
  await_previous_kernel();
  next_kernel_may_come();

  const u32 tokens = p.runtime_max_tokens_per_rank;
  const u32 first_part = blockIdx.x * blockDim.x + threadIdx.x, parts = gridDim.x * blockDim.x;
  const u32 num_ctas = gridDim.x * gridDim.y, cta = blockIdx.y * gridDim.x + blockIdx.x;
  const RankSet active = active_ranks(mine + p.rank_mask_offset);
  RankSet ranks;
  ranks.clear();
  TokenIds ids;
  u64 low = 0, high = 0;
  u8* const state = mine + p.round_state_offset;
  RoundWords round_words;
  if (blockIdx.y == 0) {
    round_words = load_round(state);
    if (first_part / 32 * 32 < tokens) ranks = word_ranks(p, active, first_part / 32);
  } else {
    // The first token's bytes and ids first: they take longest to come.
    if (blockIdx.y - 1 < p.num_tokens) {
#if !WIRE_FORMAT
      if (first_part < num_lines * 8) load_part(p, blockIdx.y - 1, first_part, low, high);
#endif
      ids.load(p, blockIdx.y - 1);
    }
    round_words = load_round(state);
  }
  bool failed;
  const Round round = begin_round(round_words, PHASE_DISPATCH, state, p.host_words, &verdict, failed);
  if (failed) {
    void_dispatch(p, u64(cta) * blockDim.x + threadIdx.x, u64(num_ctas) * blockDim.x);
    return;
  }
  if (blockIdx.y == 0) {
    route_and_count(p, round, active, ranks, placings[threadIdx.x / 32]);
  } else {
#if WIRE_FORMAT
    for (u32 token = blockIdx.y - 1; token < p.num_tokens; token += gridDim.y - 1) {
      __syncthreads();
      quantize_image(p, token, image);
      __syncthreads();
      if (token != blockIdx.y - 1) ids.load(p, token);
      ranks = ids.ranks(p, active);
      for (u32 part = first_part; part < num_lines * 8; part += parts) {
        const u32 at = part / 8 * LINE_DATA_BYTES + part % 8 * 16;
        low = at < image_bytes(p) ? image[at / 8] : 0;
        high = at + 8 < image_bytes(p) ? image[at / 8 + 1] : 0;
        send_part(p, round, ranks, token, part, num_lines, low, high);
      }
    }
#else
    // What is sent next is read before what is sent now is stored.
    for (u32 token = blockIdx.y - 1, part = first_part; token < p.num_tokens;) {
      if (part == first_part) ranks = ids.ranks(p, active);
      u32 next_token = token, next_part = part + parts;
      if (next_part - threadIdx.x % 32 >= num_lines * 8) {
        next_token += gridDim.y - 1;
        next_part = first_part;
        if (next_token < p.num_tokens) ids.load(p, next_token);
      }
      u64 next_low = 0, next_high = 0;
      if (next_token < p.num_tokens && next_part < num_lines * 8) load_part(p, next_token, next_part, next_low, next_high);
      if (part < num_lines * 8) send_part(p, round, ranks, token, part, num_lines, low, high);
      token = next_token;
      part = next_part;
      low = next_low;
      high = next_high;
    }
#endif
    bool fine = true;
    for (u32 token = blockIdx.y - 1; fine && token < tokens; token += gridDim.y - 1)
      for (u32 i = 0; fine && i < EP_SIZE; ++i) {
        // Ours first: it is here while the others' are still on the wire.
        const u32 src_rank = (p.ep_rank + i) % EP_SIZE;
        fine = receive_row(p, round, src_rank, !RANK_MASK || active.has(src_rank), token, num_lines);
      }
  }
  if (end_round(round, DISPATCH_EXITS, DISPATCH_CLAIMS, num_ctas, cta == 0))
    void_dispatch(p, threadIdx.x, blockDim.x);
}
