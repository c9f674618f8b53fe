// nvlink/kernels/sync: memory order and waiting, the only place where either is written down.
//
// Owns every instruction that orders memory between threads, and every loop that waits. Refuses to know what is moved.
//
// The arguments below use the words of the PTX memory consistency model (causality order; release and acquire patterns;
// fences are cumulative). Three ways to publish are used:
//   word   64 bits that carry their own round: nothing else is ordered by them, so nothing else needs to be.
//   line   128 bytes that carry their own round (small regime).
//   flag   a round number behind a fence, for rows of any size (bulk regime, staged rows, local tables).
#pragma once

constexpr u32 ALL_LANES = 0xffffffffu;

// ---- plain accesses with a strength --------------------------------------------------------------------------------

__device__ __forceinline__ u32 load_relaxed(const u32* from) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}

__device__ __forceinline__ u64 load_relaxed(const u64* from) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from));
  return value;
}

__device__ __forceinline__ void store_relaxed(u32* to, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value));
}

__device__ __forceinline__ u64 now_ns() {
  u64 value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

// ---- kernel after kernel -------------------------------------------------------------------------------------------

// Everything that earlier kernels of the stream wrote is visible to the caller afterwards. Partner: the end of those
// kernels. Without programmatic launch the launch itself has given that guarantee and this returns at once.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream become resident, no more: its await_previous_kernel still waits for our end. It
// fires once all our CTAs have said so, so that the next kernel never takes a place that one of our CTAs still needs. Said
// behind await_previous_kernel: said before, a queue of kernels would become resident, one behind the other.
__device__ __forceinline__ void next_kernel_may_come() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Brings a kernel's parameters into the constant cache. Each line's first read is a miss; made before
// await_previous_kernel, the misses pass while the previous kernel still runs.
template <typename Params>
__device__ __forceinline__ void touch(const Params& params) {
#pragma unroll
  for (u32 at = 0; at < sizeof(Params) / 4; at += 16)
    asm volatile("" ::"r"(reinterpret_cast<const u32*>(&params)[at]));
}

// Whether any of the values is not zero; of addresses, always. To be asked before await_previous_kernel, and obeyed: the
// answer cannot be given until all of them are computed. Unasked, the assembler computes a value where it is first used,
// behind the wait, where a round pays for it.
template <typename... Values>
__device__ __forceinline__ bool known_by_now(Values... values) {
  return (u64(values) | ...) != 0;
}

// ---- one round -----------------------------------------------------------------------------------------------------

// Words of the region round_state.
constexpr u32 STATE_DISPATCH_ROUND = 0, STATE_COMBINE_ROUND = 1, STATE_ERROR = 2, STATE_PUSHED_ROUND = 3;
// Its counters, a pair by round parity each, every one on a line of its own.
enum Counter : u32 { DISPATCH_CLAIMS = 0, DISPATCH_EXITS, COMBINE_CLAIMS, COMBINE_EXITS, STAGE_CLAIMS };
// Behind them, on a line of its own: when a thread last read the host's words, in units of 1024 ns.
constexpr u32 STATE_LOOKED = 12 * LINE_BYTES / 4;

constexpr u32 KIND_TIMEOUT = 1, KIND_ABORTED = 2, KIND_MISMATCH_MAX_TOKENS = 3, KIND_MISMATCH_WIDTHS = 4;
constexpr u32 PHASE_DISPATCH = 1, PHASE_COMBINE = 2;
constexpr u32 SIGNAL_HEADER = 1, SIGNAL_BITS = 2, SIGNAL_ROW = 3, SIGNAL_FLAG = 4, SIGNAL_EPLB = 5;

// How this CTA's waits went, in shared memory.
constexpr u32 VERDICT_FINE = 0, VERDICT_FAILED = 1, VERDICT_CLEANS_UP = 2;

struct Round {
  u32 number, parity, phase;
  u32* state;
  HostWords* host;
  u32* verdict;

  __device__ __forceinline__ u32* counter(Counter which, u32 of_parity) const {
    return state + (1 + 2 * which + of_parity) * (LINE_BYTES / 4);
  }
};

// What begin_round makes a round of. Read apart from it, so that the reads of a kernel's inputs can stand between the
// two and all latencies overlap. Call after await_previous_kernel.
struct RoundWords {
  u32 dispatch_round, combine_round, error, pushed_round;
};

__device__ __forceinline__ RoundWords load_round(const u8* state) {
  RoundWords words;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.dispatch_round), "=r"(words.combine_round), "=r"(words.error), "=r"(words.pushed_round)
               : "l"(state));
  return words;
}

// Names one launch in the error word, which a failing launch sets; never 0, as no phase is.
__device__ __forceinline__ u32 launch_stamp(u32 number, u32 phase) { return number << 2 | phase; }

// Lets the other phase's next launch play round `number`. By one thread of a launch.
__device__ __forceinline__ void end_phase(u32* state, u32 number, u32 phase) {
  state[phase == PHASE_DISPATCH ? STATE_COMBINE_ROUND : STATE_DISPATCH_ROUND] = number;
}

// Which round this is; `failed` when an earlier kernel has. dispatch reads only what combine writes and the other way
// round, and a failure of this very launch does not count, so all threads of a kernel read the same, however late they
// start. A launch that finds a failure counts as one all the same: with the number of the launch that failed, a later one
// would take its failure for its own and play the round once more.
__device__ __forceinline__ Round begin_round(RoundWords words, u32 phase, u8* state, u64 host_words, u32* verdict,
                                             bool& failed) {
  // Keeps the first use of the words behind everything that is written before this call.
  asm volatile("" : "+r"(words.dispatch_round), "+r"(words.combine_round), "+r"(words.error));
  // Not 0 behind the last number: flags, words and lines that were never written bear it. 2 is of the same parity.
  const u32 next = words.dispatch_round == 0xffffffffu ? 2 : words.dispatch_round + 1;
  const u32 number = phase == PHASE_DISPATCH ? next : words.combine_round;
  failed = words.error != 0 && words.error != launch_stamp(number, phase);
  if (failed && threadIdx.x + blockIdx.x + blockIdx.y == 0) end_phase(reinterpret_cast<u32*>(state), number, phase);
  return {number, number & 1, phase, reinterpret_cast<u32*>(state), reinterpret_cast<HostWords*>(host_words), verdict};
}

// ---- waiting -------------------------------------------------------------------------------------------------------

struct Patience {
  u32 polls = 0;
  u64 since = 0;
};

// The first failure of a context tells its story to the host; the thread that told it makes its CTA clean up.
// Partner: the host reads `recorded`, then the rest; the fence orders the story before it.
__device__ __noinline__ void record_failure(Round round, u32 kind, u32 signal, u32 peer, u32 seen, u32 wanted,
                                            u32 waited_us) {
  if (atomicCAS(round.state + STATE_ERROR, 0u, launch_stamp(round.number, round.phase)) != 0) {
    atomicMax(round.verdict, VERDICT_FAILED);
    return;
  }
  HostWords* const host = round.host;
  host->kind = kind;
  host->phase = round.phase;
  host->signal = signal;
  host->peer = peer;
  host->round = round.number;
  host->seen = seen;
  host->wanted = wanted;
  host->waited_us = waited_us;
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  store_relaxed(&host->recorded, 1);
  atomicMax(round.verdict, VERDICT_CLEANS_UP);
}

constexpr u64 OVER = ~0ull;

// Called on every 64th poll that found nothing; returns since when this wait lasts, or OVER. Arguments by value: what is
// passed by reference to a function that is not inlined lives in local memory on every path.
__device__ __noinline__ u64 look_around(Round round, u64 since, u32 signal, u32 peer, u32 seen) {
  if (load_relaxed(round.state + STATE_ERROR)) {
    atomicMax(round.verdict, VERDICT_FAILED);
    return OVER;
  }
  const u64 now = now_ns();
  if (!since) since = now;
  // The host's words lie behind its bus, and thousands of warps may wait at once: were each to read them, the reads would
  // queue for longer than most waits last (milliseconds were seen). One thread at a time does, once in 100 us.
  u32* const looked = round.state + STATE_LOOKED;
  const u32 tick = u32(now >> 10), last = load_relaxed(looked);
  if (tick - last < 100 || atomicCAS(looked, last, tick) != last) return since;
  const u32 waited_us = u32((now - since) / 1000);
  const u32 abort = load_relaxed(&round.host->abort);
  if (abort) {
    record_failure(round, KIND_ABORTED, signal, abort == 0xffffffffu ? peer : abort - 1, seen, round.number, waited_us);
    return OVER;
  }
  const bool first = load_relaxed(&round.host->first_round) == round.number;
  const u64 budget = load_relaxed(first ? &round.host->startup_timeout_ns : &round.host->timeout_ns);
  if (now - since < budget) return since;
  record_failure(round, KIND_TIMEOUT, signal, peer, seen, round.number, waited_us);
  return OVER;
}

// To be asked after every poll that found nothing. True: give up, the failure is recorded.
__device__ __forceinline__ bool give_up(const Round& round, Patience& patience, u32 signal, u32 peer, u32 seen) {
  if (++patience.polls & 63) return false;
  patience.since = look_around(round, patience.since, signal, peer, seen);
  return patience.since == OVER;
}

// ---- word ----------------------------------------------------------------------------------------------------------

// Publishes 32 bits. Value and round are one 64-bit access, which is single-copy atomic: whoever sees the round sees
// the value. It orders nothing else. Partner: await_word.
__device__ __forceinline__ void publish_word(u64* to, u32 round, u32 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"((u64(round) << 32) | value));
}

// Waits for publish_word of this round; false when the wait was given up. The words of two rounds that may be in flight
// at once lie apart (by parity), so a later round never replaces one that is still waited for.
__device__ __forceinline__ bool await_word(const Round& round, const u64* from, u32 signal, u32 peer, u32& value) {
  Patience patience;
  while (true) {
    const u64 seen = load_relaxed(from);
    value = u32(seen);
    if (u32(seen >> 32) == round.number) return true;
    if (give_up(round, patience, signal, peer, u32(seen >> 32))) return false;
  }
}

// Two words that lie side by side, looked at together; each carries its own round.
__device__ __forceinline__ bool await_two_words(const Round& round, const u64* from, u32 signal, u32 peer, u32& first,
                                                u32& second) {
  Patience patience;
  while (true) {
    u64 low, high;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from));
    first = u32(low);
    second = u32(high);
    if (u32(low >> 32) == round.number && u32(high >> 32) == round.number) return true;
    if (give_up(round, patience, signal, peer, u32(low >> 32))) return false;
  }
}

// ---- line ----------------------------------------------------------------------------------------------------------

// 16 of a line's 128 bytes, by one of 8 neighbouring lanes whose stores leave as one 128-byte transaction; the last
// lane's upper half is the tag. PTX promises the atomicity of each 8 bytes only. That the 128 bytes of such a warp store
// become visible together is a property observed on the machines (and relied on by NCCL's LL128), not an ordering of the
// model. Every build probes it between its ranks (probe.cu); where a line is torn the bulk regime is used at every size.
// Partner: load_line_part, whose 8 lanes read the line by one warp load. Because the tag travels with the data, no
// fence orders them.
__device__ __forceinline__ void store_line_part(u64* to, u64 low, u64 high) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high));
}

__device__ __forceinline__ void load_line_part(const u64* from, u64& low, u64& high) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from));
}

// ---- flag ----------------------------------------------------------------------------------------------------------

// Publishes all that this CTA's threads wrote, wherever, before the barrier that must stand between them and this call.
// Barrier: their stores happen before it returns here. Fence + relaxed store: a release pattern at system scope, and
// fences are cumulative, so those stores happen before the flag is seen. Every CTA raises its own flag: a flag raised
// by one CTA for others would need them to synchronise first. Partners: await_flag, await_header.
__device__ __forceinline__ void release_rows() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ void raise_flag(u32* to, u32 round) { store_relaxed(to, round); }

// The same for what one warp wrote: __syncwarp orders the lanes' stores before lane 0's fence.
__device__ __forceinline__ void release_row(u32* flag, u32 round) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    release_rows();
    raise_flag(flag, round);
  }
}

// The acquire half. The load that sees the flag is an acquire itself: the rows are visible to the calling thread
// afterwards, and through a CTA barrier to its CTA; through the end of the kernel to later kernels.
__device__ __forceinline__ bool await_flag(const Round& round, const u32* from, u32 peer) {
  Patience patience;
  while (true) {
    u32 seen;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(from) : "memory");
    if (seen == round.number) return true;
    if (give_up(round, patience, SIGNAL_FLAG, peer, seen)) return false;
  }
}

// Waits for a header of three words. Where the last was published behind release_rows (bulk), what that released is
// acquired; where it was not (push and small), a header orders nothing, and rows have flags or tags of their own. All are
// looked at together, as each look takes as long as the memory is far.
__device__ __forceinline__ bool await_header(const Round& round, const u64* from, u32 peer, u32& first, u32& second,
                                             u32& last) {
  Patience patience;
  while (true) {
    u64 low, high, seen;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from));
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(from + 2) : "memory");
    first = u32(low);
    second = u32(high);
    last = u32(seen);
    if (u32(low >> 32) == round.number && u32(high >> 32) == round.number && u32(seen >> 32) == round.number) return true;
    if (give_up(round, patience, SIGNAL_HEADER, peer, u32(seen >> 32))) return false;
  }
}

// The same between CTAs of one GPU, for the tables of 32 tokens that one warp wrote. __syncwarp orders the lanes' stores
// before lane 0's fence. Partner: await_tables.
__device__ __forceinline__ void release_tables(const Round& round, u32* ready) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(ready), "r"(round.number));
  }
}

// All lanes wait by themselves: each then holds the acquire for its own reads of the tables.
__device__ __forceinline__ bool await_tables(const Round& round, const u32* ready, u32 self) {
  Patience patience;
  while (true) {
    u32 seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(ready) : "memory");
    if (seen == round.number) return true;
    if (give_up(round, patience, SIGNAL_BITS, self, seen)) return false;
  }
}

// ---- end of a round ------------------------------------------------------------------------------------------------

// Ends the kernel for this CTA; true if this CTA must clean up. All threads call it, and none touches outputs after it
// unless told to. `exits` counts CTAs that are done; the one that cleans up waits for the others (they end soon, the
// error is set) and 50 us more, because their last stores are not ordered by the counter: on the good path an ordered
// count would cost every round what only a failed one needs.
__device__ __forceinline__ bool end_round(const Round& round, Counter exits, Counter claims, u32 num_ctas, bool first_cta) {
  __syncthreads();
  const u32 verdict = *round.verdict;
  if (threadIdx.x == 0) {
    if (first_cta) {
      // The other parity's counters were last used by the round before, whose kernels have ended.
      *round.counter(exits, round.parity ^ 1) = 0;
      *round.counter(claims, round.parity ^ 1) = 0;
      if (round.phase == PHASE_COMBINE) *round.counter(STAGE_CLAIMS, round.parity ^ 1) = 0;
      end_phase(round.state, round.number, round.phase);
    }
    u32* const done = round.counter(exits, round.parity);
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(done) : "memory");
    if (verdict == VERDICT_CLEANS_UP) {
      const u64 since = now_ns();
      while (load_relaxed(done) < num_ctas && now_ns() - since < 1000000000) {
      }
      const u64 settled = now_ns();
      while (now_ns() - settled < 50000) {
      }
    }
  }
  if (verdict != VERDICT_CLEANS_UP) return false;
  __syncthreads();
  return true;
}
