// nvlink/kernels/rows: bytes of rows, at any width and alignment.
//
// Owns vector loads and stores, copying a row to several places, and the image of a token (all its payloads one after
// another, each on an 8-byte boundary) that the small regime cuts into lines. Refuses to know who receives them.
#pragma once

#include "sync.cuh"

// Where the rows of one token go, spread over the lanes of a warp: lane i holds picks i and i + 32, a rank at most once.
struct Destinations {
  i32 ranks[(TOP_K + 31) / 32];
  i32 slots[(TOP_K + 31) / 32];
};

struct alignas(16) Vec16 { u32 x, y, z, w; };
struct alignas(8) Vec8 { u32 x, y; };

// Largest power of two up to 16 that divides all of `bits`.
__device__ __forceinline__ u32 common_alignment(u64 bits) {
  const u32 low = u32(bits) | 16u;
  return low & (0u - low);
}

__device__ __forceinline__ u32 load_u32(const u32* from) {
  u32 value;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}

__device__ __forceinline__ u64 load_word(const u8* from) {
  u64 value;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(from));
  return value;
}

__device__ __forceinline__ Vec16 load16(const u8* from) {
  Vec16 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

__device__ __forceinline__ void store16(u8* to, const Vec16& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// ---- whole rows (bulk) ---------------------------------------------------------------------------------------------

// Calls visit(rank, slot) once per destination, warp-uniform.
template <typename Visit>
__device__ __forceinline__ void for_each_destination(const Destinations& to, Visit visit) {
#pragma unroll
  for (u32 i = 0; i < (TOP_K + 31) / 32; ++i) {
    u32 left = __ballot_sync(ALL_LANES, to.ranks[i] >= 0);
    while (left) {
      const u32 lane = __ffs(left) - 1;
      left &= left - 1;
      visit(__shfl_sync(ALL_LANES, to.ranks[i], lane), __shfl_sync(ALL_LANES, to.slots[i], lane));
    }
  }
}

// The next bytes of a row, up to BATCH accesses of 16 bytes a lane, between their load and their store. Both are given the
// same range, of which they take the beginning.
template <u32 BATCH>
struct HeldBytes {
  static constexpr u32 MOST = 32 * BATCH * 16;
  Vec16 held[BATCH];

  __device__ __forceinline__ void load(const u8* from, u32 begin, u32 end) {
#pragma unroll
    for (u32 i = 0; i < BATCH; ++i) {
      const u32 byte = begin + (i * 32 + threadIdx.x % 32) * 16;
      if (byte < end) held[i] = load16(from + byte);
    }
  }

  // To every destination. `row_at(rank, slot)` is the start of the row there.
  template <typename RowAt>
  __device__ __forceinline__ void store(u32 begin, u32 end, const Destinations& to, RowAt row_at) const {
    for_each_destination(to, [&](i32 rank, i32 slot) {
      u8* const row = row_at(rank, slot);
#pragma unroll
      for (u32 i = 0; i < BATCH; ++i) {
        const u32 byte = begin + (i * 32 + threadIdx.x % 32) * 16;
        if (byte < end) *reinterpret_cast<Vec16*>(row + byte) = held[i];
      }
    });
  }
};
using RowBytes = HeldBytes<7>;

// The part of a row that a segment covers, in bytes: equal parts of whole 512-byte warp accesses.
__device__ __forceinline__ void segment_of(u32 row_bytes, u32 segment, u32 segments, u32& begin, u32& end) {
  const u32 part = ((row_bytes + segments - 1) / segments + 511) / 512 * 512;
  begin = min(row_bytes, segment * part);
  end = min(row_bytes, begin + part);
}

// A warp copies bytes [begin, end), which lie on multiples of a word, to one destination.
template <typename Word>
__device__ __forceinline__ void copy_words(const u8* from, u8* to, u32 begin, u32 end) {
  for (u32 at = begin + threadIdx.x % 32 * sizeof(Word); at < end; at += 32 * sizeof(Word))
    *reinterpret_cast<Word*>(to + at) = *reinterpret_cast<const Word*>(from + at);
}

// The same as copy_row for rows that do not lie on 16 bytes, to one destination, by the widest words that they allow.
// Out of line, like all that is rare here, so that it costs the common path neither registers nor branches around it;
// more words in flight would cost the whole kernel registers.
__device__ __noinline__ void copy_narrow(const u8* from, u8* to, u32 begin, u32 end, u32 alignment) {
  if (alignment >= 8) copy_words<Vec8>(from, to, begin, end);
  else if (alignment >= 4) copy_words<u32>(from, to, begin, end);
  else if (alignment >= 2) copy_words<u16>(from, to, begin, end);
  else copy_words<u8>(from, to, begin, end);
}

// A warp copies bytes [begin, end) of a row, read once and written to every destination, 16 at a time where both addresses
// and the width allow it. `loaded`: `bytes` holds the first of them already.
template <typename RowAt>
__device__ __forceinline__ void copy_row(RowBytes& bytes, bool loaded, const u8* from, u32 begin, u32 end, u32 alignment,
                                         const Destinations& to, RowAt row_at) {
  if (begin >= end) return;
  if (alignment != 16) {
    for_each_destination(to, [&](i32 rank, i32 slot) { copy_narrow(from, row_at(rank, slot), begin, end, alignment); });
    return;
  }
#pragma unroll 1
  for (; begin < end; begin += RowBytes::MOST) {
    if (!loaded) bytes.load(from, begin, end);
    loaded = false;
    bytes.store(begin, end, to, row_at);
  }
}

// One lane fills a row of `row_bytes` at `row` with ids or with one byte.
__device__ __forceinline__ void scrub_ids(u8* row, u32 row_bytes, i32 invalid_id) {
  if (row_bytes / TOP_K == 8) {
    for (u32 pick = 0; pick < TOP_K; ++pick) reinterpret_cast<i64*>(row)[pick] = invalid_id;
  } else {
    for (u32 pick = 0; pick < TOP_K; ++pick) reinterpret_cast<i32*>(row)[pick] = invalid_id;
  }
}

// A warp fills a row with one byte.
__device__ __forceinline__ void fill_row(u8* row, u32 row_bytes, u32 byte) {
  for (u32 at = threadIdx.x % 32; at < row_bytes; at += 32) row[at] = u8(byte);
}

// ---- images (small) ------------------------------------------------------------------------------------------------

// Up to 8 bytes that do not make one aligned word.
__device__ __noinline__ u64 load_bytes(const u8* from, u32 count) {
  u64 value = 0;
  for (u32 i = 0; i < count; ++i) value |= u64(from[i]) << (8 * i);
  return value;
}

__device__ __noinline__ void store_bytes(u8* to, u32 count, u64 value) {
  if (count == 8 && common_alignment(reinterpret_cast<u64>(to)) >= 4) {
    reinterpret_cast<u32*>(to)[0] = u32(value);
    reinterpret_cast<u32*>(to)[1] = u32(value >> 32);
    return;
  }
  for (u32 i = 0; i < count; ++i) to[i] = u8(value >> (8 * i));
}

// Eight bytes of a token's image: where they come from, and where they belong. Known before any row is.
struct Piece {
  const u8* from;  // in row 0 of the caller's payload
  u8* to;          // in row 0 of our view of it
  u32 row_bytes;
  u32 count;       // bytes that the row has here, 0 past the image's end
  bool word;       // they are 8 and lie on a multiple of 8 in every row

  // Returns the payload, num_payloads past the image's end.
  __device__ __forceinline__ u32 locate(const DispatchParams& p, u32 at) {
    u32 payload = 0;
#pragma unroll 1
    while (payload < p.num_payloads) {
      const u32 width = (p.payload_bytes[payload] + 7) & ~7u;
      if (at < width) break;
      at -= width;
      ++payload;
    }
    count = row_bytes = 0;
    word = false;
    from = reinterpret_cast<const u8*>(p.payload_rows[0]);
    to = nullptr;
    if (payload >= p.num_payloads) return payload;
    row_bytes = p.payload_bytes[payload];
    count = min(8u, row_bytes - at);
    from = reinterpret_cast<const u8*>(p.payload_rows[payload]) + at;
    to = reinterpret_cast<u8*>(p.workspace + p.ep_rank * p.stride + p.payload_offsets[payload]) + at;
    word = count == 8 && common_alignment(reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to) | row_bytes) >= 8;
    return payload;
  }

  // WORDS: no payload of this launch has any but whole words, and nothing is asked. What is loaded past the image's end
  // is then the beginning of the row.
  template <bool WORDS>
  __device__ __forceinline__ u64 load_at(const u8* at) const {
    if (WORDS || word) return load_word(at);
    return count ? load_bytes(at, count) : 0;
  }

  template <bool WORDS>
  __device__ __forceinline__ u64 load(u32 row) const {
    return load_at<WORDS>(from + u64(row) * row_bytes);
  }

  template <bool WORDS>
  __device__ __forceinline__ void store(u32 row, u64 value) const {
    u8* const at = to + u64(row) * row_bytes;
    if (WORDS ? count != 0 : word) *reinterpret_cast<u64*>(at) = value;
    else if (!WORDS && count) store_bytes(at, count, value);
  }
};

// Eight bytes of a padded slot: invalid ids, a neutral byte, or what was there.
__device__ __noinline__ void scrub_piece(const DispatchParams& p, u32 at, u32 row) {
  Piece piece;
  const u32 payload = piece.locate(p, at);
  if (payload >= p.num_payloads) return;
  if (i32(payload) == p.ids_payload) {
    const u32 high = piece.row_bytes == 8 * TOP_K ? u32(p.invalid_id >> 31) : u32(p.invalid_id);
    piece.store<false>(row, u64(high) << 32 | u32(p.invalid_id));
  } else if (p.payload_fill[payload] >= 0) {
    piece.store<false>(row, u64(u32(p.payload_fill[payload])) * 0x0101010101010101ull);
  }
}

__device__ __forceinline__ u32 image_bytes(const DispatchParams& p) {
  u32 sum = 0;
#pragma unroll 1
  for (u32 payload = 0; payload < p.num_payloads; ++payload) sum += (p.payload_bytes[payload] + 7) & ~7u;
  return sum;
}
