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

// What the grid's row 0 does. Words first: every receiver's copying waits for them.
__device__ __forceinline__ void route_and_count(const DispatchParams& p, const Round& round, const RankSet& active,
                                                u32* bases) {
  const u32 warps = blockDim.x / 32, warp = blockIdx.x * warps + threadIdx.x / 32, step = gridDim.x * warps;
  const u32 words = (p.runtime_max_tokens_per_rank + 31) / 32;
  for (u32 word = warp; word < words; word += step) route_word(p, round, active, word);
  if (warp == step - 1) send_headers(p, round, active, 0);
  send_eplb(p, round, active, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
  for (u32 word = warp; word < words; word += step)
    if (!write_tables(p, round, active, word, bases + threadIdx.x / 32 * EP_SIZE)) return;
  for (u32 rank = warp; rank < EP_SIZE; rank += step) {
    count_sent(p, round, active, rank);
    count_received(p, round, active, rank);
  }
  if (warp == step - 1) check_headers(p, round, active);
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
    // The line and the word that says whether there will be one are looked at together: neither waits for the other.
    Patience patience;
    while (active) {
      const u64 word = load_relaxed(words + token / 32);
      if (inside) load_line_part(from, low, high);
      const bool told = u32(word >> 32) == round.number;
      hit = told && (word >> (token % 32) & 1);
      const u64 tag = __shfl_sync(ALL_LANES, high, lane | 7);
      const bool here = told && (!hit || !inside || u32(tag >> 32) == round.number);
      if (__all_sync(ALL_LANES, here)) break;
      if (__any_sync(ALL_LANES, give_up(round, patience, told ? SIGNAL_ROW : SIGNAL_BITS, src_rank,
                                        told ? u32(tag >> 32) : u32(word >> 32))))
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

extern "C" __global__ void __launch_bounds__(MAX_THREADS) dispatch_small(const __grid_constant__ DispatchParams p) {
  __shared__ u32 verdict;
  __shared__ u32 bases[MAX_THREADS / 32 * EP_SIZE];
#if WIRE_FORMAT
  extern __shared__ u64 image[];
#endif
  if (threadIdx.x == 0) verdict = VERDICT_FINE;
  const u32 lane = threadIdx.x % 32;
  const u32 num_lines = (image_bytes(p) + LINE_DATA_BYTES - 1) / LINE_DATA_BYTES;
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  __syncthreads();
  await_previous_kernel();
  next_kernel_may_come();

  bool failed;
  const u32 tokens = p.runtime_max_tokens_per_rank;
  const Round round =
      begin_round(PHASE_DISPATCH, mine + p.round_state_offset, p.host_words, &verdict, failed);
  const RankSet active = active_ranks(mine + p.rank_mask_offset);
  const u32 num_ctas = gridDim.x * gridDim.y, cta = blockIdx.y * gridDim.x + blockIdx.x;
  if (failed) {
    void_dispatch(p, u64(cta) * blockDim.x + threadIdx.x, u64(num_ctas) * blockDim.x);
    return;
  }
  if (blockIdx.y == 0) {
    route_and_count(p, round, active, bases);
  } else {
    for (u32 token = blockIdx.y - 1; token < p.num_tokens; token += gridDim.y - 1) {
#if WIRE_FORMAT
      __syncthreads();
      quantize_image(p, token, image);
      __syncthreads();
#endif
      const RankSet ranks = token_ranks(p, active, token);
      for (u32 part = blockIdx.x * blockDim.x + threadIdx.x; part < num_lines * 8; part += gridDim.x * blockDim.x) {
        u64 halves[2] = {0, u64(round.number) << 32};
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
          if (half == 1 && lane % 8 == 7) continue;
          const u32 at = part / 8 * LINE_DATA_BYTES + part % 8 * 16 + half * 8;
#if WIRE_FORMAT
          halves[half] = at < image_bytes(p) ? image[at / 8] : 0;
#else
          u32 within;
          const u32 payload = payload_at(p, at, within);
          halves[half] = 0;
          if (payload < p.num_payloads) {
            const u32 row_bytes = p.payload_bytes[payload];
            const u8* const row = reinterpret_cast<const u8*>(p.payload_rows[payload]) + u64(token) * row_bytes;
            halves[half] = load_piece(row, row_bytes, within);
          }
#endif
        }
#pragma unroll
        for (u32 i = 0; i < RANK_WORDS; ++i) {
          u32 left = ranks.words[i];
          while (left) {
            const u32 dst_rank = i * 32 + __ffs(left) - 1;
            left &= left - 1;
            store_line_part(dispatch_line(p, dst_rank, round.parity, p.ep_rank, token, num_lines) + u64(part) * 2,
                            halves[0], halves[1]);
          }
        }
      }
    }
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
