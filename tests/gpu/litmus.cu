// Order between two GPUs, looked at where it could break: rows behind a flag, and lines that carry their own.
//
// Each device runs one launch of 2 * ctas CTAs: the first half writes to the peer and waits for its answers, the other
// half watches what the peer writes here. Both directions are under way at once. The product's sync.cuh stands in front.
constexpr u32 STYLE_STORES = 0, STYLE_BULK_COPIES = 1;
constexpr u32 FLAG_BYTES = 128;

struct Clock {
  u64 since, budget_ns;
  u32 polls;

  __device__ bool over() { return !(++polls & 1023) && now_ns() - since > budget_ns; }
};

__device__ __forceinline__ void store_vector(u64* to, u64 low, u64 high) {
  asm volatile("st.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high) : "memory");
}

__device__ __forceinline__ void load_vector(const u64* from, u64& low, u64& high) {
  asm volatile("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from) : "memory");
}

// One thread waits, acquires, and hands on what it acquired by the barrier: as the kernels do.
__device__ __forceinline__ bool await(const u32* flag, u32 wanted, Clock& clock) {
  __shared__ u32 given_up;
  if (threadIdx.x == 0) {
    u32 seen;
    given_up = 0;
    do {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
      if (seen < wanted && clock.over()) given_up = 1;
    } while (seen < wanted && !given_up);
  }
  __syncthreads();
  const bool fine = !given_up;
  __syncthreads();
  return fine;
}

__device__ __forceinline__ void write_rows(const LitmusParams& p, u32 cta, u32 number) {
  const u32 vectors = p.vectors_per_thread * blockDim.x;
  u64* const rows = reinterpret_cast<u64*>(p.peer_data) + u64(cta) * vectors * 2;
  if (p.style == STYLE_STORES) {
    for (u32 i = 0; i < p.vectors_per_thread; ++i) {
      const u32 at = i * blockDim.x + threadIdx.x;
      store_vector(rows + 2 * at, number, number);
    }
    __syncthreads();
  } else {
#if __CUDA_ARCH__ >= 900
    extern __shared__ u64 tile[];
    // One tile of a vector per thread, sent as often as the row is long.
    tile[2 * threadIdx.x] = tile[2 * threadIdx.x + 1] = number;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
      const u32 from = u32(__cvta_generic_to_shared(tile)), bytes = blockDim.x * 16;
      for (u32 i = 0; i < p.vectors_per_thread; ++i)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(rows + 2 * i * blockDim.x),
                     "r"(from), "r"(bytes)
                     : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    __syncthreads();
#endif
  }
}

// Rows, then a flag: with the fence the pattern of release_rows and raise_flag; without it, the control.
extern "C" __global__ void __launch_bounds__(256, 1) rows_behind_a_flag(const __grid_constant__ LitmusParams p) {
  const bool writes = blockIdx.x < p.ctas;
  const u32 cta = writes ? blockIdx.x : blockIdx.x - p.ctas, vectors = p.vectors_per_thread * blockDim.x;
  Clock clock{now_ns(), p.budget_ns, 0};
  u64 stale = 0, seen = 0;
  for (u32 number = 1; number <= p.updates; ++number) {
    if (writes) {
      write_rows(p, cta, number);
      if (threadIdx.x == 0) {
        if (p.fenced) release_rows();
        raise_flag(reinterpret_cast<u32*>(p.peer_flags + u64(cta) * FLAG_BYTES), number);
      }
      if (!await(reinterpret_cast<const u32*>(p.answers + u64(cta) * FLAG_BYTES), number, clock)) break;
    } else {
      if (!await(reinterpret_cast<const u32*>(p.flags + u64(cta) * FLAG_BYTES), number, clock)) break;
      const u64* const rows = reinterpret_cast<const u64*>(p.data) + u64(cta) * vectors * 2;
      // What was written last is looked at first.
      for (u32 i = p.vectors_per_thread; i-- > 0;) {
        u64 low, high;
        load_vector(rows + 2 * (i * blockDim.x + threadIdx.x), low, high);
        stale += low != number || high != number;
        ++seen;
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        release_rows();
        raise_flag(reinterpret_cast<u32*>(p.peer_answers + u64(cta) * FLAG_BYTES), number);
      }
    }
  }
  u64* const counts = reinterpret_cast<u64*>(p.counts);
  if (seen) atomicAdd(counts, seen);
  if (stale) atomicAdd(counts + 1, stale);
}

// Rows of a warp, then its flag: with the fence the pattern of release_row, as pushed rows of combine are published;
// without it, the control.
extern "C" __global__ void __launch_bounds__(256, 1) rows_of_a_warp(const __grid_constant__ LitmusParams p) {
  const bool writes = blockIdx.x < p.ctas;
  const u32 cta = writes ? blockIdx.x : blockIdx.x - p.ctas, lane = threadIdx.x % 32;
  const u32 warp = cta * (blockDim.x / 32) + threadIdx.x / 32, vectors = p.vectors_per_thread * 32;
  Clock clock{now_ns(), p.budget_ns, 0};
  u64 stale = 0, seen = 0;
  u32* const to = reinterpret_cast<u32*>((writes ? p.peer_flags : p.peer_answers) + u64(warp) * FLAG_BYTES);
  const u32* const awaited = reinterpret_cast<const u32*>((writes ? p.answers : p.flags) + u64(warp) * FLAG_BYTES);
  bool over = false;
  for (u32 number = 1; number <= p.updates && !over; ++number) {
    if (writes) {
      u64* const rows = reinterpret_cast<u64*>(p.peer_data) + u64(warp) * vectors * 2;
      for (u32 i = lane; i < vectors; i += 32) store_vector(rows + 2 * i, number, number);
      if (p.fenced) {
        release_row(to, number);
      } else {
        __syncwarp();
        if (lane == 0) raise_flag(to, number);
      }
    }
    u32 reached = 0;
    while (!over && !__all_sync(ALL_LANES, reached >= number)) {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(reached) : "l"(awaited) : "memory");
      over = __any_sync(ALL_LANES, clock.over());
    }
    if (writes || over) continue;
    const u64* const rows = reinterpret_cast<const u64*>(p.data) + u64(warp) * vectors * 2;
    // What was written last is looked at first.
    for (u32 i = p.vectors_per_thread; i-- > 0;) {
      u64 low, high;
      load_vector(rows + 2 * (i * 32 + lane), low, high);
      stale += low != number || high != number;
      ++seen;
    }
    release_row(to, number);
  }
  u64* const counts = reinterpret_cast<u64*>(p.counts);
  if (seen) atomicAdd(counts, seen);
  if (stale) atomicAdd(counts + 1, stale);
}

// Lines of 128 bytes with a tag, as the small regime sends them; `split` is the control: two stores a line, the tag's
// half first.
extern "C" __global__ void __launch_bounds__(256, 1) lines_with_a_tag(const __grid_constant__ LitmusParams p) {
  const bool writes = blockIdx.x < p.ctas;
  const u32 cta = writes ? blockIdx.x : blockIdx.x - p.ctas, lane = threadIdx.x % 32;
  const u32 warp = cta * (blockDim.x / 32) + threadIdx.x / 32;
  Clock clock{now_ns(), p.budget_ns, 0};
  u64 seen = 0, torn = 0;
  u64* const to = reinterpret_cast<u64*>(p.peer_data + u64(warp) * 512 + lane * 16);
  const u64* const from = reinterpret_cast<const u64*>(p.data + u64(warp) * 512 + lane * 16);
  const u32* const answer = reinterpret_cast<const u32*>(p.answers + u64(warp) * FLAG_BYTES);
  u32* const peer_answer = reinterpret_cast<u32*>(p.peer_answers + u64(warp) * FLAG_BYTES);
  bool over = false;
  for (u32 number = 1; number <= p.updates && !over; ++number) {
    const u64 word = (u64(number) << 32) | (number * 2654435761u + lane);
    if (writes) {
      if (!p.split) {
        store_line_part(to, word, word);
      } else {
        if (lane % 8 >= 4) store_line_part(to, word, word);
        __syncwarp();
        if (lane % 8 < 4) store_line_part(to, word, word);
      }
      while (!over && !__all_sync(ALL_LANES, load_relaxed(answer) >= number)) over = __any_sync(ALL_LANES, clock.over());
    } else {
      bool judged = false;
      while (!over && !__all_sync(ALL_LANES, judged)) {
        u64 low, high;
        load_line_part(from, low, high);
        const u32 tag = u32(__shfl_sync(ALL_LANES, high, lane | 7) >> 32);
        if (!judged && tag == number) {
          judged = true;
          seen += lane % 8 == 7;
          torn += low != word || high != word;
        }
        over = __any_sync(ALL_LANES, clock.over());
      }
      __syncwarp();
      if (lane == 0) store_relaxed(peer_answer, number);
    }
  }
  u64* const counts = reinterpret_cast<u64*>(p.counts);
  if (seen) atomicAdd(counts, seen);
  if (torn) atomicAdd(counts + 1, torn);
}
