// Attention and write_kv against a plain loop in double, and decode against prefill bit for bit. Buffers are exactly as
// large as they must be, so that a sanitizer sees a read one past the end.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "../attention.hpp"
#include "../block.hpp"
#include "../isa.hpp"
#include "../numbers.hpp"
#include "check.hpp"

using namespace pagedkv;

namespace {

struct Shape {
  int heads, kv_heads, head_dim, block_size, window;
  float softcap;
  bool sinks;
};

size_t size_of(DType dtype) {
  return dtype == DType::f32 ? 4 : dtype == DType::i8 || dtype == DType::f8e4m3 ? 1 : 2;
}

struct Case {
  Shape shape;
  DType dtype;
  std::vector<int32_t> seq_lens, query_start, table;
  int64_t width = 0, num_blocks = 0;
  std::vector<char> k_pool, v_pool;
  std::vector<float> k_scale, v_scale, k, v, q, sinks;
  std::vector<int64_t> slots;

  PoolView pool(std::vector<char>& data, std::vector<float>& scales) {
    const int64_t slot = shape.head_dim, head = slot * shape.block_size, block = head * shape.kv_heads;
    const bool scaled = size_of(dtype) == 1;
    return {data.data(), block, head, slot, scaled ? scales.data() : nullptr, block / slot, shape.block_size, 1};
  }
};

Case make(const Shape& shape, DType dtype, std::vector<int32_t> seq_lens, std::mt19937& random) {
  Case c{shape, dtype, std::move(seq_lens), {0}, {}, 0, 0, {}, {}, {}, {}, {}, {}, {}, {}, {}};
  std::normal_distribution<float> normal;
  for (int32_t length : c.seq_lens) {
    c.query_start.push_back(c.query_start.back() + length);
    c.width = std::max<int64_t>(c.width, (length + shape.block_size - 1) / shape.block_size + 1);
    c.num_blocks += (length + shape.block_size - 1) / shape.block_size;
  }
  std::vector<int32_t> ids(c.num_blocks);
  for (int64_t i = 0; i < c.num_blocks; ++i) ids[i] = static_cast<int32_t>(i);
  std::shuffle(ids.begin(), ids.end(), random);
  c.table.assign(c.seq_lens.size() * c.width, -1);
  size_t next = 0;
  for (size_t i = 0; i < c.seq_lens.size(); ++i)
    for (int32_t p = 0; p < c.seq_lens[i]; ++p) {
      int32_t* table = c.table.data() + i * c.width;
      if (p % shape.block_size == 0) table[p / shape.block_size] = ids[next++];
      const Slot at = physical_slot(table, p, shape.block_size);
      c.slots.push_back(at.block * shape.block_size + at.offset);
    }
  const int64_t rows = c.num_blocks * shape.kv_heads * shape.block_size, tokens = c.query_start.back();
  c.k_pool.assign(rows * shape.head_dim * size_of(dtype), '\xff');  // NaN in every floating-point format
  c.v_pool = c.k_pool;
  c.k_scale.assign(rows, NAN);
  c.v_scale = c.k_scale;
  const auto fill = [&](std::vector<float>& x, int64_t n) {
    x.resize(n);
    for (float& value : x) value = normal(random);
  };
  fill(c.k, tokens * shape.kv_heads * shape.head_dim);
  fill(c.v, tokens * shape.kv_heads * shape.head_dim);
  fill(c.q, tokens * shape.heads * shape.head_dim);
  fill(c.sinks, shape.heads);
  return c;
}

RowsView rows(std::vector<float>& data, int64_t first, int heads, int head_dim) {
  return {data.data() + first * heads * head_dim, DType::f32, int64_t{heads} * head_dim, head_dim};
}

void write(Case& c) {
  const Shape& s = c.shape;
  write_kv({rows(c.k, 0, s.kv_heads, s.head_dim), rows(c.v, 0, s.kv_heads, s.head_dim), c.pool(c.k_pool, c.k_scale),
            c.pool(c.v_pool, c.v_scale), c.dtype, c.slots.data(), static_cast<int64_t>(c.slots.size()),
            c.num_blocks * s.block_size, s.block_size, s.kv_heads, s.head_dim});
}

// The last `query_lens[i]` tokens of every sequence, of `seq_lens`; rows of q and out as in the whole batch.
std::vector<float> attend(Case& c, const std::vector<int32_t>& starts, const std::vector<int32_t>& lengths,
                          std::vector<float> q) {
  const Shape& s = c.shape;
  AttentionPlan plan;
  plan.build({static_cast<int32_t>(lengths.size()), starts.data(), lengths.data(), c.table.data(), c.width,
              s.block_size, c.num_blocks, s.heads, s.kv_heads, s.head_dim, s.window});
  std::vector<float> out(q.size(), NAN);
  attention(plan, {rows(q, 0, s.heads, s.head_dim), rows(out, 0, s.heads, s.head_dim), c.pool(c.k_pool, c.k_scale),
                   c.pool(c.v_pool, c.v_scale), c.dtype, 1.0f / std::sqrt(static_cast<float>(s.head_dim)), s.softcap,
                   s.sinks ? c.sinks.data() : nullptr});
  return out;
}

float stored(const std::vector<char>& pool, const std::vector<float>& scales, DType dtype, int64_t row, int64_t at) {
  const char* p = pool.data() + at * size_of(dtype);
  const auto as = [&](auto value) {
    std::memcpy(&value, p, sizeof value);
    return widen(value);
  };
  switch (dtype) {
    case DType::f32: return as(0.0f);
    case DType::f16: return as(half_t{});
    case DType::bf16: return as(bfloat_t{});
    case DType::i8: return as(int8_t{}) * scales[row];
    default: return as(e4m3_t{}) * scales[row];
  }
}

double worst_error(Case& c, const std::vector<float>& out) {
  const Shape& s = c.shape;
  double worst = 0;
  for (size_t seq = 0; seq < c.seq_lens.size(); ++seq)
    for (int32_t p = 0; p < c.seq_lens[seq]; p += p % 64 < 62 && p + 9 < c.seq_lens[seq] ? 7 : 1)  // an emulator is slow
      for (int h = 0; h < s.heads; ++h) {
        const int64_t token = c.query_start[seq] + p, head = h / (s.heads / s.kv_heads);
        const int first = s.window > 0 ? std::max(0, p - s.window + 1) : 0;
        std::vector<double> score, value(s.head_dim, 0.0);
        double top = s.sinks ? c.sinks[h] : -INFINITY, sum = 0;
        const auto row_of = [&](int j) {
          const Slot at = physical_slot(c.table.data() + seq * c.width, j, s.block_size);
          return (at.block * s.kv_heads + head) * s.block_size + at.offset;
        };
        for (int j = first; j <= p; ++j) {
          double dot = 0;
          for (int d = 0; d < s.head_dim; ++d)
            dot += double{c.q[(token * s.heads + h) * s.head_dim + d]} *
                   stored(c.k_pool, c.k_scale, c.dtype, row_of(j), row_of(j) * s.head_dim + d);
          dot /= std::sqrt(static_cast<double>(s.head_dim));
          score.push_back(s.softcap > 0 ? s.softcap * std::tanh(dot / s.softcap) : dot);
          top = std::max(top, score.back());
        }
        for (int j = first; j <= p; ++j) {
          const double w = std::exp(score[j - first] - top);
          sum += w;
          for (int d = 0; d < s.head_dim; ++d)
            value[d] += w * stored(c.v_pool, c.v_scale, c.dtype, row_of(j), row_of(j) * s.head_dim + d);
        }
        if (s.sinks) sum += std::exp(c.sinks[h] - top);
        for (int d = 0; d < s.head_dim; ++d) {
          const double error = std::fabs(out[(token * s.heads + h) * s.head_dim + d] - value[d] / sum);
          if (!(error <= worst)) worst = error;  // a NaN stays
        }
      }
  return worst;
}

// Every sequence decoded at its last token only, in one batch: the same bits as the prefill's rows.
bool decode_equals_prefill(Case& c, const std::vector<float>& out) {
  const int64_t row = int64_t{c.shape.heads} * c.shape.head_dim;
  std::vector<int32_t> starts{0};
  std::vector<float> q, want;
  for (size_t i = 0; i < c.seq_lens.size(); ++i) {
    starts.push_back(static_cast<int32_t>(i) + 1);
    const int64_t at = (c.query_start[i + 1] - 1) * row;
    q.insert(q.end(), c.q.begin() + at, c.q.begin() + at + row);
    want.insert(want.end(), out.begin() + at, out.begin() + at + row);
  }
  const std::vector<float> got = attend(c, starts, c.seq_lens, q);
  return std::memcmp(got.data(), want.data(), want.size() * 4) == 0;
}

}  // namespace

int check_attention() {
  const Shape shapes[] = {{3, 1, 64, 16, 0, 0, false},  {4, 4, 80, 1, 0, 0, true},   {4, 2, 33, 7, 50, 0, false},
                          {2, 2, 128, 64, 0, 3, false}, {14, 1, 16, 48, 0, 0, false}, {2, 1, 256, 256, 100, 2, true}};
  const char* names[] = {"f32", "f16", "bf16", "i8", "f8e4m3"};
  std::mt19937 random(1);
  int failures = 0;
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::i8, DType::f8e4m3}) {
    const bool narrow = isa() == Isa::avx512bf16 && dtype != DType::f32 && dtype != DType::f16;
    double worst = 0;
    for (const Shape& shape : shapes) {
      Case c = make(shape, dtype, {1, 70, 270, 13}, random);
      write(c);
      const std::vector<float> out = attend(c, c.query_start, c.seq_lens, c.q);
      const double error = worst_error(c, out);
      if (!(error <= worst)) worst = error;
      if (!decode_equals_prefill(c, out)) {
        ++failures;
        std::printf("  %s head_dim %d: decode and prefill differ\n", names[static_cast<int>(dtype)], shape.head_dim);
      }
    }
    const bool good = worst < (!narrow ? 1e-5 : dtype == DType::i8 ? 1e-3 : 3e-2);
    failures += !good;
    std::printf("  attention %-7s largest error %.2g%s\n", names[static_cast<int>(dtype)], worst, good ? "" : "  FAILED");
  }
  return failures;
}
