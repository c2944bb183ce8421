#include "decoder.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "decoder_wanted.hpp"
#include "elementwise.hpp"

namespace pagedkv {
namespace {

constexpr int64_t kPrivateRows = 8;  // up to here every thread norms the rows for itself, which saves a stage
constexpr int64_t kRowStep = 8;      // rows that a thread takes at a time where rows are the items
constexpr int64_t kStagesOfLayer = 9;
constexpr int64_t kOtherStages = 3;  // embedding, the choice of wanted rows, final norm

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

std::string number(int64_t value) { return std::to_string(value); }

const float* or_null(const Vector& values) { return values.empty() ? nullptr : values.data(); }

}  // namespace

// The bytes of so many rows, padded so that neighbours do not fall into one cache set.
int64_t Decoder::size_buffer(Buffer& buffer, int64_t rows, int64_t width, int64_t element) {
  int64_t lines = (width * element + 63) / 64;
  lines += 1 - lines % 2;  // an odd number of cache lines: rows spread over all sets
  buffer.stride = lines * 64 / element;
  return rows * lines * 64;
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
    char* own = scratch_.data + omp_get_thread_num() * scratch_.stride;
    const int64_t rows = private_bytes(), attention = rows + attention_bytes();
    Worker worker{threads, omp_get_thread_num(), 0, own, own + rows, {reinterpret_cast<float*>(own + attention)}};
    run(step, pools, worker);
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
  for (int64_t i = 0; i < step.num_rows; ++i)
    require(step.rows[i] < step.num_tokens && step.rows[i] > (i ? step.rows[i - 1] : -1),
            "wanted row " + number(step.rows[i]) + " is not behind the one before and within the step's " +
                number(step.num_tokens) + " tokens");
  check_slots(step.slot_mapping, step.num_tokens, pools.num_blocks * pools.block_size);
}

void Decoder::plan(const DecoderStep& step, const LayerPools& pools) {
  plans_.resize(windows_.size());
  for (size_t i = 0; i < windows_.size(); ++i)
    plans_[i].build({step.num_seqs, step.query_start, step.seq_lens, step.block_table, step.table_width,
                     pools.block_size, pools.num_blocks, shape_.num_heads, shape_.num_kv_heads, shape_.head_dim,
                     windows_[i]});
  if (step.num_rows == step.num_tokens || layers_.empty()) return;
  const WantedTokens wanted(step);
  last_plan_.build({wanted.num_seqs(), wanted.query_start.data(), wanted.seq_lens.data(), wanted.block_table.data(),
                    step.table_width, pools.block_size, pools.num_blocks, shape_.num_heads, shape_.num_kv_heads,
                    shape_.head_dim, layers_.back().window});
}

void Decoder::prepare(int64_t tokens, int threads) {
  const int64_t element = shape_.bf16 ? 2 : 4;
  const int64_t residual = size_buffer(residual_, tokens, shape_.hidden, 4);
  const int64_t narrow = std::max(size_buffer(normed_, tokens, shape_.hidden, element),
                                  size_buffer(context_, tokens, shape_.heads_width(), element));
  const int64_t wide = std::max(size_buffer(qkv_, tokens, shape_.qkv_width(), 4),
                                size_buffer(gated_, tokens, shape_.intermediate, element));
  size_t sums = scratch_bytes(head_->weight());
  for (const DecoderLayer& layer : layers_)
    for (const SharedWeight& packed : {layer.qkv, layer.o, layer.gate_up, layer.down})
      sums = std::max(sums, scratch_bytes(packed->weight()));
  const int64_t own = private_bytes() + attention_bytes() + static_cast<int64_t>(sums);
  const int64_t total = residual + narrow + wide + size_buffer(scratch_, threads, own, 1);
  if (total > workspace_bytes_) {
    memory_ = nullptr;  // first, so that there are never two
    workspace_bytes_ = 0;
    memory_ = std::make_unique<WeightArena>();
    workspace_ = reinterpret_cast<char*>(memory_->take(total));
    workspace_bytes_ = total;
  }
  residual_.data = workspace_;
  normed_.data = context_.data = residual_.data + residual;
  qkv_.data = gated_.data = normed_.data + narrow;
  scratch_.data = qkv_.data + wide;
  stages_.reset(static_cast<int64_t>(layers_.size()) * kStagesOfLayer + kOtherStages, threads);
}

int64_t Decoder::private_bytes() const { return kPrivateRows * normed_.stride * (shape_.bf16 ? 2 : 4); }

int64_t Decoder::attention_bytes() const {
  return (attention_scratch_bytes(shape_.head_dim, shape_.num_heads / shape_.num_kv_heads) + 63) / 64 * 64;
}

void Decoder::run(const DecoderStep& step, const LayerPools& pools, Worker& worker) {
  int64_t tokens = step.num_tokens;
  float* residual = reinterpret_cast<float*>(residual_.data);
  stages_.run_shares(worker.stage++, worker.thread, tokens, kRowStep, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      read_column(embedding_->weight(), step.token_ids[t], residual + t * residual_.stride);
  });
  const auto into_residual = [&](const Buffer& from, const PackedWeight& packed, const Vector& bias) {
    const Tail tail{TailKind::add, or_null(bias), residual, residual_.stride, shape_.hidden, false};
    product({from.data, from.stride, tokens, packed.weight(), tail}, nullptr, worker);
  };
  for (size_t index = 0; index < layers_.size(); ++index) {
    const DecoderLayer& layer = layers_[index];
    const auto window = std::find(windows_.begin(), windows_.end(), layer.window) - windows_.begin();
    const AttentionPlan* plan = &plans_[static_cast<size_t>(window)];
    project(step, pools, index, worker);
    if (index + 1 == layers_.size() && step.num_rows < tokens) {
      keep_wanted(step, worker);
      tokens = step.num_rows;
      plan = &last_plan_;
    }
    attend(pools, index, *plan, worker);
    into_residual(context_, *layer.o, layer.o_bias);
    Product gate_up;
    gate_up.rows = tokens;
    gate_up.weight = layer.gate_up->weight();
    gate_up.tail = {TailKind::silu_mul, or_null(layer.gate_up_bias), gated_.data, gated_.stride, shape_.intermediate,
                    shape_.bf16};
    product(gate_up, &layer.post_norm, worker);
    into_residual(gated_, *layer.down, layer.down_bias);
  }
  const int64_t row_bytes = shape_.hidden * (shape_.bf16 ? 2 : 4);
  stages_.run_shares(worker.stage++, worker.thread, tokens, kRowStep, [&](int64_t first, int64_t last) {
    norm_rows(final_norm_, first, last, static_cast<char*>(step.hidden) + first * row_bytes, row_bytes);
  });
}

// q, k and v of the normed rows; q and k turned; k and v into the pool.
void Decoder::project(const DecoderStep& step, const LayerPools& pools, size_t index, Worker& worker) {
  const DecoderLayer& layer = layers_[index];
  const int64_t tokens = step.num_tokens, width = shape_.head_dim;
  float* qkv = reinterpret_cast<float*>(qkv_.data);
  Product all;
  all.rows = tokens;
  all.weight = layer.qkv->weight();
  all.tail = {TailKind::store, or_null(layer.qkv_bias), qkv, qkv_.stride, shape_.qkv_width(), false};
  product(all, &layer.input_norm, worker);

  const int64_t k_at = shape_.heads_width(), v_at = k_at + shape_.num_kv_heads * width;
  const WriteArgs write{{qkv + k_at, DType::f32, qkv_.stride, width}, {qkv + v_at, DType::f32, qkv_.stride, width},
                        pools.k[index], pools.v[index], pools.dtype, step.slot_mapping, tokens,
                        pools.num_blocks * pools.block_size, pools.block_size, shape_.num_kv_heads, shape_.head_dim};
  const auto rotate = elementwise_kernels().rotate;
  stages_.run_shares(worker.stage++, worker.thread, tokens, kRowStep, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t row = step.positions[t] * (width / 2);
      const float *cos = step.cos + row, *sin = step.sin + row;
      float* heads = qkv + t * qkv_.stride;
      rotate(heads, {cos, sin, or_null(layer.q_norm), shape_.eps, shape_.num_heads, shape_.head_dim});
      rotate(heads + k_at, {cos, sin, or_null(layer.k_norm), shape_.eps, shape_.num_kv_heads, shape_.head_dim});
    }
    write_kv_rows(write, first, last);
  });
}

// Moves the wanted rows of the residual stream and of q to the front.
void Decoder::keep_wanted(const DecoderStep& step, Worker& worker) {
  float* residual = reinterpret_cast<float*>(residual_.data);
  float* q = reinterpret_cast<float*>(qkv_.data);
  stages_.run_queue(worker.stage++, 1, 1, [&](int64_t, int64_t) {  // in order: a row moves to where another was
    for (int64_t i = 0; i < step.num_rows; ++i) {
      const int64_t from = step.rows[i];
      if (from == i) continue;
      std::copy_n(residual + from * residual_.stride, shape_.hidden, residual + i * residual_.stride);
      std::copy_n(q + from * qkv_.stride, shape_.heads_width(), q + i * qkv_.stride);
    }
  });
}

void Decoder::attend(const LayerPools& pools, size_t index, const AttentionPlan& plan, Worker& worker) {
  const AttentionArgs args{{qkv_.data, DType::f32, qkv_.stride, shape_.head_dim},
                           {context_.data, shape_.bf16 ? DType::bf16 : DType::f32, context_.stride, shape_.head_dim},
                           pools.k[index], pools.v[index], pools.dtype,
                           1.0f / std::sqrt(static_cast<float>(shape_.head_dim)), 0.0f, nullptr};
  const AttentionKernels& kernels = attention_kernels();
  stages_.run_queue(worker.stage++, static_cast<int64_t>(plan.items.size()), 1, [&](int64_t first, int64_t) {
    const size_t item = static_cast<size_t>(first), next = item + static_cast<size_t>(worker.threads);
    kernels.run_item(plan, args, plan.items[item], next < plan.items.size() ? &plan.items[next] : nullptr,
                     worker.attention);
  });
  if (plan.split_tokens.empty()) return;
  const int64_t heads = shape_.num_heads;
  stages_.run_queue(worker.stage++, static_cast<int64_t>(plan.split_tokens.size()), 1, [&](int64_t first, int64_t) {
    for (int64_t head = 0; head < heads; ++head)
      kernels.merge(plan, args, plan.split_tokens[static_cast<size_t>(first)], static_cast<int32_t>(head));
  });
}

void Decoder::norm_rows(const Vector& weight, int64_t first, int64_t last, char* out, int64_t row_bytes) const {
  const float* residual = reinterpret_cast<const float*>(residual_.data);
  for (int64_t t = first; t < last; ++t, out += row_bytes)
    elementwise_kernels().rms_norm(residual + t * residual_.stride, weight.data(), shape_.eps, shape_.hidden, out,
                                   shape_.bf16);
}

// The product of its x, or with `norm` of the normed residual stream.
void Decoder::product(Product product, const Vector* norm, Worker& worker) {
  const int64_t row_bytes = normed_.stride * (shape_.bf16 ? 2 : 4);
  const bool apart = norm && product.rows <= kPrivateRows;
  if (norm) {
    product.x = apart ? worker.rows : normed_.data;
    product.stride = normed_.stride;
    if (!apart)
      stages_.run_shares(worker.stage++, worker.thread, product.rows, kRowStep, [&](int64_t first, int64_t last) {
        norm_rows(*norm, first, last, normed_.data + first * row_bytes, row_bytes);
      });
  }
  bool ready = !apart;  // a thread that gets no item norms nothing: the rows may be changing already
  worker.scratch.block = -1;
  const ProductFn run = product_of(product.weight.kind);
  const int64_t step = product_step(product, worker.threads);
  stages_.run_shares(worker.stage++, worker.thread, product_items(product), step, [&](int64_t first, int64_t last) {
    if (!ready) norm_rows(*norm, 0, product.rows, worker.rows, row_bytes);
    ready = true;
    run(product, first, last, worker.scratch);
  });
}

void Decoder::logits(const void* hidden, int64_t rows, float* out, int threads) {
  const Weight& weight = head_->weight();
  const Tail tail{TailKind::store, nullptr, out, weight.columns, weight.columns, false};
  multiply({hidden, shape_.hidden, rows, weight, tail}, threads);
}

}  // namespace pagedkv
