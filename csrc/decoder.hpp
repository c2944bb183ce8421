// A whole forward pass of a Llama- or Qwen-like decoder in one call: all layers inside one parallel region.
//
//     x = embedding;
//     layers x { x += o(attention(rotate(qkv(norm(x)))));  x += down(silu(gate(norm(x))) * up(norm(x))) };
//     hidden = norm(x)
//
// The residual stream x is float32; what enters a product is rounded to bf16 once (float32 models: not at all). Every
// step computes a token the same way whatever it is batched with, so the hidden state of a token does not depend on
// its batch, its chunk or the number of threads.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.hpp"
#include "decoder_stages.hpp"
#include "product.hpp"
#include "product_pack.hpp"

namespace pagedkv {

struct DecoderShape {
  int32_t hidden;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t intermediate;
  float eps;
  bool bf16;  // of activations; else float32

  int32_t heads_width() const { return num_heads * head_dim; }
  int32_t qkv_width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

using Vector = std::vector<float>;  // empty: the model has none
using SharedWeight = std::shared_ptr<const PackedWeight>;

struct DecoderLayer {
  Vector input_norm, post_norm, q_norm, k_norm;
  SharedWeight qkv, o, gate_up, down;  // q, k, v one after another; gate and up in turn (Place)
  Vector qkv_bias, o_bias, gate_up_bias, down_bias;
  int32_t window;  // 0: none
};

// The pools of all layers. Strides are those of PoolView, the same in every layer.
struct LayerPools {
  std::vector<PoolView> k, v;
  DType dtype;
  int64_t num_blocks;
  int32_t block_size;
};

// One forward pass: T new tokens of B sequences.
struct DecoderStep {
  const int64_t* token_ids;     // [T]
  const int64_t* positions;     // [T]
  const int64_t* slot_mapping;  // [T]
  int64_t num_tokens;
  int32_t num_seqs;
  const int32_t* query_start;  // [B + 1]
  const int32_t* seq_lens;     // [B]
  const int32_t* block_table;  // [B, table_width]
  int64_t table_width;
  const float* cos;  // [num_positions, head_dim / 2]
  const float* sin;
  int64_t num_positions;
  const int64_t* rows;  // [num_rows] ascending: the tokens whose hidden states are wanted
  int64_t num_rows;
  void* hidden;  // out: [num_rows, hidden] of the activations' dtype
};

class Decoder {
 public:
  // embedding's columns are token ids; head is the same weight where the two are tied.
  Decoder(const DecoderShape& shape, SharedWeight embedding, SharedWeight head, Vector final_norm);

  // Throws std::invalid_argument for a weight or vector of another size than the shape asks for.
  void add_layer(DecoderLayer layer);

  // Writes the KV of the new tokens into the pools and the hidden states of the wanted ones into step.hidden: behind
  // the last layer's KV only those go on. Throws std::invalid_argument for a token id, position, slot, row, block or
  // pool that does not fit, before anything is written.
  // Not re-entrant: the workspace belongs to the decoder.
  void forward(const DecoderStep& step, const LayerPools& pools, int threads);

  // out [rows, vocab] float32 of hidden [rows, hidden], dense.
  void logits(const void* hidden, int64_t rows, float* out, int threads);

  const DecoderShape& shape() const { return shape_; }

 private:
  // One thread of the team: how far it is, and memory of its own.
  struct Worker {
    int threads;  // of the team
    int thread;   // its number
    int64_t stage;
    char* rows;  // kPrivateRows normed rows
    char* attention;
    ProductScratch scratch;
  };

  void check(const DecoderStep& step, const LayerPools& pools) const;
  void plan(const DecoderStep& step, const LayerPools& pools);
  void prepare(int64_t tokens, int threads);
  int64_t private_bytes() const;
  int64_t attention_bytes() const;
  void run(const DecoderStep& step, const LayerPools& pools, Worker& worker);
  void project(const DecoderStep& step, const LayerPools& pools, size_t index, Worker& worker);
  void keep_wanted(const DecoderStep& step, Worker& worker);
  void attend(const LayerPools& pools, size_t index, const AttentionPlan& plan, Worker& worker);
  void norm_rows(const Vector& weight, int64_t first, int64_t last, char* out, int64_t row_bytes) const;
  void product(Product product, const Vector* norm, Worker& worker);

  DecoderShape shape_;
  SharedWeight embedding_, head_;
  Vector final_norm_;
  std::vector<DecoderLayer> layers_;
  int64_t multiplications_ = 0;  // of all products, for one token

  // Plans by window, made once per forward.
  std::vector<int32_t> windows_;
  std::vector<AttentionPlan> plans_;
  AttentionPlan last_plan_;  // of the wanted tokens, where they are not all

  Stages stages_;

  // Workspace, kept between calls, in huge pages. What is never alive at one time shares its memory: q, k and v with
  // the gated rows, the normed rows with the context.
  struct Buffer {
    char* data = nullptr;
    int64_t stride = 0;  // elements between rows
  };
  static int64_t size_buffer(Buffer& buffer, int64_t rows, int64_t width, int64_t element);
  Buffer residual_, normed_, qkv_, context_, gated_, scratch_;
  std::unique_ptr<WeightArena> memory_;
  char* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0;
};

}  // namespace pagedkv
