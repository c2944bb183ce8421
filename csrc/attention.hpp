// Attention through the block table, and the write of new KV into the pool, on raw pointers.
//
// T new tokens of B sequences, Hq query heads, Hkv KV heads, D head dimension, N blocks of b slots.
//
// One order of reduction. The history of a sequence is cut at absolute positions 0, kPiece, 2 kPiece, ...; a piece is
// reduced tile by tile (kTile slots at absolute positions) with an online softmax, and pieces are merged left to
// right. Which tokens share a tile, which thread runs it and where blocks lie never enters the arithmetic of a row,
// so decode, prefill, chunks, shared prefixes and any number of threads give the same bits (per instruction set).
//
// How to call, outside a parallel region:
//     AttentionPlan plan;               // keep it: its buffers are reused
//     plan.build(batch);                // once per forward: depends on the batch only, every layer uses it
//     attention(plan, args);            // per layer; opens a parallel region of omp_get_max_threads()
// Inside a parallel region (a whole forward in one region): one thread builds the plan before; then every thread of
// the team calls attention_team(plan, args) with equal arguments. It ends with a barrier.
#pragma once
#include <cstdint>
#include <vector>

namespace pagedkv {

constexpr int kTile = 64;    // slots that are reduced together
constexpr int kPiece = 256;  // positions between two cuts of the history; a multiple of kTile
constexpr int kMaxHeadDim = 256;
constexpr int kMaxRows = 192;  // query rows of an item: tokens x heads of a group x KV heads

enum class DType : int32_t { f32 = 0, f16 = 1, bf16 = 2, i8 = 3, f8e4m3 = 4 };

// The sequences of one forward. Sequence i has seq_lens[i] tokens, of which the last query_start[i + 1] -
// query_start[i] are new (rows of q). Entries of block_table past the used part may hold anything.
struct BatchView {
  int32_t num_seqs;
  const int32_t* query_start;  // [B + 1]
  const int32_t* seq_lens;     // [B]
  const int32_t* block_table;  // [B, W]
  int64_t table_width;         // W
  int32_t block_size;
  int64_t num_blocks;  // N: used table entries are checked against it
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t window;  // 0: none
};

// One of the two pools of a layer; strides in elements, the last dimension is dense.
struct PoolView {
  void* data;  // [N, Hkv, b, D]
  int64_t block_stride;
  int64_t head_stride;
  int64_t slot_stride;
  float* scales;  // [N, Hkv, b] for i8 and f8e4m3, else nullptr
  int64_t scale_block_stride;
  int64_t scale_head_stride;
  int64_t scale_slot_stride;
};

// Rows [T, H, D] of a dense last dimension; strides in elements. dtype is f32, f16 or bf16.
struct RowsView {
  void* data;
  DType dtype;
  int64_t token_stride;
  int64_t head_stride;
};

struct AttentionArgs {
  RowsView q;    // [T, Hq, D]
  RowsView out;  // [T, Hq, D]
  PoolView k;
  PoolView v;
  DType kv_dtype;
  float scale;
  float softcap;       // 0: none
  const float* sinks;  // [Hq] or nullptr
};

// A set of new tokens that read the same slots: all tokens of a decode step's shared prefix, or a run of a prefill.
struct TokenTile {
  int32_t first;  // into AttentionPlan::tile_tokens
  int32_t num_tokens;
  const int32_t* table;
  int32_t first_slot;  // union of what its tokens see: [first_slot, last_slot)
  int32_t last_slot;
};

// What one thread does at a time: one tile, the KV heads [first_head, last_head), the pieces [first_piece, last_piece).
struct WorkItem {
  int32_t tile;
  int32_t first_head;
  int32_t last_head;
  int32_t first_piece;
  int32_t last_piece;
  bool whole;  // all pieces of its tokens: merge here and write the output; else leave one partial per piece
};

class AttentionPlan {
 public:
  // Throws std::invalid_argument that names the sequence and the limit (block id, length, head dimension).
  void build(const BatchView& batch);

  BatchView batch{};  // its pointers are not kept: the plan owns copies of what it needs
  std::vector<int32_t> tables;
  std::vector<int32_t> token_low;         // [T] a token sees positions [token_low, token_high)
  std::vector<int32_t> token_high;        // [T]
  std::vector<int32_t> tile_tokens;       // token of each row of the tiles
  std::vector<TokenTile> tiles;           //
  std::vector<WorkItem> items;            // longest first
  std::vector<int32_t> split_tokens;      // tokens whose pieces are merged in a second pass
  std::vector<int64_t> partial_base;      // [T] index of a split token's piece 0 among the partials
  int64_t cost = 0;                       // of all items: query rows times slots / 16
  int64_t num_partials = 0;               // partials are [num_partials][Hq][partial_stride()]
  mutable std::vector<float> partials;    // each: max, sum, padding to 16, then D values
  mutable int64_t cursor = 0;             // the next item that no thread has taken
  int64_t partial_stride() const { return 16 + (batch.head_dim + 15) / 16 * 16; }
  int32_t group() const { return batch.num_heads / batch.num_kv_heads; }
};

void attention(const AttentionPlan& plan, const AttentionArgs& args);
void attention_team(const AttentionPlan& plan, const AttentionArgs& args);

// Write k, v [T, Hkv, D] into the slots block * b + offset of the pools; -1 skips a token. int8 and fp8 pools get one
// scale per (token, head). Throws std::invalid_argument for a slot outside the pool, before anything is written.
struct WriteArgs {
  RowsView k;
  RowsView v;
  PoolView k_pool;
  PoolView v_pool;
  DType kv_dtype;
  const int64_t* slot_mapping;  // [T]
  int64_t num_tokens;
  int64_t num_slots;  // N * b
  int32_t block_size;
  int32_t num_kv_heads;
  int32_t head_dim;
};
void write_kv(const WriteArgs& args);                            // checks, opens a parallel region if it pays
void check_slots(const int64_t* slots, int64_t n, int64_t num_slots);
void write_kv_rows(const WriteArgs& args, int64_t first, int64_t last);  // tokens [first, last): one thread, no checks

// Read n floats with every thread, as fast as this processor can: the yardstick of the benchmarks.
float read_stream(const float* data, int64_t n);

// The functions that exist once per instruction set.
struct AttentionKernels {
  // `next` is what this thread will probably run after it (its first tile is fetched ahead), or nullptr.
  void (*run_item)(const AttentionPlan&, const AttentionArgs&, const WorkItem&, const WorkItem* next, void* scratch);
  void (*merge)(const AttentionPlan&, const AttentionArgs&, int32_t token, int32_t head);
  void (*write_rows)(const WriteArgs&, int64_t first, int64_t last);
  float (*read)(const float* data, int64_t n);  // a sum: the fastest plain read, for measuring
};
const AttentionKernels& attention_kernels();
int64_t attention_scratch_bytes(int head_dim, int group);  // 64-byte aligned, one per thread

}  // namespace pagedkv
