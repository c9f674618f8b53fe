// nvlink/kernels/dispatch: one launch moves a round's rows to the ranks of their experts.
//
// Owns nothing but the list of its two regimes. See a2a/nvlink/params.py for what they are told and how they are launched.

#include "dispatch_bulk.cuh"
#include "dispatch_small.cuh"
