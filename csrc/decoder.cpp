#include "decoder.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "elementwise.hpp"

namespace pagedkv {
namespace {

constexpr int64_t kPrivateRows = 8;  // up to here every thread norms the rows for itself, which saves a barrier

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

std::string number(int64_t value) { return std::to_string(value); }

const float* or_null(const Vector& values) { return values.empty() ? nullptr : values.data(); }

}  // namespace

char* Decoder::Buffer::data() const {
  const auto address = reinterpret_cast<uintptr_t>(bytes.data());
  return const_cast<char*>(bytes.data()) + (64 - address % 64) % 64;
}

void Decoder::size_buffer(Buffer& buffer, int64_t rows, int64_t width, int64_t element) {
  int64_t lines = (width * element + 63) / 64;
  lines += 1 - lines % 2;  // an odd number of cache lines: rows spread over all sets
  buffer.stride = lines * 64 / element;
  const auto bytes = static_cast<size_t>(rows * lines * 64 + 64);
  if (buffer.bytes.size() < bytes) buffer.bytes.resize(bytes);
}

Decoder::Decoder(const DecoderShape& shape, SharedWeight embedding, SharedWeight head, Vector final_norm)
    : shape_(shape), embedding_(std::move(embedding)), head_(std::move(head)), final_norm_(std::move(final_norm)) {
  require(shape.head_dim % 2 == 0 && shape.head_dim <= kMaxHeadDim,
          "head_dim is " + number(shape.head_dim) + "; even numbers up to " + number(kMaxHeadDim) + " are built");
  require(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0,
          number(shape.num_heads) + " heads do not divide into " + number(shape.num_kv_heads) + " KV heads");
  require(embedding_->weight().depth == shape.hidden && head_->weight().depth == shape.hidden &&
              final_norm_.size() == static_cast<size_t>(shape.hidden),
          "embedding, head and final norm must be " + number(shape.hidden) + " wide");
}

void Decoder::add_layer(DecoderLayer layer) {
  const auto fits = [](const SharedWeight& packed, int64_t columns, int64_t depth) {
    return packed->weight().columns == columns && packed->weight().depth == depth;
  };
  const auto sized = [](const Vector& values, int64_t width) {
    return values.empty() || values.size() == static_cast<size_t>(width);
  };
  const int64_t gate_up = (shape_.intermediate + 15) / 16 * kPanel;
  const std::string name = "layer " + number(static_cast<int64_t>(layers_.size())) + ": ";
  require(fits(layer.qkv, shape_.qkv_width(), shape_.hidden), name + "qkv has another size than the model");
  require(fits(layer.o, shape_.hidden, shape_.heads_width()), name + "o has another size than the model");
  require(fits(layer.gate_up, gate_up, shape_.hidden), name + "gate_up has another size than the model");
  require(fits(layer.down, shape_.hidden, shape_.intermediate), name + "down has another size than the model");
  require(layer.input_norm.size() == static_cast<size_t>(shape_.hidden) &&
              layer.post_norm.size() == layer.input_norm.size(),
          name + "a norm has another size than the model");
  require(sized(layer.q_norm, shape_.head_dim) && sized(layer.k_norm, shape_.head_dim) &&
              sized(layer.qkv_bias, shape_.qkv_width()) && sized(layer.o_bias, shape_.hidden) &&
              sized(layer.gate_up_bias, gate_up) && sized(layer.down_bias, shape_.hidden),
          name + "a norm or bias has another size than the model");
  if (std::find(windows_.begin(), windows_.end(), layer.window) == windows_.end()) windows_.push_back(layer.window);
  for (const SharedWeight& packed : {layer.qkv, layer.o, layer.gate_up, layer.down})
    multiplications_ += packed->weight().columns * static_cast<int64_t>(packed->weight().depth);
  layers_.push_back(std::move(layer));
}

void Decoder::forward(const DecoderStep& step, const LayerPools& pools, int threads) {
  check(step, pools);
  if (step.num_tokens == 0) return;
  threads = worthwhile_threads(step.num_tokens * multiplications_, threads);
  plan(step, pools);
  prepare(step.num_tokens, threads);
#pragma omp parallel num_threads(threads)
  {
    const int rank = omp_get_thread_num();
    char* own = scratch_.data() + rank * scratch_.stride;
    run(step, pools, {rank, omp_get_num_threads(), own, own + private_bytes()});
  }
}

void Decoder::check(const DecoderStep& step, const LayerPools& pools) const {
  require(pools.k.size() == layers_.size() && pools.v.size() == layers_.size(),
          "the pool has " + number(static_cast<int64_t>(pools.k.size())) + " layers, the model " +
              number(static_cast<int64_t>(layers_.size())));
  const int64_t vocabulary = embedding_->weight().columns;
  for (int64_t t = 0; t < step.num_tokens; ++t) {
    require(step.token_ids[t] >= 0 && step.token_ids[t] < vocabulary,
            "token id " + number(step.token_ids[t]) + " is outside the vocabulary of " + number(vocabulary));
    require(step.positions[t] >= 0 && step.positions[t] < step.num_positions,
            "position " + number(step.positions[t]) + " is outside the rotary table of " + number(step.num_positions));
  }
  require(step.num_seqs == 0 || step.query_start[step.num_seqs] == step.num_tokens,
          "query_start does not end at the number of tokens, " + number(step.num_tokens));
  check_slots(step.slot_mapping, step.num_tokens, pools.num_blocks * pools.block_size);
}

void Decoder::plan(const DecoderStep& step, const LayerPools& pools) {
  plans_.resize(windows_.size());
  for (size_t i = 0; i < windows_.size(); ++i)
    plans_[i].build({step.num_seqs, step.query_start, step.seq_lens, step.block_table, step.table_width,
                     pools.block_size, pools.num_blocks, shape_.num_heads, shape_.num_kv_heads, shape_.head_dim,
                     windows_[i]});
}

void Decoder::prepare(int64_t tokens, int threads) {
  const int64_t element = shape_.bf16 ? 2 : 4;
  size_buffer(residual_, tokens, shape_.hidden, 4);
  size_buffer(normed_, tokens, shape_.hidden, element);
  size_buffer(qkv_, tokens, shape_.qkv_width(), 4);
  size_buffer(context_, tokens, shape_.heads_width(), element);
  size_buffer(gated_, tokens, shape_.intermediate, element);
  size_t sums = scratch_bytes(head_->weight());
  for (const DecoderLayer& layer : layers_)
    for (const SharedWeight& packed : {layer.qkv, layer.o, layer.gate_up, layer.down})
      sums = std::max(sums, scratch_bytes(packed->weight()));
  size_buffer(scratch_, threads, private_bytes() + static_cast<int64_t>(sums), 1);
}

int64_t Decoder::private_bytes() const { return kPrivateRows * normed_.stride * (shape_.bf16 ? 2 : 4); }

void Decoder::run(const DecoderStep& step, const LayerPools& pools, const Team& team) {
  const int64_t tokens = step.num_tokens;
  const int64_t first = tokens * team.rank / team.size, last = tokens * (team.rank + 1) / team.size;
  float* residual = reinterpret_cast<float*>(residual_.data());
  for (int64_t t = first; t < last; ++t)
    read_column(embedding_->weight(), step.token_ids[t], residual + t * residual_.stride);
#pragma omp barrier
  const auto into_residual = [&](const Buffer& from, const PackedWeight& packed, const Vector& bias) {
    product({from.data(), from.stride, tokens, packed.weight(),
             {TailKind::add, or_null(bias), residual, residual_.stride, shape_.hidden, false}},
            team);
  };
  for (size_t index = 0; index < layers_.size(); ++index) {
    const DecoderLayer& layer = layers_[index];
    attend(step, pools, index, team);
    into_residual(context_, *layer.o, layer.o_bias);
    Product gate_up;
    gate_up.weight = layer.gate_up->weight();
    gate_up.tail = {TailKind::silu_mul, or_null(layer.gate_up_bias), gated_.data(), gated_.stride, shape_.intermediate,
                    shape_.bf16};
    normed_product(layer.post_norm, gate_up, tokens, team);
    into_residual(gated_, *layer.down, layer.down_bias);
  }
  for (int64_t t = first; t < last; ++t)
    elementwise_kernels().rms_norm(residual + t * residual_.stride, final_norm_.data(), shape_.eps, shape_.hidden,
                                   static_cast<char*>(step.hidden) + t * shape_.hidden * (shape_.bf16 ? 2 : 4),
                                   shape_.bf16);
}

void Decoder::attend(const DecoderStep& step, const LayerPools& pools, size_t index, const Team& team) {
  const DecoderLayer& layer = layers_[index];
  const int64_t tokens = step.num_tokens, width = shape_.head_dim;
  float* qkv = reinterpret_cast<float*>(qkv_.data());
  Product product;
  product.weight = layer.qkv->weight();
  product.tail = {TailKind::store, or_null(layer.qkv_bias), qkv, qkv_.stride, shape_.qkv_width(), false};
  normed_product(layer.input_norm, product, tokens, team);

  const int64_t k_at = shape_.heads_width(), v_at = k_at + shape_.num_kv_heads * width;
  const WriteArgs write{{qkv + k_at, DType::f32, qkv_.stride, width}, {qkv + v_at, DType::f32, qkv_.stride, width},
                        pools.k[index], pools.v[index], pools.dtype, step.slot_mapping, tokens,
                        pools.num_blocks * pools.block_size, pools.block_size, shape_.num_kv_heads, shape_.head_dim};
  const int64_t first = tokens * team.rank / team.size, last = tokens * (team.rank + 1) / team.size;
  const auto rotate = elementwise_kernels().rotate;
  for (int64_t t = first; t < last; ++t) {
    const int64_t row = step.positions[t] * (width / 2);
    float* heads = qkv + t * qkv_.stride;
    const float *cos = step.cos + row, *sin = step.sin + row;
    rotate(heads, {cos, sin, or_null(layer.q_norm), shape_.eps, shape_.num_heads, shape_.head_dim});
    rotate(heads + k_at, {cos, sin, or_null(layer.k_norm), shape_.eps, shape_.num_kv_heads, shape_.head_dim});
    write_kv_rows(write, t, t + 1);
  }
#pragma omp barrier
  const auto window = std::find(windows_.begin(), windows_.end(), layer.window) - windows_.begin();
  const AttentionArgs args{{qkv, DType::f32, qkv_.stride, width},
                           {context_.data(), shape_.bf16 ? DType::bf16 : DType::f32, context_.stride, width},
                           pools.k[index], pools.v[index], pools.dtype,
                           1.0f / std::sqrt(static_cast<float>(width)), 0.0f, nullptr};
  attention_team(plans_[static_cast<size_t>(window)], args);
}

// product.x = norm(residual). Ends with a barrier.
void Decoder::normed_product(const Vector& norm, Product product, int64_t tokens, const Team& team) {
  const int64_t element = shape_.bf16 ? 2 : 4;
  const bool apart = tokens <= kPrivateRows;
  const int64_t first = apart ? 0 : tokens * team.rank / team.size;
  const int64_t last = apart ? tokens : tokens * (team.rank + 1) / team.size;
  char* to = apart ? team.rows : normed_.data();
  for (int64_t t = first; t < last; ++t)
    elementwise_kernels().rms_norm(reinterpret_cast<float*>(residual_.data()) + t * residual_.stride, norm.data(),
                                   shape_.eps, shape_.hidden, to + t * normed_.stride * element, shape_.bf16);
  if (!apart) {
#pragma omp barrier
  }
  product.x = to;
  product.stride = normed_.stride;
  product.rows = tokens;
  this->product(product, team);
}

// Ends with a barrier.
void Decoder::product(const Product& product, const Team& team) const {
  product_of(product.weight.kind)(product, team.rank, team.size, team.scratch);
#pragma omp barrier
}

void Decoder::logits(const void* hidden, int64_t rows, float* out, int threads) {
  const Weight& weight = head_->weight();
  const Tail tail{TailKind::store, nullptr, out, weight.columns, weight.columns, false};
  multiply({hidden, shape_.hidden, rows, weight, tail}, threads);
}

}  // namespace pagedkv
