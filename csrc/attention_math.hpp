// What the attention kernel is made of: 2^x, tanh, the formats that numbers are multiplied in, the register-blocked
// product. Over the vectors of one instruction set.
#pragma once
#include "attention.hpp"
#include "attention_ahead.hpp"

namespace pagedkv::PAGEDKV_NS {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kNothing = -__builtin_inff();

// Slots of a tile, in steps that every vector divides.
struct SlotRange {
  static constexpr int kStep = 16;
  int begin, end;
  // What lies in [first, last), rounded to whole steps.
  SlotRange within(int first, int last) const {
    const int from = first <= 0 ? 0 : first / kStep * kStep;
    const int to = last <= 0 ? 0 : last >= kTile ? kTile : (last + kStep - 1) / kStep * kStep;
    return {from > begin ? from : begin, to < end ? to : end};
  }
};

static inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

// 2^x for x <= 0, to about one part in 10^7; exactly 1 at 0 and exactly 0 below -126.5. Cephes' polynomial idea: split
// off the whole part, approximate 2^r on [-1/2, 1/2], put the whole part into the exponent.
static inline vf exp2_negative(vf x) {
  x = max(splat(-127.0f), x);  // in this order a NaN stays a NaN
  const vf n = round_even(x), r = sub(x, n);
  vf p = splat(1.32647271e-3f);
  p = fma(p, r, splat(9.67151266e-3f));
  p = fma(p, r, splat(5.55073374e-2f));
  p = fma(p, r, splat(2.40222421e-1f));
  p = fma(p, r, splat(6.93146978e-1f));
  p = fma(p, r, splat(1.0f));
  return mul(p, power_of_two(n));
}

static inline float exp2_negative(float x) { return x == 0.0f ? 1.0f : first_lane(exp2_negative(splat(x))); }

static inline vf tanh(vf x) {  // from 2^(-2 |x| log2 e), so nothing overflows
  const vf magnitude = max(x, sub(splat(0.0f), x));
  const vf t = exp2_negative(mul(magnitude, splat(-2.0f * kLog2e)));
  const vf y = div(sub(splat(1.0f), t), add(splat(1.0f), t));
  return mul(y, div(x, max(magnitude, splat(1e-30f))));
}

// A row of D numbers as floats, zeros up to padded.
template <class T>
static inline void widen_row(const T* from, int D, float* to, int padded) {
  int d = 0;
  for (; d + kLanes <= D; d += kLanes) store(to + d, load_as(from + d));
  for (; d < D; ++d) to[d] = widen(from[d]);
  for (; d < padded; ++d) to[d] = 0.0f;
}

// Numbers as they are multiplied: one float in a dword.
struct Floats {
  static constexpr bool kIntegers = false;
  static constexpr int kPerDword = 1;
  static int row_dwords(int D) { return D; }
  static constexpr int kDirectRows = 0;  // values are always packed
  using ValueRow = float;
  static inline vf mac(vf sum, vf packed, float a) { return fma(splat(a), packed, sum); }
  template <class T>
  static inline void row(const T* from, int D, float* to, int padded) {
    widen_row(from, D, to, padded);
  }
  static inline void weights(float* to, int slot, vf p) { store(to + slot, p); }
  static inline vf exp2(vf x) { return exp2_negative(x); }
  template <class T>
  static void pack_values(const T* const* rows, SlotRange seen, int D, int padded, float* to, float*, Ahead& ahead) {
    for (int s = seen.begin; s < seen.end; ++s) {
      widen_row(rows[s], D, to + s * padded, padded);
      if (s % 2) ahead.step();
    }
  }
  template <class T>
  static void pack_keys(const T* const* rows, SlotRange seen, int D, int padded, float* to, float* wide, Ahead& ahead) {
    const float* at[kTile];
    for (int s = seen.begin; s < seen.end; ++s) {
      at[s] = wide + s * padded;
      widen_row(rows[s], D, wide + s * padded, padded);
      if (s % 2) ahead.step();
    }
    for (int d = 0; d < D; d += kLanes)
      for (int s = seen.begin; s < seen.end; s += kLanes) transpose(at + s, d, to + d * kTile + s, kTile);
  }
};

}  // namespace pagedkv::PAGEDKV_NS

namespace pagedkv::PAGEDKV_NS {

// A number as a type, so that loops over rows in registers have a length known when compiled.
template <int N>
struct Count {
  static constexpr int value = N;
};
template <class Run>  // always inlined: what `run` holds would go over the stack, in vectors put together from scalars
__attribute__((always_inline)) static inline void by_rows(int rows, const Run& run) {
  switch (rows) {
    case 1: return run(Count<1>());
    case 2: return run(Count<2>());
    case 3: return run(Count<3>());
    case 4: return run(Count<4>());
    case 5: return run(Count<5>());
    default: return run(Count<6>());
  }
}

}  // namespace pagedkv::PAGEDKV_NS

#ifdef PAGEDKV_BF16
#include "attention_bf16.hpp"
#include "attention_int8.hpp"
#endif

namespace pagedkv::PAGEDKV_NS {

// sums[r][0 .. V lanes) = start[r] * sums + a[r] x packed over n > 0 dwords, in order; without Sum, the product alone.
// V vectors of R rows in registers, which is why the loop is one that runs at least once.
template <class F, bool Sum, int R, int V>
static void multiply(const float* a, int a_stride, const float* packed, int packed_stride, float* sums, int stride,
                     const float* start, int n, Ahead& ahead) {
  vf sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      sum[r][v] = Sum ? mul(load(sums + r * stride + v * kLanes), splat(start[r])) : splat(0.0f);
  int i = 0;
  do {
    ahead.step();
    vf b[V];
    for (int v = 0; v < V; ++v) b[v] = load(packed + i * packed_stride + v * kLanes);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] = F::mac(sum[r][v], b[v], a[r * a_stride + i]);
  } while (++i < n);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(sums + r * stride + v * kLanes, sum[r][v]);
}

template <class F, bool Sum, int R>
static void multiply_columns(const float* a, int a_stride, const float* packed, int packed_stride, float* sums,
                             int stride, const float* start, int n, int columns, Ahead& ahead) {
  int c = 0;
  for (; c + kBlockVectors * kLanes <= columns; c += kBlockVectors * kLanes)
    multiply<F, Sum, R, kBlockVectors>(a, a_stride, packed + c, packed_stride, sums + c, stride, start, n, ahead);
  if (c + 2 * kLanes <= columns) {
    multiply<F, Sum, R, 2>(a, a_stride, packed + c, packed_stride, sums + c, stride, start, n, ahead);
    c += 2 * kLanes;
  }
  if (c < columns)
    multiply<F, Sum, R, 1>(a, a_stride, packed + c, packed_stride, sums + c, stride, start, n, ahead);
}

template <class F, bool Sum>
static void multiply_rows(int rows, const float* a, int a_stride, const float* packed, int packed_stride, float* sums,
                          int stride, const float* start, int n, int columns, Ahead& ahead) {
  by_rows(rows, [&](auto R) {
    multiply_columns<F, Sum, R.value>(a, a_stride, packed, packed_stride, sums, stride, start, n, columns, ahead);
  });
}

}  // namespace pagedkv::PAGEDKV_NS
