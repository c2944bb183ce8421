// Packed products against a plain loop in double, a row's bits for every number of rows, and a small decoder: prefill
// against single steps bit for bit. Inputs and outputs are exactly as large as they must be.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "../decoder.hpp"
#include "../numbers.hpp"
#include "check.hpp"

using namespace pagedkv;

namespace {

std::mt19937 generator{7};

Vector random_vector(int64_t size, float scale = 1.0f, float shift = 0.0f) {
  std::normal_distribution<float> normal(shift, scale);
  Vector values(static_cast<size_t>(size));
  for (float& value : values) value = normal(generator);
  return values;
}

bool has_groups(WeightKind kind) { return kind != WeightKind::f32 && kind != WeightKind::bf16; }

void fill(PackedWeight& packed, int64_t rows, int64_t depth, Place place, int64_t first) {
  const WeightKind kind = packed.weight().kind;
  if (!has_groups(kind)) {
    const Vector source = random_vector(rows * depth, 1.0f / std::sqrt(static_cast<float>(depth)));
    packed.put_dense(source.data(), DType::f32, rows, place, first);
    return;
  }
  std::vector<uint8_t> values(static_cast<size_t>(rows * depth));
  for (uint8_t& value : values) value = static_cast<uint8_t>(generator() & (kind == WeightKind::int8 ? 255 : 15));
  std::vector<half_t> factors(values.size() / kGroup), offsets(factors.size());
  for (size_t i = 0; i < factors.size(); ++i) {
    narrow(0.01f + 0.001f * static_cast<float>(generator() % 8), factors[i]);
    narrow(-0.07f, offsets[i]);
  }
  const bool offset = kind == WeightKind::int4_offset;
  packed.put_groups(values.data(), &factors.data()->bits, offset ? &offsets.data()->bits : nullptr, rows, place, first);
}

std::shared_ptr<PackedWeight> make(WeightKind kind, int64_t columns, int64_t depth) {
  auto packed = std::make_shared<PackedWeight>(std::make_shared<WeightArena>(), kind, columns, depth);
  fill(*packed, columns, depth, Place::straight, 0);
  return packed;
}

int check_product(WeightKind kind, int32_t columns, int32_t depth) {
  const auto packed = make(kind, columns, depth);
  constexpr int kRows = 61;
  const Vector x = random_vector(int64_t{kRows} * depth);
  std::vector<bfloat_t> narrowed(x.size());
  for (size_t i = 0; i < x.size(); ++i) narrow(x[i], narrowed[i]);
  const bool wide = kind == WeightKind::f32;
  const void* input = wide ? static_cast<const void*>(x.data()) : narrowed.data();
  const auto run = [&](int rows, int threads) {
    Vector out(static_cast<size_t>(rows) * static_cast<size_t>(columns));
    multiply({input, depth, rows, packed->weight(), {TailKind::store, nullptr, out.data(), columns, columns, false}},
             threads);
    return out;
  };
  const Vector whole = run(kRows, 2);
  int failures = 0;
  Vector weights(static_cast<size_t>(depth));
  for (int column = 0; column < columns; ++column) {
    read_column(packed->weight(), column, weights.data());
    for (int row = 0; row < kRows; ++row) {
      double sum = 0, size = 0;
      for (int k = 0; k < depth; ++k) {
        const size_t at = static_cast<size_t>(row) * depth + static_cast<size_t>(k);
        const double term = static_cast<double>(wide ? x[at] : widen(narrowed[at])) * weights[static_cast<size_t>(k)];
        sum += term;
        size += std::fabs(term);
      }
      const double y = whole[static_cast<size_t>(row) * static_cast<size_t>(columns) + static_cast<size_t>(column)];
      failures += !(std::fabs(y - sum) <= 1e-6 * (size + 1));
    }
  }
  for (int rows : {1, 2, 5, 12, 13, 28, 60}) {
    const Vector part = run(rows, 1 + rows % 2);
    failures += std::memcmp(part.data(), whole.data(), part.size() * sizeof(float)) != 0;
  }
  return failures;
}

// Two layers, with biases and q/k norms, of sizes that leave tails everywhere.
Decoder make_decoder(WeightKind kind) {
  const DecoderShape shape{64, 4, 2, 16, 96, 1e-5f, kind != WeightKind::f32};
  const auto embedding = make(kind, 70, shape.hidden);
  Decoder decoder(shape, embedding, embedding, random_vector(shape.hidden, 0.1f, 1.0f));
  for (int index = 0; index < 2; ++index) {
    const int64_t both = 2 * int64_t{shape.intermediate};
    auto gate_up = std::make_shared<PackedWeight>(std::make_shared<WeightArena>(), kind, both, shape.hidden);
    fill(*gate_up, shape.intermediate, shape.hidden, Place::gate, 0);
    fill(*gate_up, shape.intermediate, shape.hidden, Place::up, 0);
    decoder.add_layer({random_vector(shape.hidden, 0.1f, 1.0f), random_vector(shape.hidden, 0.1f, 1.0f),
                       random_vector(shape.head_dim, 0.1f, 1.0f), random_vector(shape.head_dim, 0.1f, 1.0f),
                       make(kind, shape.qkv_width(), shape.hidden), make(kind, shape.hidden, shape.heads_width()),
                       gate_up, make(kind, shape.hidden, shape.intermediate), random_vector(shape.qkv_width(), 0.1f),
                       {}, random_vector(2 * shape.intermediate, 0.1f), {}, index ? 7 : 0});
  }
  return decoder;
}

// Hidden states of 20 tokens, `chunk` at a time, through three blocks of eight slots in reverse order.
std::vector<char> run_decoder(Decoder& decoder, int chunk, int threads) {
  constexpr int kTokens = 20, kBlock = 8, kBlocks = 3;
  const DecoderShape& shape = decoder.shape();
  const int64_t tile = int64_t{kBlock} * shape.head_dim, block = shape.num_kv_heads * tile;
  std::vector<Vector> memory(4, Vector(static_cast<size_t>(kBlocks * block), std::nanf("")));
  const auto view = [&](int i) {
    return PoolView{memory[static_cast<size_t>(i)].data(), block, tile, shape.head_dim, nullptr, 0, 0, 0};
  };
  const LayerPools pools{{view(0), view(1)}, {view(2), view(3)}, DType::f32, kBlocks, kBlock};
  const std::vector<int32_t> table{2, 1, 0};
  Vector cos(static_cast<size_t>(kTokens * shape.head_dim / 2)), sin(cos.size());
  for (size_t i = 0; i < cos.size(); ++i) {
    cos[i] = std::cos(0.1f * static_cast<float>(i));
    sin[i] = std::sin(0.1f * static_cast<float>(i));
  }
  const size_t row = static_cast<size_t>(shape.hidden) * (shape.bf16 ? 2 : 4);
  std::vector<char> hidden(kTokens * row);
  for (int done = 0; done < kTokens; done += chunk) {
    const int count = std::min(chunk, kTokens - done);
    std::vector<int64_t> ids, positions, slots, wanted;
    for (int p = done; p < done + count; ++p) {
      ids.push_back(p * 13 % 70);
      positions.push_back(p);
      wanted.push_back(p - done);
      slots.push_back(table[static_cast<size_t>(p / kBlock)] * kBlock + p % kBlock);
    }
    const std::vector<int32_t> starts{0, count}, lengths{done + count};
    decoder.forward({ids.data(), positions.data(), slots.data(), count, 1, starts.data(), lengths.data(), table.data(),
                     kBlocks, cos.data(), sin.data(), kTokens, wanted.data(), count,
                     hidden.data() + static_cast<size_t>(done) * row},
                    pools, threads);
  }
  return hidden;
}

}  // namespace

int check_product() {
  int failures = 0;
  for (int number = 0; number < kWeightKinds; ++number) {
    const auto kind = static_cast<WeightKind>(number);
    failures += check_product(kind, 77, 96) + check_product(kind, 32, 32) + check_product(kind, 1, 64);
    if (!has_groups(kind)) failures += check_product(kind, 33, 31);
    Decoder decoder = make_decoder(kind);
    const std::vector<char> whole = run_decoder(decoder, 20, 2);
    for (int chunk : {1, 7, 13}) failures += run_decoder(decoder, chunk, 1 + chunk % 2) != whole;
  }
  std::printf("  products and decoder: %d failures\n", failures);
  return failures;
}
