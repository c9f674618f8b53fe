// nvlink/kernels/routing: which ranks a token goes to, and in which slot.
//
// Owns expert id -> rank, the bits that say which tokens of a rank go to another, and slots by prefix sum over them.
// Refuses to know what is sent.
//
// The routing of 32 tokens to one rank is 32 bits. They travel as a word (sync.cuh) to the rank they concern, and a copy
// stays here: counts, slots in token order and the validity of rows are sums over such words on both sides, so no counter
// is ever incremented and nothing needs to be zeroed.
#pragma once

#include "ranks.cuh"
#include "rows.cuh"
#include "sync.cuh"

// Ranks that take part. A device word says so, because it may change under a captured graph.
__device__ __forceinline__ RankSet active_ranks(const u8* rank_mask) {
  RankSet active;
#pragma unroll
  for (u32 i = 0; i < RANK_WORDS; ++i)
    active.words[i] = RANK_MASK ? load_relaxed(reinterpret_cast<const u32*>(rank_mask) + i) : ALL_LANES;
  return active;
}

// An id as it was read: converting one of 8 bytes would wait for it before the next loads are under way.
struct RawId {
  u32 low, high;  // high: 0 where ids have 4 bytes
};

// Id number `index` behind `from`.
__device__ __forceinline__ RawId load_id(const DispatchParams& p, const u32* from, u32 index) {
  const bool wide = p.id_bytes == 8;
  const u32* const at = from + (index << u32(wide));
  RawId id = {load_u32(at), 0};
  if (wide) id.high = load_u32(at + 1);
  return id;
}

__device__ __forceinline__ const u32* ids_of(const DispatchParams& p, u32 token) {
  return reinterpret_cast<const u32*>(p.topk_ids + u64(token) * TOP_K * p.id_bytes);
}

// The rank of a pick, -1 if it goes nowhere: an id outside [0, NUM_EXPERTS), read as unsigned, is too big.
__device__ __forceinline__ i32 rank_of(const DispatchParams& p, const RankSet& active, RawId id) {
  if (id.high || id.low >= NUM_EXPERTS) return -1;
  constexpr i32 base = NUM_EXPERTS / EP_SIZE, larger = NUM_EXPERTS % EP_SIZE, split = larger * (base + 1);
  const i32 expert = i32(id.low);
  i32 rank;
  if (PLACEMENT_TABLE) rank = reinterpret_cast<const i32*>(p.placement)[expert];
  else rank = expert < split ? expert / (base + 1) : larger + (expert - split) / base;
  return !RANK_MASK || active.has(rank) ? rank : -1;
}

// The ids of one token, spread over the lanes of a warp; lanes without one hold the last.
struct TokenIds {
  RawId ids[(TOP_K + 31) / 32];

  __device__ __forceinline__ void load(const DispatchParams& p, const u32* ids_of_token) {
#pragma unroll
    for (u32 i = 0; i < (TOP_K + 31) / 32; ++i) {
      ids[i] = load_id(p, ids_of_token, min(i * 32 + threadIdx.x % 32, TOP_K - 1));
    }
  }

  // The same in all lanes.
  __device__ __forceinline__ RankSet ranks(const DispatchParams& p, const RankSet& active) const {
    RankSet found;
    found.clear();
#pragma unroll
    for (u32 i = 0; i < (TOP_K + 31) / 32; ++i) found.add(rank_of(p, active, ids[i]));
#pragma unroll
    for (u32 i = 0; i < RANK_WORDS; ++i) found.words[i] = __reduce_or_sync(ALL_LANES, found.words[i]);
    return found;
  }

  // First pick per rank, all in the same slot.
  __device__ __forceinline__ void destinations(const DispatchParams& p, const RankSet& active, u32 slot,
                                               Destinations& to) const {
#pragma unroll
    for (u32 i = 0; i < (TOP_K + 31) / 32; ++i) {
      to.ranks[i] = rank_of(p, active, ids[i]);
      to.slots[i] = i32(slot);
    }
#pragma unroll
    for (u32 i = 0; i < (TOP_K + 31) / 32; ++i) {
      // A lane that is not the lowest of those with its rank drops out, and so does one whose rank an earlier 32 had.
      const u32 same = __match_any_sync(ALL_LANES, to.ranks[i]);
      bool first = to.ranks[i] >= 0 && (same & ((1u << threadIdx.x % 32) - 1)) == 0;
#pragma unroll
      for (u32 earlier = 0; earlier < i; ++earlier) {
        for (u32 lane = 0; lane < 32; ++lane) {
          const i32 other = __shfl_sync(ALL_LANES, to.ranks[earlier], lane);
          if (other == to.ranks[i]) first = false;
        }
      }
      if (!first) to.ranks[i] = -1;
    }
  }
};

// Words per rank in the regions sent_bits and valid_bits.
__device__ __forceinline__ u32 max_words(u32 max_num_tokens) { return (max_num_tokens + 31) / 32; }

__device__ __forceinline__ u64* sent_word(const DispatchParams& p, u8* mine, u32 dst_rank, u32 word) {
  return reinterpret_cast<u64*>(mine + p.sent_bits_offset) + u64(dst_rank) * max_words(p.max_num_tokens) + word;
}

__device__ __forceinline__ u64* valid_words(u8* workspace, u64 offset, u32 max_num_tokens, u32 parity, u32 src_rank) {
  return reinterpret_cast<u64*>(workspace + offset) + u64(parity * EP_SIZE + src_rank) * max_words(max_num_tokens);
}

// Picks of a token that one lane reads at once; those past the last are the last again.
constexpr u32 ID_BATCH = TOP_K < 8 ? TOP_K : 8;

__device__ __forceinline__ void load_ids(const DispatchParams& p, const u32* ids_of_token, u32 first, RawId* ids) {
#pragma unroll
  for (u32 i = 0; i < ID_BATCH; ++i) ids[i] = load_id(p, ids_of_token, min(first + i, TOP_K - 1));
}

// The ranks of one token, by one lane.
__device__ __forceinline__ RankSet ranks_of(const DispatchParams& p, const RankSet& active, const u32* ids_of_token) {
  RankSet ranks;
  ranks.clear();
#pragma unroll 1
  for (u32 first = 0; first < TOP_K; first += ID_BATCH) {
    RawId ids[ID_BATCH];
    load_ids(p, ids_of_token, first, ids);
#pragma unroll
    for (u32 i = 0; i < ID_BATCH; ++i) ranks.add(rank_of(p, active, ids[i]));
  }
  return ranks;
}

// The ranks of 32 tokens, one token per lane; none for tokens from num_tokens on.
__device__ __forceinline__ RankSet word_ranks(const DispatchParams& p, const RankSet& active, u32 word) {
  const u32 token = word * 32 + threadIdx.x % 32;
  if (token < p.num_tokens) return ranks_of(p, active, ids_of(p, token));
  RankSet ranks;
  ranks.clear();
  return ranks;
}

// Where the words about 32 tokens go: for the rank that has the lane's number, in round parity 0.
struct WordPlace {
  u64 theirs, sent;

  __device__ __forceinline__ WordPlace(const DispatchParams& p, u32 word) {
    const u32 lane = threadIdx.x % 32;
    u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
    u8* const other = reinterpret_cast<u8*>(p.workspace + lane * p.stride);
    theirs = reinterpret_cast<u64>(valid_words(other, p.valid_bits_offset, p.max_num_tokens, 0, p.ep_rank) + word);
    sent = reinterpret_cast<u64>(sent_word(p, mine, lane, word));
  }
};

// Tells every rank, and ourselves, which of 32 tokens go there, also where none do: what a rank sends does not depend on
// how many tokens it has.
__device__ __forceinline__ void publish_bits(const DispatchParams& p, const Round& round, const RankSet& active,
                                             const WordPlace& place, const RankSet& ranks) {
  const u32 lane = threadIdx.x % 32, row = max_words(p.max_num_tokens) * 8;
  const u64 parity = round.parity * EP_SIZE * row;
#pragma unroll 1
  for (u32 first = 0; first < EP_SIZE; first += 32) {
    u32 bits = 0;
    const u32 count = min(32u, EP_SIZE - first);
#pragma unroll 2
    for (u32 i = 0; i < count; ++i) {
      const u32 ballot = __ballot_sync(ALL_LANES, ranks.has(first + i));
      if (lane == i) bits = ballot;
    }
    if (lane < count && (!RANK_MASK || active.has(first + lane))) {
      publish_word(reinterpret_cast<u64*>(place.theirs + parity + first * p.stride), round.number, bits);
      publish_word(reinterpret_cast<u64*>(place.sent + u64(first) * row), round.number, bits);
    }
  }
}

// How many of the tokens before `token` have their bit set in the words of `peer`; all lanes get the sum, or false when
// the wait was given up. Waits for the word of `token` itself too, unless it is the first of the next word.
__device__ __forceinline__ bool bits_before(const Round& round, const u64* words, u32 token, u32 peer, u32& sum) {
  u32 mine = 0;
  bool fine = true;
#pragma unroll 1
  for (u32 word = threadIdx.x % 32; word * 32 < token; word += 32) {
    u32 bits = 0;
    fine &= await_word(round, words + word, SIGNAL_BITS, peer, bits);
    if (token < word * 32 + 32) bits &= (1u << (token - word * 32)) - 1;
    mine += __popc(bits);
  }
  sum = __reduce_add_sync(ALL_LANES, mine);
  return __all_sync(ALL_LANES, fine);
}

// What a warp knows of 32 tokens while it gives them slots, in shared memory: per rank, how many earlier tokens go there
// and which of these do.
struct Placing {
  u32 before[EP_SIZE], bits[EP_SIZE];
};

// Writes both tables for 32 tokens, one per lane. Slots: the token itself, or in compact order the number of earlier
// tokens that go to the same rank. Waits only for warps of this launch.
__device__ __forceinline__ bool write_tables(const DispatchParams& p, const Round& round, const RankSet& active,
                                             u32 word, Placing& placing) {
  const u32 lane = threadIdx.x % 32, token = word * 32 + lane;
  u8* const mine = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride);
  bool fine = true;
  if (!ROW_ORDER_TOKEN) {
#pragma unroll 1
    for (u32 rank = 0; rank < EP_SIZE; ++rank) {
      u32 before = 0, here = 0;
      if (!RANK_MASK || active.has(rank)) {
#pragma unroll 1
        for (u32 other = lane; other <= word; other += 32) {
          u32 bits = 0;
          fine &= await_word(round, sent_word(p, mine, rank, other), SIGNAL_BITS, p.ep_rank, bits);
          if (other == word) here = bits;
          else before += __popc(bits);
        }
      }
      before = __reduce_add_sync(ALL_LANES, before);
      here = __reduce_or_sync(ALL_LANES, here);
      if (lane == 0) {
        placing.before[rank] = before;
        placing.bits[rank] = here;
      }
    }
    __syncwarp();
  }
  if (token < p.num_tokens) {
    i32* const targets = reinterpret_cast<i32*>(mine + p.topk_target_ranks_offset) + u64(token) * TOP_K;
    i32* const slots = reinterpret_cast<i32*>(mine + p.topk_send_indices_offset) + u64(token) * TOP_K;
    const u32* const ids_of_token = ids_of(p, token);
    RankSet seen;
    seen.clear();
#pragma unroll 1
    for (u32 first = 0; first < TOP_K; first += ID_BATCH) {
      RawId ids[ID_BATCH];
      load_ids(p, ids_of_token, first, ids);
#pragma unroll
      for (u32 i = 0; i < ID_BATCH; ++i) {
        if (first + i >= TOP_K) break;
        const i32 rank = rank_of(p, active, ids[i]);
        const bool is_first = rank >= 0 && !seen.has(rank);
        seen.add(rank);
        i32 slot = i32(token);
        if (!ROW_ORDER_TOKEN && is_first)
          slot = i32(placing.before[rank] + __popc(placing.bits[rank] & ((1u << lane) - 1)));
        targets[first + i] = is_first ? rank : -1;
        slots[first + i] = is_first ? slot : -1;
      }
    }
  }
  __syncwarp();
  return __all_sync(ALL_LANES, fine);
}
