// Sixteen floats and what the kernels do with them; one header per instruction set, the same names in each.
//
// A kernel file defines PAGEDKV_LANES (the namespace that keeps its templates apart from those of the other files),
// is compiled for its instruction set, and includes this. Kernels written over Lanes read once and run everywhere.
//
// The names:
//   Lanes               sixteen float32
//   Pairs               sixteen pairs of bf16: lane n holds a column's values at k and k + 1
//   *_first(p, n)       the first n lanes, n in 0..16; the others are zero, and memory past them is not touched
//   dot(acc, w, x)      acc + w.even * x.even + w.odd * x.odd, x one pair of bf16 for all lanes
//   nibbles(p, j, t)    from 64 bytes (sixteen columns, eight k each): the pair j of 0..3, widened by table t
//   bytes(p)            from 32 bytes: sixteen pairs of int8, widened
#pragma once

#if defined(__AVX512F__)
#include "lanes_avx512.hpp"
#elif defined(__AVX2__)
#include "lanes_avx2.hpp"
#elif defined(__ARM_NEON)
#include "lanes_neon.hpp"
#else
#include "lanes_generic.hpp"
#endif
