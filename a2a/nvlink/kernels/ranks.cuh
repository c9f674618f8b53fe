// nvlink/kernels/ranks: a set of ranks in registers.
//
// Owns its words. Refuses to know what the ranks have in common.
#pragma once

constexpr u32 RANK_WORDS = (EP_SIZE + 31) / 32;

struct RankSet {
  u32 words[RANK_WORDS];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (u32 i = 0; i < RANK_WORDS; ++i) words[i] = 0;
  }
  // Nothing for a rank below 0. Register arrays cannot be indexed at run time, hence the loops.
  __device__ __forceinline__ void add(i32 rank) {
#pragma unroll
    for (u32 i = 0; i < RANK_WORDS; ++i) words[i] |= u32(rank) / 32 == i ? 1u << (rank % 32) : 0u;
  }
  __device__ __forceinline__ bool has(u32 rank) const {
    u32 word = 0;
#pragma unroll
    for (u32 i = 0; i < RANK_WORDS; ++i) word = rank / 32 == i ? words[i] : word;
    return word >> (rank % 32) & 1;
  }
};
