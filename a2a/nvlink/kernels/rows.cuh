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

// A warp copies bytes [begin, end) of a row in units of V, BATCH of them in flight per lane, read once and written to
// every destination. `row_at(rank, slot)` is the start of the row there.
template <typename V, u32 BATCH, typename RowAt>
__device__ __forceinline__ void copy_units(const u8* from, u32 begin, u32 end, const Destinations& to, RowAt row_at) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll 1
  for (u32 at = begin + lane * sizeof(V); __any_sync(ALL_LANES, at < end); at += 32 * BATCH * sizeof(V)) {
    V held[BATCH];
#pragma unroll
    for (u32 i = 0; i < BATCH; ++i) {
      const u32 byte = at + i * 32 * sizeof(V);
      if (byte < end) held[i] = *reinterpret_cast<const V*>(from + byte);
    }
    for_each_destination(to, [&](i32 rank, i32 slot) {
      u8* const row = row_at(rank, slot);
#pragma unroll
      for (u32 i = 0; i < BATCH; ++i) {
        const u32 byte = at + i * 32 * sizeof(V);
        if (byte < end) *reinterpret_cast<V*>(row + byte) = held[i];
      }
    });
  }
}

// The part of a row that a segment covers, in bytes: equal parts of whole 512-byte warp accesses.
__device__ __forceinline__ void segment_of(u32 row_bytes, u32 segment, u32 segments, u32& begin, u32& end) {
  const u32 part = ((row_bytes + segments - 1) / segments + 511) / 512 * 512;
  begin = min(row_bytes, segment * part);
  end = min(row_bytes, begin + part);
}

// Copies with the widest access that both addresses and the width allow.
template <typename RowAt>
__device__ __forceinline__ void copy_row(const u8* from, u32 begin, u32 end, u32 alignment, const Destinations& to,
                                         RowAt row_at) {
  if (begin >= end) return;
  switch (alignment) {
    case 16: copy_units<Vec16, 7>(from, begin, end, to, row_at); break;
    case 8: copy_units<Vec8, 4>(from, begin, end, to, row_at); break;
    case 4: copy_units<u32, 4>(from, begin, end, to, row_at); break;
    case 2: copy_units<u16, 4>(from, begin, end, to, row_at); break;
    default: copy_units<u8, 4>(from, begin, end, to, row_at);
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

// Up to 8 bytes of a row that starts anywhere; bytes beyond the row are zero.
__device__ __forceinline__ u64 load_piece(const u8* row, u32 row_bytes, u32 within) {
  const u8* const from = row + within;
  const u32 alignment = common_alignment(reinterpret_cast<u64>(from));
  if (alignment >= 8 && within + 8 <= row_bytes) {
    u64 value;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(from));
    return value;
  }
  u64 value = 0;
  const u32 count = min(8u, row_bytes - within);
  for (u32 i = 0; i < count; ++i) value |= u64(from[i]) << (8 * i);
  return value;
}

__device__ __forceinline__ void store_piece(u8* row, u32 row_bytes, u32 within, u64 value) {
  u8* const to = row + within;
  const u32 alignment = common_alignment(reinterpret_cast<u64>(to));
  if (within + 8 <= row_bytes && alignment >= 4) {
    if (alignment >= 8) {
      *reinterpret_cast<u64*>(to) = value;
    } else {
      reinterpret_cast<u32*>(to)[0] = u32(value);
      reinterpret_cast<u32*>(to)[1] = u32(value >> 32);
    }
    return;
  }
  const u32 count = min(8u, row_bytes - within);
  for (u32 i = 0; i < count; ++i) to[i] = u8(value >> (8 * i));
}

// Which payload byte `at` of an image belongs to, `at` a multiple of 8, and where in its row; num_payloads past the end.
__device__ __forceinline__ u32 payload_at(const DispatchParams& p, u32 at, u32& within) {
  u32 payload = 0;
  while (payload < p.num_payloads) {
    const u32 width = (p.payload_bytes[payload] + 7) & ~7u;
    if (at < width) break;
    at -= width;
    ++payload;
  }
  within = at;
  return payload;
}

__device__ __forceinline__ u32 image_bytes(const DispatchParams& p) {
  u32 sum = 0;
  for (u32 payload = 0; payload < p.num_payloads; ++payload) sum += (p.payload_bytes[payload] + 7) & ~7u;
  return sum;
}
