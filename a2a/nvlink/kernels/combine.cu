// nvlink/kernels/combine: one launch brings a round's rows back and adds them.
//
// Owns nothing but the list of its regimes and payload types. See a2a/nvlink/params.py for what they are told and how
// they are launched.

#include "combine_bulk.cuh"
#include "combine_small.cuh"

#define COMBINE(regime, name, type)                                        \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS)                \
      combine_##regime##_##name(const __grid_constant__ CombineParams p) { \
    combine_##regime<type>(p);                                             \
  }

COMBINE(small, bf16, TYPE_BF16)
COMBINE(small, fp16, TYPE_FP16)
COMBINE(small, fp32, TYPE_FP32)
COMBINE(bulk, bf16, TYPE_BF16)
COMBINE(bulk, fp16, TYPE_FP16)
COMBINE(bulk, fp32, TYPE_FP32)
COMBINE(bulk, e4m3, TYPE_E4M3)
