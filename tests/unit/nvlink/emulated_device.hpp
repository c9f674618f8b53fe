// What the kernels need of a GPU, on a CPU: a CTA is an operating system thread, its threads are fibers that take turns.
//
// Owns thread indices, barriers, warp collectives and the numeric intrinsics. Weaker memory than the CPU's is not emulated:
// this finds wrong slots, indices, counts and waits, not missing fences.
#pragma once

#include <ucontext.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct Index {
  unsigned x, y, z;
};

namespace emulated {

struct Warp {
  uint64_t given[32], taken[32];
  unsigned arrived = 0, generation = 0;
};

struct Fiber {
  ucontext_t context;
  Index index;
  Warp* warp;
  bool done = false;
  const void* last_line = nullptr;
  uint64_t last_tag = 0;
  std::unique_ptr<char[]> stack;
};

extern thread_local Fiber* self;
extern thread_local Index block_index, block_size, grid_size;

void yield();
void linger();  // behind a load that may end a wait: other lanes' turn, and now and then a pause; see set_pauses
void barrier();
bool barrier_and(bool value);
const uint64_t* exchange(uint64_t value);  // one value per lane, once all lanes of the warp have come

inline uint64_t load(const void* from) { return __atomic_load_n(static_cast<const uint64_t*>(from), __ATOMIC_ACQUIRE); }

inline void load_two(const void* from, auto& low, auto& high) {
  low = load(from);
  high = load(static_cast<const uint64_t*>(from) + 1);
  yield();
}

// The 128 bytes of a line become visible together on a GPU. Here the lane of the tag reports the one it saw a poll
// earlier, so that whatever its neighbours read now is at least as new.
inline void load_line_part(const void* from, auto& low, auto& high) {
  load_two(from, low, high);
  if ((reinterpret_cast<uintptr_t>(from) & 127) != 112) return;
  const uint64_t tag = high;
  high = self->last_line == from ? self->last_tag : 0;
  self->last_line = from;
  self->last_tag = tag;
}

inline const void* aligned(const void* at, unsigned alignment) {
  if (reinterpret_cast<uintptr_t>(at) % alignment) abort();
  return at;
}

inline uint64_t nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

inline float from_half(unsigned bits) {
  const auto narrow = static_cast<unsigned short>(bits);
  _Float16 value;
  memcpy(&value, &narrow, 2);
  return static_cast<float>(value);
}

inline unsigned to_half(float value) {
  const auto half = static_cast<_Float16>(value);
  unsigned short bits;
  memcpy(&bits, &half, 2);
  return bits;
}

inline unsigned to_bf16(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

}  // namespace emulated

#define threadIdx (emulated::self->index)
#define blockIdx (emulated::block_index)
#define blockDim (emulated::block_size)
#define gridDim (emulated::grid_size)

inline void __syncthreads() { emulated::barrier(); }
inline int __syncthreads_and(int predicate) { return emulated::barrier_and(predicate); }
inline void __syncwarp() { emulated::exchange(0); }

template <class T>
T __shfl_sync(unsigned, T value, unsigned from) {
  uint64_t wide = 0;
  memcpy(&wide, &value, sizeof value);
  memcpy(&value, emulated::exchange(wide) + from % 32, sizeof value);
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned step) {
  return __shfl_sync(mask, value, threadIdx.x % 32 ^ step);
}
template <class T>
unsigned __match_any_sync(unsigned, T value) {
  const uint64_t* all = emulated::exchange(static_cast<uint64_t>(value));
  unsigned same = 0;
  for (unsigned lane = 0; lane < 32; ++lane) same |= unsigned(all[lane] == static_cast<uint64_t>(value)) << lane;
  return same;
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const uint64_t* all = emulated::exchange(value);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane]) << lane;
  return bits;
}
inline bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == ~0u; }
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }

template <class Step>
unsigned reduce(unsigned value, Step step) {
  const uint64_t* all = emulated::exchange(value);
  unsigned result = unsigned(all[0]);
  for (unsigned lane = 1; lane < 32; ++lane) result = step(result, unsigned(all[lane]));
  return result;
}
inline unsigned __reduce_or_sync(unsigned, unsigned v) { return reduce(v, [](unsigned a, unsigned b) { return a | b; }); }
inline unsigned __reduce_add_sync(unsigned, unsigned v) { return reduce(v, [](unsigned a, unsigned b) { return a + b; }); }
inline unsigned __reduce_min_sync(unsigned, unsigned v) {
  return reduce(v, [](unsigned a, unsigned b) { return a < b ? a : b; });
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  return reduce(v, [](unsigned a, unsigned b) { return a > b ? a : b; });
}

inline unsigned atomicAdd(unsigned* at, unsigned value) { return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST); }
inline unsigned atomicCAS(unsigned* at, unsigned old, unsigned value) {
  __atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return old;
}
inline void atomicMax(unsigned* at, unsigned value) {
  for (unsigned old = *at; old < value && atomicCAS(at, old, value) != old;) old = *at;
}

template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return C(a) < C(b) ? C(a) : C(b);
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return C(a) > C(b) ? C(a) : C(b);
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
// Compiled without contraction, so that a product and a sum are rounded apart.
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __float2int_rn(float a) { return static_cast<int>(std::nearbyint(a)); }
