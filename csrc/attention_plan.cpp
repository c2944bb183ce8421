// Who computes what: from a batch to tiles of tokens and items of work. Nothing here changes a bit of the result.
#include <omp.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention.hpp"

namespace pagedkv {
namespace {

constexpr int32_t kSplitRows = 16;      // sequences with at most this many query rows a head take part in sharing
constexpr int64_t kSharesLeft = 2;       // an item is at most 1 / kSharesLeft of what is left for its thread,
constexpr int64_t kItemsPerThread = 64;  // but need not be less than 1 / kItemsPerThread of all that a thread does
constexpr int64_t kTilesPerThread = 6;   // at least, where tiles of half the rows make so many
constexpr int64_t kTileCost = 14;       // reading and packing a tile costs about as much as this many query rows

int32_t pieces_up_to(int32_t position) { return (position + kPiece - 1) / kPiece; }

// The shared prefixes of a batch: which sequences read which pieces together.
struct Shared {
  std::vector<int32_t> seqs;
  int32_t first_piece;
  int32_t last_piece;
};

class Planner {
 public:
  Planner(AttentionPlan& plan, const BatchView& view) : plan_(plan), view_(view), alone_from_(view.num_seqs, -1) {}

  void run() {
    copy_and_check();
    std::vector<int32_t> candidates;
    for (int32_t seq = 0; seq < view_.num_seqs; ++seq) {
      const int32_t rows = (view_.query_start[seq + 1] - view_.query_start[seq]) * plan_.group();
      const bool from_start = view_.window == 0 || view_.seq_lens[seq] <= view_.window;
      if (rows > 0 && rows <= kSplitRows && from_start && view_.seq_lens[seq] >= kPiece) candidates.push_back(seq);
    }
    if (candidates.size() > 1) refine(candidates, 0);
    for (const Shared& shared : shared_) add_shared(shared);
    for (int32_t seq = 0; seq < view_.num_seqs; ++seq) add_sequence(seq);
    add_items();
  }

 private:
  void copy_and_check() {
    const int32_t* starts = view_.query_start;
    if (view_.head_dim < 1 || view_.head_dim > kMaxHeadDim)
      throw std::invalid_argument("head_dim is " + std::to_string(view_.head_dim) + "; the kernels take 1 to " +
                                  std::to_string(kMaxHeadDim));
    if (starts[0] != 0) throw std::invalid_argument("query_start must begin with 0");
    const int64_t width = view_.table_width;
    plan_.tables.assign(view_.block_table, view_.block_table + view_.num_seqs * width);
    plan_.token_low.clear();
    plan_.token_high.clear();
    for (int32_t seq = 0; seq < view_.num_seqs; ++seq) {
      const int32_t length = view_.seq_lens[seq], new_tokens = starts[seq + 1] - starts[seq];
      const std::string name = "sequence " + std::to_string(seq) + ": ";
      if (new_tokens < 0) throw std::invalid_argument(name + "query_start goes down");
      if (length < 0 || length > width * view_.block_size)
        throw std::invalid_argument(name + std::to_string(length) + " tokens do not fit a table of " +
                                    std::to_string(width) + " blocks of " + std::to_string(view_.block_size));
      for (int32_t i = 0; i < new_tokens; ++i) {
        const int32_t high = std::max(length - new_tokens + i + 1, 0);
        plan_.token_high.push_back(high);
        plan_.token_low.push_back(view_.window > 0 ? std::max(high - view_.window, 0) : 0);
      }
      if (new_tokens == 0 || length == 0) continue;
      const int32_t first = plan_.token_low[starts[seq]] / view_.block_size, last = (length - 1) / view_.block_size;
      for (int32_t j = first; j <= last; ++j) {
        const int32_t block = plan_.tables[seq * width + j];
        if (block < 0 || block >= view_.num_blocks)
          throw std::invalid_argument(name + "block " + std::to_string(block) + " of its table lies outside a pool of " +
                                      std::to_string(view_.num_blocks));
      }
    }
    plan_.partial_base.assign(plan_.token_low.size(), -1);
  }

  const int32_t* table(int32_t seq) const { return plan_.tables.data() + seq * view_.table_width; }

  // Lexicographic order of the blocks that hold piece `piece`.
  int compare(int32_t a, int32_t b, int32_t piece) const {
    const int64_t first = int64_t{piece} * kPiece / view_.block_size;
    const int64_t last = (int64_t{piece + 1} * kPiece - 1) / view_.block_size;
    for (int64_t j = first; j <= last; ++j)
      if (table(a)[j] != table(b)[j]) return table(a)[j] < table(b)[j] ? -1 : 1;
    return 0;
  }

  // Split a group that agrees on every piece before `piece` into those that agree on it too, and go on with each.
  void refine(std::vector<int32_t> group, int32_t piece) {
    const int32_t from = piece;
    for (;; ++piece) {
      std::vector<int32_t> reach;
      for (int32_t seq : group)
        if (view_.seq_lens[seq] >= (piece + 1) * kPiece) reach.push_back(seq);
      std::sort(reach.begin(), reach.end(), [&](int32_t a, int32_t b) {
        const int order = compare(a, b, piece);
        return order != 0 ? order < 0 : a < b;
      });
      if (reach.size() == group.size() && compare(reach.front(), reach.back(), piece) == 0) continue;
      if (piece > from) {
        shared_.push_back({group, from, piece});
        for (int32_t seq : group) alone_from_[seq] = piece;
      }
      for (size_t i = 0, j = 0; i < reach.size(); i = j) {
        for (j = i + 1; j < reach.size() && compare(reach[i], reach[j], piece) == 0;) ++j;
        if (j - i > 1) refine({reach.begin() + i, reach.begin() + j}, piece);
      }
      return;
    }
  }

  // A tile is packed once for all rows of an item; but a short prompt must make items for all threads.
  int32_t rows_of_item() const {
    const int64_t most = view_.head_dim > 128 ? kMaxRows / 2 : kMaxRows;
    const int64_t rows = int64_t{view_.query_start[view_.num_seqs]} * view_.num_heads;
    return static_cast<int32_t>(std::clamp(rows / (kTilesPerThread * omp_get_max_threads()), most / 2, most));
  }
  int32_t tokens_per_tile() const { return std::max(rows_of_item() / plan_.group(), 1); }

  void add_tile(const int32_t* table, const std::vector<int32_t>& tokens, int32_t first_slot, int32_t last_slot) {
    for (size_t begin = 0; begin < tokens.size(); begin += tokens_per_tile()) {
      const size_t end = std::min(begin + tokens_per_tile(), tokens.size());
      TokenTile tile{static_cast<int32_t>(plan_.tile_tokens.size()), static_cast<int32_t>(end - begin), table,
                     last_slot, 0};
      for (size_t i = begin; i < end; ++i) {
        plan_.tile_tokens.push_back(tokens[i]);
        tile.first_slot = std::min(tile.first_slot, std::max(plan_.token_low[tokens[i]], first_slot));
        tile.last_slot = std::max(tile.last_slot, std::min(plan_.token_high[tokens[i]], last_slot));
      }
      plan_.tiles.push_back(tile);
    }
  }

  void add_shared(const Shared& shared) {
    std::vector<int32_t> tokens;
    for (int32_t seq : shared.seqs)
      for (int32_t t = view_.query_start[seq]; t < view_.query_start[seq + 1]; ++t) tokens.push_back(t);
    add_tile(table(shared.seqs.front()), tokens, shared.first_piece * kPiece, shared.last_piece * kPiece);
    num_shared_ = plan_.tiles.size();
  }

  void add_sequence(int32_t seq) {
    std::vector<int32_t> tokens;
    for (int32_t t = view_.query_start[seq]; t < view_.query_start[seq + 1]; ++t) tokens.push_back(t);
    const size_t before = plan_.tiles.size();
    const int32_t from = std::max(alone_from_[seq], 0) * kPiece;
    if (from < view_.seq_lens[seq] || from == 0) add_tile(table(seq), tokens, from, view_.seq_lens[seq]);
    is_split_.resize(plan_.tiles.size(), false);
    if (alone_from_[seq] >= 0) {
      std::fill(is_split_.begin() + before, is_split_.end(), true);
      for (int32_t t : tokens) split(t, 0, pieces_up_to(view_.seq_lens[seq]));
    }
  }

  void split(int32_t token, int32_t first_piece, int32_t last_piece) {
    plan_.split_tokens.push_back(token);
    plan_.partial_base[token] = plan_.num_partials - first_piece;
    plan_.num_partials += last_piece - first_piece;
  }

  // KV heads that an item takes together: as its rows allow, and at most `wanted`, in equal shares.
  int32_t heads_of_item(const TokenTile& tile, int64_t wanted) const {
    const int64_t room = rows_of_item() / (tile.num_tokens * plan_.group());
    const int64_t most = std::max<int64_t>(std::min(room, wanted), 1), heads = view_.num_kv_heads;
    const int64_t shares = (heads + most - 1) / most;
    return static_cast<int32_t>((heads + shares - 1) / shares);
  }

  static int32_t first_piece(const TokenTile& tile) { return tile.first_slot / kPiece; }
  static int32_t last_piece(const TokenTile& tile) { return pieces_up_to(tile.last_slot); }

  // Of the pieces [first, last) of one KV head.
  int64_t cost_of(const TokenTile& tile, int32_t first, int32_t last) const {
    const int32_t from = std::max(first * kPiece, tile.first_slot), to = std::min(last * kPiece, tile.last_slot);
    return to <= from ? 0 : (tile.num_tokens * plan_.group() + kTileCost) * ((to - from + 15) / 16);
  }
  int64_t cost_of_tile(const TokenTile& tile) const {
    return cost_of(tile, first_piece(tile), last_piece(tile)) * view_.num_kv_heads;
  }

  // Longest tiles first, in items that get smaller the less is left, so that the threads end together.
  void add_items() {
    std::vector<std::pair<int64_t, size_t>> order;
    for (const TokenTile& tile : plan_.tiles) order.push_back({cost_of_tile(tile), order.size()});
    std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    plan_.cost = 0;
    for (const auto& entry : order) plan_.cost += entry.first;
    left_ = plan_.cost;
    for (const auto& entry : order) add_items_of(entry.second, entry.first);
    std::stable_sort(costed_.begin(), costed_.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const auto& entry : costed_) plan_.items.push_back(entry.second);
  }

  // What an item may cost now.
  int64_t limit() const {
    const int64_t threads = omp_get_max_threads();
    return std::max(left_ / (kSharesLeft * threads), plan_.cost / (kItemsPerThread * threads));
  }

  void add_items_of(size_t index, int64_t cost) {
    const TokenTile& tile = plan_.tiles[index];
    const int32_t first = cost > 0 ? first_piece(tile) : 0, last = cost > 0 ? last_piece(tile) : 0;
    const int64_t head_cost = cost / view_.num_kv_heads, piece_cost = cost_of(tile, first, first + 1);
    const int32_t most_heads = heads_of_item(tile, view_.num_kv_heads);
    const bool must_split = index < num_shared_ || is_split_[index];
    const bool whole = !must_split && (last - first <= 1 || head_cost * most_heads <= limit());
    if (!whole && !must_split)
      for (int32_t i = 0; i < tile.num_tokens; ++i) split(plan_.tile_tokens[tile.first + i], first, last);
    int32_t piece = first;
    do {  // at least once: the tokens of an empty tile get their zeros
      const int32_t heads = cost == 0 ? most_heads : heads_of_item(tile, limit() / (whole ? head_cost : piece_cost));
      const int64_t wanted = whole || cost == 0 ? last : std::max<int64_t>(limit() / (piece_cost * heads), 1);
      const int32_t stop = static_cast<int32_t>(std::min<int64_t>(piece + wanted, last));
      for (int32_t head = 0; head < view_.num_kv_heads; head += heads) {
        const int32_t last_head = std::min(head + heads, view_.num_kv_heads);
        const int64_t item_cost = cost_of(tile, piece, stop) * (last_head - head);
        costed_.push_back({item_cost, {static_cast<int32_t>(index), head, last_head, piece, stop, whole}});
        left_ -= item_cost;
      }
      piece = stop;
    } while (piece < last);
  }

  AttentionPlan& plan_;
  const BatchView& view_;
  std::vector<int32_t> alone_from_;  // -1: shares nothing
  std::vector<Shared> shared_;
  std::vector<bool> is_split_;
  size_t num_shared_ = 0;
  std::vector<std::pair<int64_t, WorkItem>> costed_;
  int64_t left_ = 0;  // the cost of what no item covers yet
};

}  // namespace

void AttentionPlan::build(const BatchView& view) {
  batch = view;
  batch.query_start = batch.seq_lens = batch.block_table = nullptr;
  tile_tokens.clear();
  tiles.clear();
  items.clear();
  split_tokens.clear();
  num_partials = 0;
  Planner(*this, view).run();
  partials.resize(static_cast<size_t>(num_partials * batch.num_heads * partial_stride() + 16));
}

}  // namespace pagedkv
