// nvlink/kernels/combine: one launch brings a round's rows back and adds them.
//
// Owns nothing but the list of its regimes, payload types and kinds of output. See a2a/nvlink/params.py for what they are
// told and how they are launched.

#include "combine_bulk.cuh"
#include "combine_push.cuh"
#include "combine_small.cuh"

#define COMBINE(name, max_threads, min_ctas, body)                    \
  extern "C" __global__ void __launch_bounds__(max_threads, min_ctas) \
      name(const __grid_constant__ CombineParams p) {                 \
    body(p);                                                          \
  }

#ifdef QUANTIZED_OUTPUT
// What a warp keeps of its units while it quantises one takes more than the 128 registers of a thread of MAX_THREADS.
constexpr u32 QUANTIZED_THREADS = MAX_THREADS * 3 / 4;
#define COMBINE_TYPE(name, type)                                                              \
  COMBINE(combine_small_quantized_##name, MAX_SMALL_THREADS, 1, (combine_small<type, false>)) \
  COMBINE(combine_bulk_quantized_##name, QUANTIZED_THREADS, 1, combine_bulk<type>)            \
  COMBINE(combine_push_quantized_##name, QUANTIZED_THREADS, 1, combine_push<type>)
#define COMBINE_E4M3 COMBINE(combine_bulk_quantized_e4m3, QUANTIZED_THREADS, 1, combine_bulk<TYPE_E4M3>)
#else
// Small kernels are bound by how many CTAs are resident, bulk kernels by what each thread has in flight.
// With more than 32 picks per token such a share of the registers is too small.
constexpr bool SMALL_IS_LEAN = TOP_K <= 32;
#define COMBINE_TYPE(name, type)                                                                             \
  COMBINE(combine_small_words_##name, MAX_SMALL_THREADS, SMALL_IS_LEAN ? 3 : 1, (combine_small<type, true>))  \
  COMBINE(combine_small_bytes_##name, MAX_SMALL_THREADS, SMALL_IS_LEAN ? 2 : 1, (combine_small<type, false>)) \
  COMBINE(combine_bulk_##name, MAX_THREADS, 1, combine_bulk<type>)                                           \
  COMBINE(combine_push_##name, MAX_THREADS, 1, combine_push<type>)
#define COMBINE_E4M3 COMBINE(combine_bulk_e4m3, MAX_THREADS, 1, combine_bulk<TYPE_E4M3>)
#endif

// A module has the kernels of one payload type, so that the types compile side by side; all where none is named.
#if !defined(ONE_TYPE) || ONE_TYPE == 0
COMBINE_TYPE(bf16, TYPE_BF16)
#endif
#if !defined(ONE_TYPE) || ONE_TYPE == 1
COMBINE_TYPE(fp16, TYPE_FP16)
#endif
#if !defined(ONE_TYPE) || ONE_TYPE == 2
COMBINE_TYPE(fp32, TYPE_FP32)
#endif
#if !defined(ONE_TYPE) || ONE_TYPE == 3
COMBINE_E4M3
#endif
