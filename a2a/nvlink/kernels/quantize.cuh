// nvlink/kernels/quantize: rows made into a wire format on their way out.
//
// Owns where data and scales go. Refuses to know how lanes share a row's blocks, and the formats' arithmetic
// (a2a/quant/*.cuh, twins of the Python files beside them). Payload 0 is the data, payload 1 its scales.
#pragma once

#include "quantize_groups.cuh"

#if WIRE_FORMAT == 1
#include "../../quant/fp8_block.cuh"
using Format = Fp8Block;
#elif WIRE_FORMAT == 2
#include "../../quant/mxfp8.cuh"
using Format = Mxfp8;
#elif WIRE_FORMAT == 3
#include "../../quant/nvfp4.cuh"
using Format = Nvfp4;
#elif WIRE_FORMAT == 4
#include "../../quant/mxfp4.cuh"
using Format = Mxfp4;
#endif

constexpr u32 DATA_PAYLOAD = 0, SCALES_PAYLOAD = 1;
constexpr u32 BLOCK_LANES = LANES_OF_BLOCK<Format>, GROUP_BYTES = BYTES_OF_GROUP<Format>;

__device__ __forceinline__ float global_scale_of(const DispatchParams& p) {
  return p.global_scale ? *reinterpret_cast<const float*>(p.global_scale) : 1.0f;
}

// Elements of a row on the wire, columns of padding included.
__device__ __forceinline__ u32 wire_elements(const DispatchParams& p) {
  return p.payload_bytes[DATA_PAYLOAD] * 8 / Format::ELEMENT_BITS;
}

// Where the scales of a token's image lie, and what follows them.
__device__ __forceinline__ u32 scales_in_image(const DispatchParams& p) {
  return (p.payload_bytes[DATA_PAYLOAD] + 7) & ~7u;
}

__device__ __forceinline__ u32 others_in_image(const DispatchParams& p) {
  return scales_in_image(p) + ((p.payload_bytes[SCALES_PAYLOAD] + 7) & ~7u);
}

// What a thread needs of a token, loaded apart from its use: 16 elements of its row, and 8 bytes of the payloads that are
// not quantised. Those go to the last threads, which often have no elements.
struct TokenParts {
  Group group;
  Piece other;
  u32 other_at;
  u64 other_word;

  __device__ __forceinline__ void locate(const DispatchParams& p) {
    other_at = others_in_image(p) + (blockDim.x - 1 - threadIdx.x) * 8;
    other.locate(p, other_at);
  }

  template <bool WORDS>
  __device__ __forceinline__ void load(const DispatchParams& p, u32 token) {
    group.load(p, InputRow(p, p.payload_rows[DATA_PAYLOAD], token), threadIdx.x * GROUP);
    other_word = other.load<WORDS>(token);
  }
};

// A CTA makes the image of one token in shared memory: data, scales, then the other payloads as they are. WORDS: see Piece.
template <bool WORDS>
__device__ __forceinline__ void quantize_image(const DispatchParams& p, u32 token, const TokenParts& parts, u64* image) {
  const u32 lane = threadIdx.x % 32, groups = wire_elements(p) / GROUP, scales_at = scales_in_image(p);
  const InputRow row(p, p.payload_rows[DATA_PAYLOAD], token);
  Group loaded = parts.group;
  const float global_scale = global_scale_of(p);
  u8* const bytes = reinterpret_cast<u8*>(image);
#pragma unroll 1
  for (u32 group = threadIdx.x; group - lane < groups; group += blockDim.x) {
    float values[GROUP];
    u32 words[GROUP_BYTES / 4];
    if (group != threadIdx.x) loaded.load(p, row, group * GROUP);
    const u32 amax = loaded.values(p, row, group * GROUP, values);
    const u32 scale = quantize_group<Format>(values, amax, global_scale, words);
    if (group >= groups) continue;
#pragma unroll
    for (u32 i = 0; i < GROUP_BYTES / 8; ++i)
      image[group * (GROUP_BYTES / 8) + i] = u64(words[2 * i]) | u64(words[2 * i + 1]) << 32;
    if (group % BLOCK_LANES) continue;
    u8* const to = bytes + scales_at + group / BLOCK_LANES * Format::SCALE_BYTES;
    if (Format::SCALE_BYTES == 4) *reinterpret_cast<u32*>(to) = scale;
    else *to = u8(scale);
  }
  if (parts.other_at < image_bytes(p)) image[parts.other_at / 8] = parts.other_word;
#pragma unroll 1
  for (u32 at = parts.other_at + blockDim.x * 8; at < image_bytes(p); at += blockDim.x * 8) {
    Piece piece;
    piece.locate(p, at);
    image[at / 8] = piece.load<WORDS>(token);
  }
}

// Stores up to 4 bytes of a row of scales whose start may lie anywhere.
__device__ __forceinline__ void store_scale_word(u8* row, u32 row_bytes, u32 at, u32 word) {
  if (at + 4 <= row_bytes && common_alignment(reinterpret_cast<u64>(row)) >= 4) {
    *reinterpret_cast<u32*>(row + at) = word;
    return;
  }
  for (u32 i = 0; i < 4 && at + i < row_bytes; ++i) row[at + i] = u8(word >> (8 * i));
}

// Where a token's data and scales go, spread over the lanes of a warp like the destinations themselves; 0: nowhere.
struct WireRows {
  u64 data[(TOP_K + 31) / 32], scales[(TOP_K + 31) / 32];

  __device__ __forceinline__ WireRows(const DispatchParams& p, const Destinations& to) {
#pragma unroll
    for (u32 i = 0; i < (TOP_K + 31) / 32; ++i) {
      const u64 area = p.workspace + u64(u32(to.ranks[i])) * p.stride;
      const u64 slot = u64(p.ep_rank) * p.runtime_max_tokens_per_rank + u32(to.slots[i]);
      data[i] = to.ranks[i] < 0 ? 0 : area + p.payload_offsets[DATA_PAYLOAD] + slot * p.payload_bytes[DATA_PAYLOAD];
      scales[i] = to.ranks[i] < 0 ? 0 : area + p.payload_offsets[SCALES_PAYLOAD] + slot * p.payload_bytes[SCALES_PAYLOAD];
    }
  }

  // Calls visit(row) once per row, warp-uniform.
  template <typename Visit>
  static __device__ __forceinline__ void each(const u64* rows, Visit visit) {
#pragma unroll
    for (u32 i = 0; i < (TOP_K + 31) / 32; ++i) {
      u32 left = __ballot_sync(ALL_LANES, rows[i] != 0);
      while (left) {
        const u32 lane = __ffs(left) - 1;
        left &= left - 1;
        visit(reinterpret_cast<u8*>(__shfl_sync(ALL_LANES, rows[i], lane)));
      }
    }
  }
};

// A warp quantises a segment of one row, 512 elements at a time, and writes data and scales to every destination.
class QuantizedSegment {
  static constexpr u32 CHUNK = 32 * GROUP, CHUNK_WORDS = CHUNK / Format::BLOCK * Format::SCALE_BYTES / 4;
  static constexpr u32 WORD_LANES = 32 / CHUNK_WORDS;

  const InputRow row;
  u32 begin, end;  // in chunks
  Group next;

 public:
  // Its first loads pass while its destinations are being found.
  __device__ __forceinline__ QuantizedSegment(const DispatchParams& p, u32 token, u32 segment)
      : row(p, p.payload_rows[DATA_PAYLOAD], token) {
    const u32 chunks = (wire_elements(p) + CHUNK - 1) / CHUNK, part = (chunks + p.segments - 1) / p.segments;
    begin = min(chunks, segment * part);
    end = min(chunks, begin + part);
    next.load(p, row, begin * CHUNK + threadIdx.x % 32 * GROUP);
  }

  // Scales are gathered over the lanes, so that they leave as full words of all lanes and not as single bytes.
  __device__ __forceinline__ void push(const DispatchParams& p, const Destinations& destinations) {
    const WireRows to(p, destinations);
    const u32 lane = threadIdx.x % 32, elements = wire_elements(p), scale_bytes = p.payload_bytes[SCALES_PAYLOAD];
    const float global_scale = global_scale_of(p);
    u32 gathered = 0;
#pragma unroll 1
    for (u32 chunk = begin; chunk < end; ++chunk) {
      const u32 first = chunk * CHUNK + lane * GROUP;
      float values[GROUP];
      u32 words[GROUP_BYTES / 4];
      const u32 amax = next.values(p, row, first, values);
      next.load(p, row, first + CHUNK);
      u32 scale = quantize_group<Format>(values, amax, global_scale, words);
      const u32 at = first / 8 * Format::ELEMENT_BITS;
      WireRows::each(to.data, [&](u8* data) {
        if (first < elements) store_group<Format>(data + at, words);
      });
      // One-byte scales of neighbouring blocks become a word, held by all lanes of those blocks.
      if (Format::SCALE_BYTES == 1) {
        scale <<= lane / BLOCK_LANES % 4 * 8;
#pragma unroll
        for (u32 step = BLOCK_LANES; step < 4 * BLOCK_LANES; step *= 2) scale |= __shfl_xor_sync(ALL_LANES, scale, step);
      }
      // Lane i keeps the i-th word since the last time that all lanes had one.
      const u32 word = __shfl_sync(ALL_LANES, scale, lane % CHUNK_WORDS * WORD_LANES);
      const u32 turn = (chunk - begin) % WORD_LANES;
      if (lane / CHUNK_WORDS == turn) gathered = word;
      if (turn != WORD_LANES - 1 && chunk != end - 1) continue;
      const u32 scale_at = ((chunk - turn) * CHUNK_WORDS + lane) * 4;
      WireRows::each(to.scales, [&](u8* scales) {
        if (lane / CHUNK_WORDS <= turn) store_scale_word(scales, scale_bytes, scale_at, gathered);
      });
    }
  }
};
