// int8 pools in integers, for vpdpbusd (unsigned bytes times signed bytes, four of them summed in a dword).
//
// A query row and a row of weights become two bytes a number, relative to the row's own largest; a product is then two
// passes over the packed bytes, high bytes first. Sums in int32 are exact, so their order is free, and nothing can
// overflow in a tile: 127 * 128 * 255 * 256 dimensions and 255 * 256 * 128 * 64 slots are below 2^31. Included by
// attention_kernel.hpp where the instruction set has it.
#pragma once

namespace pagedkv::PAGEDKV_NS {

struct Bytes {
  static constexpr bool kIntegers = true;
  static constexpr int kPerDword = 4;
  static constexpr int kDirectRows = 0;  // values are always packed
  using ValueRow = int8_t;

  // A query row: high bytes, low bytes (128 high + low, low in [-64, 63]), then its unit, and 128 times its sum, which
  // takes off again what the keys got added to be unsigned.
  static int quads(int D) { return (D + 3) / 4; }
  static int row_dwords(int D) { return 2 * quads(D) + 2; }

  template <class T>
  static void row(const T* from, int D, float* to, int) {
    constexpr float kLargest = 127.0f * 128.0f;
    const int n = 4 * quads(D);
    alignas(64) float wide[kMaxHeadDim];
    widen_row(from, D, wide, round_up(D, 16));
    vf top = splat(0.0f);
    __mmask16 nan = 0;
    for (int d = 0; d < D; d += 16) {
      const vf x = load(wide + d);
      nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      top = max(top, _mm512_abs_ps(x));
    }
    const float largest = hmax(top);
    const bool finite = !nan && largest < __builtin_inff();
    const vf factor = splat(finite && largest > 1e-30f ? kLargest / largest : 0.0f);
    int8_t *high = reinterpret_cast<int8_t*>(to), *low = high + n;
    __m512i sum = _mm512_setzero_si512();
    for (int d = 0; d < n; d += 16) {
      const __mmask16 here = n - d >= 16 ? 0xffff : (1 << (n - d)) - 1;
      const __m512i whole = finite ? _mm512_cvtps_epi32(mul(load(wide + d), factor)) : _mm512_setzero_si512();
      const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
      _mm512_mask_cvtepi32_storeu_epi8(high + d, here, upper);
      _mm512_mask_cvtepi32_storeu_epi8(low + d, here, _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 7)));
      sum = _mm512_add_epi32(sum, whole);
    }
    const int32_t added = 128 * _mm512_reduce_add_epi32(sum);
    to[n / 2] = finite ? largest / kLargest : __builtin_nanf("");
    __builtin_memcpy(to + n / 2 + 1, &added, sizeof added);
  }

  static inline __m512i load_dims(const int8_t* from, int left) {
    return left >= 64 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi8((uint64_t{1} << left) - 1, from);
  }

  // Keys as unsigned bytes, [D / 4][kTile] dwords of four dimensions of a slot.
  static void pack_keys(const int8_t* const* rows, SlotRange seen, int D, int, float* to, float*, Ahead& ahead) {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    for (int d = 0; d < D; d += 64)
      for (int s = seen.begin; s < seen.end; s += 16) {
        __m512 r[16];
#pragma GCC unroll 16  // else the rows go over the stack
        for (int i = 0; i < 16; ++i) {
          r[i] = _mm512_castsi512_ps(_mm512_xor_si512(load_dims(rows[s + i] + d, D - d), sign));
          if (i % 8 == 7) ahead.step();
        }
        transpose_registers(r);
        for (int i = 0; i < 16; ++i) store(to + (d / 4 + i) * kTile + s, r[i]);
      }
  }

  // Values in [kTile / 4][round_up(D, 64)] dwords of four slots of a dimension.
  static void pack_values(const int8_t* const* rows, SlotRange seen, int D, int, float* to, float*, Ahead& ahead) {
    const __m512i spread = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const int width = round_up(D, 64);  // unpack works inside 128 bits, so the dwords are spread over them first
    for (int s = seen.begin; s < seen.end; s += 4)
      for (int d = 0; d < D; d += 64) {
        __m512i r[4];
        for (int i = 0; i < 4; ++i) r[i] = _mm512_permutexvar_epi32(spread, load_dims(rows[s + i] + d, D - d));
        ahead.step();
        const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpacklo_epi8(r[2], r[3]);
        const __m512i c = _mm512_unpackhi_epi8(r[0], r[1]), e = _mm512_unpackhi_epi8(r[2], r[3]);
        float* out = to + s / 4 * width + d;
        _mm512_storeu_si512(out, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(out + 16, _mm512_unpackhi_epi16(a, b));
        _mm512_storeu_si512(out + 32, _mm512_unpacklo_epi16(c, e));
        _mm512_storeu_si512(out + 48, _mm512_unpackhi_epi16(c, e));
      }
  }

  static inline vf exp2(vf x) { return BFloats::exp2(x); }  // one part in 10^4, far below what int8 lost

  // A row of weights becomes high bytes and low bytes (256 high + low), and their unit.
  static inline void close_weights(const float* from, SlotRange seen, float* to) {
    vf top = splat(0.0f);
    __mmask16 nan = 0;
    for (int v = seen.begin; v < seen.end; v += kLanes) {
      const vf p = load(from + v);
      nan |= _mm512_cmp_ps_mask(p, p, _CMP_UNORD_Q);
      top = max(top, p);
    }
    const float largest = nan ? __builtin_nanf("") : hmax(top);
    const vf factor = splat(largest > 1e-30f ? 65535.0f / largest : 0.0f);
    char* bytes = reinterpret_cast<char*>(to);
    for (int v = seen.begin; v < seen.end; v += kLanes) {
      const __m512i whole = _mm512_cvtps_epi32(mul(load(from + v), factor));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + v), _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + kTile + v), _mm512_cvtepi32_epi8(whole));
    }
    to[kTile / 2] = largest / 65535.0f;
  }

  // R rows of bytes, high ones then `low` dwords further on the low ones, times V packed vectors over n dwords.
  // Signed: the rows are signed and the packed bytes unsigned (scores), else the other way round (values).
  template <bool Signed, int R, int V>
  static inline void multiply(const float* a, int a_stride, int low, const float* packed, int packed_stride, int n,
                              __m512i (&sum)[R][V], Ahead& ahead) {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] = _mm512_setzero_si512();
    for (int half = 0; half < 2; ++half, a += low) {
      if (half)
        for (int r = 0; r < R; ++r)
          for (int v = 0; v < V; ++v) sum[r][v] = _mm512_slli_epi32(sum[r][v], Signed ? 7 : 8);
      int i = 0;
      do {
        ahead.step();
        __m512i b[V];
        for (int v = 0; v < V; ++v) b[v] = _mm512_loadu_si512(packed + i * packed_stride + v * kLanes);
        for (int r = 0; r < R; ++r) {
          const __m512i x = _mm512_castps_si512(splat(a[r * a_stride + i]));
          for (int v = 0; v < V; ++v)
            sum[r][v] = Signed ? _mm512_dpbusd_epi32(sum[r][v], b[v], x) : _mm512_dpbusd_epi32(sum[r][v], x, b[v]);
        }
      } while (++i < n);
    }
  }

  template <int R, int V>  // a function of its own: inlined, its sums are moved from register to register
  __attribute__((noinline)) static void scores_of(const float* query, int D, const float* keys, float* scores,
                                                  Ahead& ahead) {
    const int n = quads(D), stride = row_dwords(D);
    __m512i sum[R][V];
    multiply<true, R, V>(query, stride, n, keys, kTile, n, sum, ahead);
    for (int r = 0; r < R; ++r) {
      const float* end = query + r * stride + 2 * n;
      const __m512i added = _mm512_castps_si512(splat(end[1]));
      for (int v = 0; v < V; ++v)
        store(scores + r * kTile + v * kLanes,
              mul(_mm512_cvtepi32_ps(_mm512_sub_epi32(sum[r][v], added)), splat(end[0])));
    }
  }

  template <int R, int V>
  __attribute__((noinline)) static void values_of(const float* weights, SlotRange seen, int D, const float* values,
                                                  float* out, int stride, const float* start, Ahead& ahead) {
    const int first = seen.begin / 4, width = round_up(D, 64);
    __m512i sum[R][V];
    multiply<false, R, V>(weights + first, kTile, kTile / 4, values + first * width, width, (seen.end - seen.begin) / 4,
                          sum, ahead);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) {
        float* to = out + r * stride + v * kLanes;
        const vf before = mul(load(to), splat(start[r]));
        store(to, fma(_mm512_cvtepi32_ps(sum[r][v]), splat(weights[r * kTile + kTile / 2]), before));
      }
  }

  // run(columns, a vector count known when compiled) over `columns` floats, as many vectors at a time as there are.
  template <class Run>
  static inline void by_columns(int columns, Run run) {
    int c = 0;
    for (; c + 4 * kLanes <= columns; c += 4 * kLanes) run(c, Count<4>());
    if (c + 2 * kLanes <= columns) {
      run(c, Count<2>());
      c += 2 * kLanes;
    }
    if (c < columns) run(c, Count<1>());
  }

  static void scores(int count, const float* query, int D, const float* keys, SlotRange seen, float* scores,
                     Ahead& ahead) {
    by_rows(count, [&](auto R) {
      by_columns(seen.end - seen.begin, [&](int c, auto V) {
        scores_of<R.value, V.value>(query, D, keys + seen.begin + c, scores + seen.begin + c, ahead);
      });
    });
  }

  static void values(int count, const float* weights, SlotRange seen, int D, const float* values, float* out,
                     int stride, const float* start, Ahead& ahead) {
    by_rows(count, [&](auto R) {
      by_columns(stride, [&](int c, auto V) {
        values_of<R.value, V.value>(weights, seen, D, values + c, out + c, stride, start, ahead);
      });
    });
  }
};

}  // namespace pagedkv::PAGEDKV_NS
