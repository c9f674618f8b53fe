// nvlink/kernels/probe: do the 128 bytes of a line become visible together, from every rank to every other?
//
// Owns the proof of what the small regime rests on. In each CTA one warp rewrites four lines of a peer's, the other
// watches four that the peer rewrites; a line whose tag is new and whose data is not has been torn.
#include "sync.cuh"

constexpr u32 PROBE_LINES = 4, PROBE_BYTES = 1024;

// Lines that `writer` rewrites at `reader`, and behind them the reader's answer, which lies at the writer.
__device__ __forceinline__ u8* probed(const ProbeParams& p, u32 holder, u32 other) {
  return reinterpret_cast<u8*>(p.memory + holder * p.stride) + (u64(other) * gridDim.x + blockIdx.x) * PROBE_BYTES;
}

struct ProbeClock {
  u64 since, budget_ns;
  u32 polls = 0;

  __device__ __forceinline__ bool over() { return !(++polls & 63) && now_ns() - since > budget_ns; }
};

__device__ __forceinline__ u64 probe_word(u32 update, u32 lane, u32 half) {
  return (u64(update) << 32) | (update * 2654435761u + lane * 2 + half);
}

__device__ __forceinline__ void rewrite_lines(const ProbeParams& p, u32 peer, u32 lane, ProbeClock clock) {
  u64* const lines = reinterpret_cast<u64*>(probed(p, peer, p.ep_rank) + lane * 16);
  const u32* const answer = reinterpret_cast<const u32*>(probed(p, p.ep_rank, peer) + PROBE_LINES * LINE_BYTES);
  for (u32 update = 1; update <= p.updates; ++update) {
    store_line_part(lines, probe_word(update, lane, 0), probe_word(update, lane, 1));
    // All lanes or none: a line is one store of the warp.
    while (!__all_sync(ALL_LANES, load_relaxed(answer) >= update))
      if (__any_sync(ALL_LANES, clock.over())) return;
  }
}

__device__ __forceinline__ void watch_lines(const ProbeParams& p, u32 peer, u32 lane, ProbeClock clock) {
  const u64* const lines = reinterpret_cast<const u64*>(probed(p, p.ep_rank, peer) + lane * 16);
  u32* const answer = reinterpret_cast<u32*>(probed(p, peer, p.ep_rank) + PROBE_LINES * LINE_BYTES);
  u32 seen = 0, torn = 0;
  for (u32 update = 1; update <= p.updates; ++update) {
    bool judged = false;
    while (!__all_sync(ALL_LANES, judged)) {
      u64 low = 0, high = 0;
      load_line_part(lines, low, high);
      const u32 tag = u32(__shfl_sync(ALL_LANES, high, lane | 7) >> 32);
      if (!judged && tag == update) {
        judged = true;
        ++seen;
        torn += low != probe_word(update, lane, 0) || high != probe_word(update, lane, 1);
      }
      if (__any_sync(ALL_LANES, clock.over())) {
        update = p.updates;
        break;
      }
    }
    // What was read has been compared before the peer may write again.
    __syncwarp();
    if (lane == 0) store_relaxed(answer, update);
  }
  const u32 all_torn = __reduce_add_sync(ALL_LANES, torn), all_seen = __reduce_add_sync(ALL_LANES, seen);
  u32* const counts = reinterpret_cast<u32*>(p.counts) + 2 * peer;
  if (lane == 0) {
    atomicAdd(counts, all_seen / 8);
    atomicAdd(counts + 1, all_torn);
  }
}

// Grid: (CTAs per peer, ranks); 64 threads. Memory: PROBE_BYTES per rank and CTA, zero at first.
extern "C" __global__ void __launch_bounds__(64, 1) probe_lines(const __grid_constant__ ProbeParams p) {
  const u32 peer = blockIdx.y, lane = threadIdx.x % 32;
  if (!(p.peers[peer / 64] >> (peer % 64) & 1)) return;
  const ProbeClock clock{now_ns(), p.budget_ns};
  if (threadIdx.x < 32)
    rewrite_lines(p, peer, lane, clock);
  else
    watch_lines(p, peer, lane, clock);
}
