// nvlink/kernels/combine: one launch brings a round's rows back and adds them.
//
// Owns nothing but the list of its regimes and payload types. See a2a/nvlink/params.py for what they are told and how
// they are launched.

#include "combine_bulk.cuh"
#include "combine_small.cuh"

// Small kernels are bound by how many CTAs are resident, bulk kernels by what each thread has in flight.
// With more than 32 picks per token two CTAs' registers are too few for each.
constexpr u32 SMALL_MIN_CTAS = TOP_K > 32 ? 1 : 2;

#define COMBINE(regime, max_threads, min_ctas, name, type)                 \
  extern "C" __global__ void __launch_bounds__(max_threads, min_ctas)      \
      combine_##regime##_##name(const __grid_constant__ CombineParams p) { \
    combine_##regime<type>(p);                                             \
  }

COMBINE(small, MAX_SMALL_THREADS, SMALL_MIN_CTAS, bf16, TYPE_BF16)
COMBINE(small, MAX_SMALL_THREADS, SMALL_MIN_CTAS, fp16, TYPE_FP16)
COMBINE(small, MAX_SMALL_THREADS, SMALL_MIN_CTAS, fp32, TYPE_FP32)
COMBINE(bulk, MAX_THREADS, 1, bf16, TYPE_BF16)
COMBINE(bulk, MAX_THREADS, 1, fp16, TYPE_FP16)
COMBINE(bulk, MAX_THREADS, 1, fp32, TYPE_FP32)
COMBINE(bulk, MAX_THREADS, 1, e4m3, TYPE_E4M3)
