// nvlink/kernels/combine: one launch brings a round's rows back and adds them.
//
// Owns nothing but the list of its regimes and payload types. See a2a/nvlink/params.py for what they are told and how
// they are launched.

#include "combine_bulk.cuh"
#include "combine_small.cuh"

// Small kernels are bound by how many CTAs are resident, bulk kernels by what each thread has in flight. Code for sm_120
// needs a few registers more than two small CTAs of that many threads have.
constexpr u32 SMALL_MIN_CTAS = __CUDA_ARCH__ >= 1200 ? 1 : 2;

#define COMBINE(regime, min_ctas, name, type)                              \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, min_ctas)      \
      combine_##regime##_##name(const __grid_constant__ CombineParams p) { \
    combine_##regime<type>(p);                                             \
  }

COMBINE(small, SMALL_MIN_CTAS, bf16, TYPE_BF16)
COMBINE(small, SMALL_MIN_CTAS, fp16, TYPE_FP16)
COMBINE(small, SMALL_MIN_CTAS, fp32, TYPE_FP32)
COMBINE(bulk, 1, bf16, TYPE_BF16)
COMBINE(bulk, 1, fp16, TYPE_FP16)
COMBINE(bulk, 1, fp32, TYPE_FP32)
COMBINE(bulk, 1, e4m3, TYPE_E4M3)
