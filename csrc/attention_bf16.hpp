// Two bf16 in a dword, for vdpbf16ps. Included by attention_kernel.hpp where the instruction set has it.
//
// Pools of bf16 go in as they are; int8 and e4m3 are exact in bf16, and their scales are applied to scores and weights.
// The query is rounded to bf16 (as a bf16 model's query is already), and so are the weights, to nearest.
#pragma once

namespace pagedkv::PAGEDKV_NS {

// The low and high bytes of the bf16 of every int8 or e4m3, for byte permutes.
struct ByteTable {
  alignas(64) uint8_t low[256];
  alignas(64) uint8_t high[256];
};
template <class T>
static ByteTable make_table() {
  ByteTable table;
  for (int i = 0; i < 256; ++i) {
    T value;
    const uint8_t byte = static_cast<uint8_t>(i);
    __builtin_memcpy(&value, &byte, 1);
    const uint32_t bits = to_bits(widen(value)) >> 16;
    table.low[i] = static_cast<uint8_t>(bits);
    table.high[i] = static_cast<uint8_t>(bits >> 8);
  }
  return table;
}
static const ByteTable int8_table = make_table<int8_t>();
static const ByteTable e4m3_table = make_table<e4m3_t>();
static inline const ByteTable& table_of(const int8_t*) { return int8_table; }
static inline const ByteTable& table_of(const e4m3_t*) { return e4m3_table; }

static inline __m512i look_up(const uint8_t* table, __m512i bytes, __mmask64 upper) {
  const __m512i a = _mm512_permutex2var_epi8(_mm512_load_si512(table), bytes, _mm512_load_si512(table + 64));
  const __m512i b = _mm512_permutex2var_epi8(_mm512_load_si512(table + 128), bytes, _mm512_load_si512(table + 192));
  return _mm512_mask_mov_epi8(a, upper, b);
}

struct BFloats {
  static constexpr bool kIntegers = false;
  static constexpr int kPerDword = 2;
  static int row_dwords(int D) { return (D + 1) / 2; }
  static inline vf mac(vf sum, vf packed, float a) {
    return _mm512_dpbf16_ps(sum, (__m512bh)packed, (__m512bh)_mm512_set1_ps(a));
  }

  template <class T>
  static inline void row(const T* from, int D, float* to, int padded) {
    bfloat_t* out = reinterpret_cast<bfloat_t*>(to);
    int d = 0;
    for (; d + kLanes <= D; d += kLanes) store_as(out + d, load_as(from + d));
    for (; d < D; ++d) narrow(widen(from[d]), out[d]);
    for (; d < padded; ++d) out[d] = bfloat_t{0};
  }

  static inline void weights(float* to, int slot, vf p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<bfloat_t*>(to) + slot),
                        (__m256i)_mm512_cvtneps_pbh(p));
  }

  // Weights are rounded to 8 bits, so three terms (one part in 10^4) do.
  static inline vf exp2(vf x) {
    x = max(splat(-127.0f), x);
    const vf n = round_even(x), r = sub(x, n);
    vf p = splat(5.50089301e-2f);
    p = fma(p, r, splat(2.42210960e-1f));
    p = fma(p, r, splat(6.93282927e-1f));
    p = fma(p, r, splat(1.0f));
    return _mm512_scalef_ps(p, n);
  }

  // kDims dims of a row, zeros from there to 32.
  template <bool Whole>
  static inline __m512i load_dims(const bfloat_t* from, int left) {
    return Whole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16((1u << left) - 1, from);
  }

  // Rows from memory: the prefetch stands between the loads; in one burst it would hold up the loads that follow. A
  // loop of loads by way of the stack, because with one unrolled the call is slower by a tenth.
  template <bool Whole>
  static inline void load_keys(const bfloat_t* const* rows, int d, int left, __m512 (&r)[16], Ahead& ahead) {
#pragma GCC unroll 1
    for (int i = 0; i < 16; ++i) {
      r[i] = _mm512_castsi512_ps(load_dims<Whole>(rows[i] + d, left));
      if (i % 2) ahead.step();
    }
  }
  struct Widened {};  // rows from the cache: nothing stands between the loads
  template <bool Whole>
  static inline void load_keys(const bfloat_t* const* rows, int d, int left, __m512 (&r)[16], Widened) {
    for (int i = 0; i < 16; ++i) r[i] = _mm512_castsi512_ps(load_dims<Whole>(rows[i] + d, left));
  }

  template <bool Whole, class Source>
  static inline void transpose_keys(const bfloat_t* const* rows, int d, int left, float* to, Source& source) {
    __m512 r[16];
    load_keys<Whole>(rows, d, left, r, source);
    transpose_registers(r);
    for (int i = 0; i < 16; ++i) store(to + i * kTile, r[i]);
  }

  template <class Source>
  static void transpose_all(const bfloat_t* const* rows, SlotRange seen, int D, float* to, Source& source) {
    for (int s = seen.begin; s < seen.end; s += 16) {
      int d = 0;
      for (; d + 32 <= D; d += 32) transpose_keys<true>(rows + s, d, 32, to + d / 2 * kTile + s, source);
      if (d < D) transpose_keys<false>(rows + s, d, D - d, to + d / 2 * kTile + s, source);
    }
  }
  static void pack_keys(const bfloat_t* const* rows, SlotRange seen, int D, int, float* to, float*, Ahead& ahead) {
    transpose_all(rows, seen, D, to, ahead);
  }

  // Two rows of 32 dims, their numbers paired.
  struct Pairs {
    alignas(64) static constexpr uint16_t kFirst[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i first = _mm512_load_si512(kFirst);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    inline vf low(__m512i a, __m512i b) const { return _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, first, b)); }
    inline vf high(__m512i a, __m512i b) const { return _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, second, b)); }
  };

  static void pack_values(const bfloat_t* const* rows, SlotRange seen, int D, int padded, float* to, float*,
                          Ahead& ahead) {
    const Pairs pairs;
    for (int s = seen.begin; s < seen.end; s += 2) {
      ahead.step();
      float* out = to + s / 2 * padded;
      int d = 0;
      for (; d + 32 <= D; d += 32) {
        const __m512i a = load_dims<true>(rows[s] + d, 32), b = load_dims<true>(rows[s + 1] + d, 32);
        store(out + d, pairs.low(a, b));
        store(out + d + 16, pairs.high(a, b));
      }
      if (d < D) {
        const __m512i a = load_dims<false>(rows[s] + d, D - d), b = load_dims<false>(rows[s + 1] + d, D - d);
        store(out + d, pairs.low(a, b));
        if (D - d > 16) store(out + d + 16, pairs.high(a, b));
      }
    }
  }

  // Weighted values for few rows, straight from the pool: the pairs stay in registers.
  static constexpr int kDirectRows = 24;
  using ValueRow = bfloat_t;

  template <int R, int V, bool Whole>  // V vectors of 16 dims
  static inline void add_values(const bfloat_t* const* rows, SlotRange seen, int d, int left, const float* weights,
                                float* out, int stride, const float* start, Ahead& ahead) {
    const Pairs pairs;
    vf sum[R][V];
    for (int q = 0; q < R; ++q)
      for (int v = 0; v < V; ++v) sum[q][v] = mul(load(out + q * stride + v * 16), splat(start[q]));
    int s = seen.begin;
    do {
      ahead.step();
      vf b[V];
      for (int v = 0; v < V; v += 2) {
        const __m512i x = load_dims<Whole>(rows[s] + d + v * 16, left);
        const __m512i y = load_dims<Whole>(rows[s + 1] + d + v * 16, left);
        b[v] = pairs.low(x, y);
        if (v + 1 < V) b[v + 1] = pairs.high(x, y);
      }
      for (int q = 0; q < R; ++q)
        for (int v = 0; v < V; ++v) sum[q][v] = mac(sum[q][v], b[v], weights[q * kTile + s / 2]);
      s += 2;
    } while (s < seen.end);
    for (int q = 0; q < R; ++q)
      for (int v = 0; v < V; ++v) store(out + q * stride + v * 16, sum[q][v]);
  }

  template <int R>
  static void values(const bfloat_t* const* rows, SlotRange seen, int D, const float* weights, float* out, int stride,
                     const float* start, Ahead& ahead) {
    int d = 0;
    for (; d + 64 <= D; d += 64) add_values<R, 4, true>(rows, seen, d, 32, weights, out + d, stride, start, ahead);
    if (d + 32 <= D) {
      add_values<R, 2, true>(rows, seen, d, 32, weights, out + d, stride, start, ahead);
      d += 32;
    }
    if (D - d > 16) add_values<R, 2, false>(rows, seen, d, D - d, weights, out + d, stride, start, ahead);
    else if (d < D) add_values<R, 1, false>(rows, seen, d, D - d, weights, out + d, stride, start, ahead);
  }

  static void weigh(int count, const bfloat_t* const* rows, SlotRange seen, int D, const float* weights, float* out,
                    int stride, const float* start, Ahead& ahead) {
    by_rows(count, [&](auto R) { values<R.value>(rows, seen, D, weights, out, stride, start, ahead); });
  }

  // Bytes: widen the rows first.
  template <class T>
  static void widen_bytes(const T* const* rows, SlotRange seen, int D, float* wide, const bfloat_t** at, Ahead& ahead) {
    const ByteTable& table = table_of(rows[0]);
    const int stride = round_up(D, 32);
    const __m512i spread = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // unpack works inside 128 bits
    for (int s = seen.begin; s < seen.end; ++s) {
      bfloat_t* out = reinterpret_cast<bfloat_t*>(wide) + s * stride;
      at[s] = out;
      if (s % 2) ahead.step();
      for (int d = 0; d < D; d += 64) {
        const int left = D - d;
        __m512i bytes = left >= 64 ? _mm512_loadu_si512(rows[s] + d)
                                   : _mm512_maskz_loadu_epi8((uint64_t{1} << left) - 1, rows[s] + d);
        bytes = _mm512_permutexvar_epi64(spread, bytes);
        const __mmask64 upper = _mm512_movepi8_mask(bytes);
        const __m512i low = look_up(table.low, bytes, upper), high = look_up(table.high, bytes, upper);
        _mm512_storeu_si512(out + d, _mm512_unpacklo_epi8(low, high));
        if (left > 32) _mm512_storeu_si512(out + d + 32, _mm512_unpackhi_epi8(low, high));
      }
    }
  }
  template <class T>
  static void pack_keys(const T* const* rows, SlotRange seen, int D, int, float* to, float* wide, Ahead& ahead) {
    const bfloat_t* at[kTile];
    widen_bytes(rows, seen, D, wide, at, ahead);
    Widened widened;
    transpose_all(at, seen, D, to, widened);
  }
  template <class T>
  static void pack_values(const T* const* rows, SlotRange seen, int D, int padded, float* to, float* wide,
                          Ahead& ahead) {
    const bfloat_t* at[kTile];
    widen_bytes(rows, seen, D, wide, at, ahead);
    pack_values(at, seen, D, padded, to, wide, ahead);
  }

  // The rows as `weigh` takes them: where they lie, or widened.
  static void value_rows(const bfloat_t* const* rows, SlotRange seen, int, float*, const bfloat_t** at, Ahead&) {
    for (int s = seen.begin; s < seen.end; ++s) at[s] = rows[s];
  }
  template <class T>
  static void value_rows(const T* const* rows, SlotRange seen, int D, float* wide, const bfloat_t** at, Ahead& ahead) {
    widen_bytes(rows, seen, D, wide, at, ahead);
  }
};

}  // namespace pagedkv::PAGEDKV_NS
