// The attention kernel, over the vectors of one instruction set (simd_*.hpp, included before).
//
// A tile of kTile slots of one KV head is packed once and then used by all query rows of the item, one KV head of the
// item after the other, because within a block their slots lie side by side:
//     keys    [D / U][kTile] dwords   lanes are slots, so a score is one accumulator over D in order
//     values  [kTile / U][Dp] dwords  lanes are dimensions, so an output is one accumulator over slots in order
// A dword holds U numbers of a Format: one float, or two bf16 for the dot-product instructions. Both products are
// then the same loop: rows of broadcast dwords times packed vectors. A row's arithmetic is the same whatever other
// rows stand beside it. Rows outside [first_slot, last_slot) are zeros and never read, and a masked score has weight
// exactly 0, so a tile that is only partly there gives the bits of the part.
#pragma once
#include "attention_math.hpp"
#include "attention_tile.hpp"

namespace pagedkv::PAGEDKV_NS {

// Softmax state of a row over part of its history: the largest score (in powers of two), the sum of 2^(score - max),
// and the sum of values with those weights. Nothing seen: -inf, 0, zeros.
static inline void merge_state(float& max_a, float& sum_a, float* out_a, float max_b, float sum_b, const float* out_b,
                               int columns) {
  const float top = max_b > max_a ? max_b : max_a, base = top == kNothing ? 0.0f : top;
  const float fa = exp2_negative(max_a - base), fb = exp2_negative(max_b - base);
  for (int d = 0; d < columns; d += kLanes)
    store(out_a + d, fma(load(out_b + d), splat(fb), mul(load(out_a + d), splat(fa))));
  sum_a = sum_a * fa + sum_b * fb;
  max_a = top;
}

// The last step of a row: the sink joins the denominator, the division, the conversion.
static inline void finish_row(const AttentionArgs& args, int head, int token, float top, float sum, float* values,
                              int D) {
  float factor = 1.0f;
  if (args.sinks != nullptr && sum != 0.0f) {
    const float sink = args.sinks[head] * kLog2e, with = sink > top ? sink : top;
    factor = exp2_negative(top - with);
    sum = sum * factor + exp2_negative(sink - with);
  }
  const vf by = splat(sum == 0.0f ? 0.0f : factor / sum), zero = splat(0.0f);  // added: -0 becomes 0, as in a merge
  const int64_t at = token * args.out.token_stride + head * args.out.head_stride;
  const auto put = [&](auto* to) {
    int d = 0;
    for (; d + kLanes <= D; d += kLanes) store_as(to + d, fma(load(values + d), by, zero));
    if (d < D) {
      float rest[kLanes];
      store(rest, fma(load(values + d), by, zero));
      for (int i = 0; d + i < D; ++i) narrow(rest[i], to[d + i]);
    }
  };
  if (args.out.dtype == DType::f32) put(static_cast<float*>(args.out.data) + at);
  else if (args.out.dtype == DType::bf16) put(static_cast<bfloat_t*>(args.out.data) + at);
  else put(static_cast<half_t*>(args.out.data) + at);
}

// The memory of one thread, cut from one aligned buffer (attention_scratch_bytes is the bound).
struct Scratch {
  float* take(int64_t floats) {
    float* here = next;
    next += (floats + 15) / 16 * 16;
    return here;
  }
  float* next;
};

template <class F, class T, bool Scaled>
class ItemRunner {
  using Rows = TileRows<T, Scaled>;

 public:
  ItemRunner(const AttentionPlan& plan, const AttentionArgs& args, const WorkItem& item, const WorkItem* next,
             void* memory)
      : plan_(plan), args_(args), item_(item), next_(next), tile_(plan.tiles[item.tile]), group_(plan.group()),
        D_(plan.batch.head_dim), columns_(round_up(D_, kLanes)), dwords_(F::row_dwords(D_)),
        rows_(tile_.num_tokens * group_), all_(rows_ * (item.last_head - item.first_head)),
        strides_(Rows::strides_of(args, D_)) {
    Scratch scratch{static_cast<float*>(memory)};
    const int padded = round_up(D_, 64);
    keys_ = scratch.take(padded * kTile);
    values_ = scratch.take(kTile * padded);
    wide_ = scratch.take(kTile * padded);
    query_ = scratch.take(int64_t{all_} * padded);
    out_ = scratch.take(int64_t{all_} * padded);
    merged_ = scratch.take(int64_t{all_} * padded);
    sums_ = scratch.take(int64_t{all_} * kLanes);
    max_ = scratch.take(all_);
    merged_max_ = scratch.take(all_);
    merged_sum_ = scratch.take(all_);
    low_ = reinterpret_cast<int32_t*>(scratch.take(all_));
    high_ = reinterpret_cast<int32_t*>(scratch.take(all_));
    zeros_ = scratch.take(kMaxHeadDim);
    scores_ = scratch.take(kBlockRows * kTile);
    weights_ = scratch.take(kBlockRows * kTile);
    stop_ = tile_.last_slot < item_.last_piece * kPiece ? tile_.last_slot : item_.last_piece * kPiece;
  }

  void run() {
    __builtin_memset(zeros_, 0, sizeof(float) * kMaxHeadDim);
    load_rows();
    if (item_.whole && item_.last_piece - item_.first_piece == 1) {  // what merging into nothing would give
      run_piece(item_.first_piece);
      return each_row([&](int r, int token, int head) {
        finish_row(args_, head, token, max_[r], hsum(load(sums_ + r * kLanes)), out_ + r * columns_, D_);
      });
    }
    clear(merged_max_, merged_, merged_sum_, 1);
    for (int piece = item_.first_piece; piece < item_.last_piece; ++piece) {
      run_piece(piece);
      each_row([&](int r, int token, int head) {
        const float sum = hsum(load(sums_ + r * kLanes));
        if (item_.whole)
          merge_state(merged_max_[r], merged_sum_[r], merged_ + r * columns_, max_[r], sum, out_ + r * columns_,
                      columns_);
        else
          save_partial(r, token, head, piece, sum);
      });
    }
    if (!item_.whole) return;
    each_row([&](int r, int token, int head) {
      finish_row(args_, head, token, merged_max_[r], merged_sum_[r], merged_ + r * columns_, D_);
    });
  }

 private:
  // The rows of the item: those of its first KV head, then those of the next; in a head token by token.
  template <class Run>  // run(row, token, head)
  inline void each_row(Run run) const {
    int row = 0;
    for (int head = item_.first_head * group_; head < item_.last_head * group_; head += group_)
      for (int t = 0; t < tile_.num_tokens; ++t)
        for (int g = 0; g < group_; ++g) run(row++, plan_.tile_tokens[tile_.first + t], head + g);
  }

  int first_tile(const WorkItem& item) const {
    const int first = plan_.tiles[item.tile].first_slot, begin = item.first_piece * kPiece;
    return begin > first ? begin : first / kTile * kTile;
  }

  void load_rows() {
    const int padded = round_up(D_, 16);
    each_row([&](int r, int token, int head) {
      low_[r] = plan_.token_low[token];
      high_[r] = plan_.token_high[token];
      const int64_t at = token * args_.q.token_stride + head * args_.q.head_stride;
      float* to = query_ + r * dwords_;  // a row's end may be written past, into what the next one overwrites
      if (args_.q.dtype == DType::f32) F::row(static_cast<const float*>(args_.q.data) + at, D_, to, padded);
      else if (args_.q.dtype == DType::bf16) F::row(static_cast<const bfloat_t*>(args_.q.data) + at, D_, to, padded);
      else F::row(static_cast<const half_t*>(args_.q.data) + at, D_, to, padded);
    });
  }

  void clear(float* max, float* out, float* sums, int lanes) {
    for (int r = 0, rows = all_; r < rows; ++r) max[r] = kNothing;
    __builtin_memset(sums, 0, sizeof(float) * all_ * lanes);
    __builtin_memset(out, 0, sizeof(float) * all_ * columns_);
  }

  void run_piece(int piece) {
    clear(max_, out_, sums_, kLanes);
    const int begin = piece * kPiece, end = begin + kPiece;
    for (int slot = begin; slot < end; slot += kTile) {
      if (slot + kTile <= tile_.first_slot || slot >= stop_) continue;
      Rows& at = found_[slot / kTile % 2];
      if (ready_ != slot) at.find(plan_, args_, item_, slot, zeros_);
      fetch_after(slot);
      for (int head = item_.first_head; head < item_.last_head; ++head) run_tile(slot, at, head);
    }
  }

  // The tile after this one, of this item or the next, is found and fetched while this one is computed.
  void fetch_after(int slot) {
    Rows& following = found_[slot / kTile % 2 ^ 1];
    ready_ = slot + kTile;
    const bool more = ready_ < stop_;
    if (!more && next_ == nullptr) return ahead_.end();
    const WorkItem& item = more ? item_ : *next_;
    following.find(plan_, args_, item, more ? ready_ : first_tile(item), zeros_);
    ahead_.begin(following.spans, following.num_spans, item.last_head - item.first_head, strides_);
  }

  void run_tile(int slot, Rows& at, int head) {
    at.point(strides_, head);
    F::pack_keys(at.rows, at.seen, D_, round_up(D_, 16), keys_, wide_, ahead_);
    if constexpr (F::kDirectRows > 0)
      if (rows_ <= F::kDirectRows) F::value_rows(at.rows + kTile, at.seen, D_, wide_, value_rows_, ahead_);
    if (rows_ > F::kDirectRows) F::pack_values(at.rows + kTile, at.seen, D_, columns_, values_, wide_, ahead_);
    const int blocks = (rows_ + kBlockRows - 1) / kBlockRows, step = (rows_ + blocks - 1) / blocks;
    const int first = (head - item_.first_head) * rows_;
    for (int row = 0; row < rows_; row += step)
      run_rows(slot, at, first + row, rows_ - row < step ? rows_ - row : step);
  }

  // Rows [row, row + count) against the packed tile: scores, softmax step, weighted values. Slots that none of them
  // sees have weight 0 and are left out: a product with 0 adds nothing, a tile without any slot changes nothing.
  void run_rows(int slot, const Rows& at, int row, int count) {
    int low = low_[row], high = high_[row];
    for (int r = 1; r < count; ++r) {
      low = low_[row + r] < low ? low_[row + r] : low;
      high = high_[row + r] > high ? high_[row + r] : high;
    }
    const SlotRange seen = at.seen.within(low - slot, high - slot);
    if (seen.begin >= seen.end) return;
    float start[kBlockRows];
    if constexpr (F::kIntegers)
      F::scores(count, query_ + row * dwords_, D_, keys_, seen, scores_, ahead_);
    else
      multiply_rows<F, false>(count, query_ + row * dwords_, dwords_, keys_ + seen.begin, kTile, scores_ + seen.begin,
                              kTile, nullptr, dwords_, seen.end - seen.begin, ahead_);
    // in two rounds, so that the rows' chains overlap
    for (int r = 0; r < count; ++r) start[r] = finish_scores(slot, seen, at, row + r, scores_ + r * kTile);
    for (int r = 0; r < count; ++r)
      start[r] = weigh_scores(seen, at, row + r, start[r], scores_ + r * kTile, weights_ + r * kTile);
    if constexpr (F::kDirectRows > 0) {
      if (rows_ <= F::kDirectRows)
        return F::weigh(count, value_rows_, seen, D_, weights_, out_ + row * columns_, columns_, start, ahead_);
    }
    if constexpr (F::kIntegers) {
      F::values(count, weights_, seen, D_, values_, out_ + row * columns_, columns_, start, ahead_);
    } else {
      const int first = seen.begin / F::kPerDword, dwords = (seen.end - seen.begin) / F::kPerDword;
      multiply_rows<F, true>(count, weights_ + first, kTile, values_ + first * columns_, columns_,
                             out_ + row * columns_, columns_, start, dwords, columns_, ahead_);
    }
  }

  // Scales and masks a row's scores in place; returns the largest.
  float finish_scores(int slot, SlotRange seen, const Rows& at, int row, float* scores) {
    const bool masked = low_[row] > slot + seen.begin || high_[row] < slot + seen.end;
    if (args_.softcap > 0.0f) return finish_scores_as<true, true>(slot, seen, at, row, scores);
    if (masked) return finish_scores_as<true, false>(slot, seen, at, row, scores);
    return finish_scores_as<false, false>(slot, seen, at, row, scores);
  }

  template <bool Masked, bool Capped>
  inline float finish_scores_as(int slot, SlotRange seen, const Rows& at, int row, float* scores) {
    const vf factor = splat(Capped ? args_.scale / args_.softcap : args_.scale * kLog2e);
    vf top = splat(kNothing);
    for (int v = seen.begin; v < seen.end; v += kLanes) {
      vf x = mul(load(scores + v), factor);
      if constexpr (Scaled) x = mul(x, load(at.key_scale + v));
      if constexpr (Capped) x = mul(tanh(x), splat(args_.softcap * kLog2e));
      if constexpr (Masked) x = keep(x, slot + v, low_[row], high_[row], kNothing);
      store(scores + v, x);
      top = max(top, x);
    }
    return hmax(top);
  }

  // Turns a row's scores into weights; returns the factor of what was summed before.
  inline float weigh_scores(SlotRange seen, const Rows& at, int row, float tile_top, float* scores, float* weights) {
    const float before = max_[row], now = tile_top > before ? tile_top : before;
    const vf base = splat(now == kNothing ? 0.0f : now);
    const vf fade = exp2_negative(sub(splat(before), base));  // without a branch: it would be mispredicted
    vf sum = mul(load(sums_ + row * kLanes), fade);
    for (int v = seen.begin; v < seen.end; v += kLanes) {
      vf p = F::exp2(sub(load(scores + v), base));
      sum = add(sum, p);
      if constexpr (Scaled) p = mul(p, load(at.value_scale + v));
      if constexpr (F::kIntegers) store(scores + v, p);
      else F::weights(weights, v, p);
    }
    if constexpr (F::kIntegers) F::close_weights(scores, seen, weights);
    store(sums_ + row * kLanes, sum);
    max_[row] = now;
    return first_lane(fade);
  }

  void save_partial(int row, int token, int head, int piece, float sum) {
    const int64_t stride = plan_.partial_stride();
    const int64_t index = (plan_.partial_base[token] + piece) * plan_.batch.num_heads + head;
    float* to = plan_.partials.data() + index * stride;
    to[0] = max_[row];
    to[1] = sum;
    for (int d = 0; d < columns_; d += kLanes) store(to + 16 + d, load(out_ + row * columns_ + d));
  }

  const AttentionPlan& plan_;
  const AttentionArgs& args_;
  const WorkItem& item_;
  const WorkItem* next_;  // what this thread does after it, or nullptr
  const TokenTile& tile_;
  const int group_, D_, columns_, dwords_;
  const int rows_, all_;  // of one KV head, of all
  const SpanStrides strides_;
  float *keys_, *values_, *wide_, *query_, *out_, *merged_, *sums_, *max_, *merged_max_, *merged_sum_;
  float *zeros_, *scores_, *weights_;
  int32_t *low_, *high_;
  int stop_, ready_ = -1;  // the end of this item's slots; the tile whose rows are found already
  Rows found_[2];
  Ahead ahead_;
  const typename F::ValueRow* value_rows_[kTile];
};

#ifdef PAGEDKV_BF16
using Narrow = BFloats;  // bf16 pairs, for pools whose numbers are exact in bf16
using Small = Bytes;
#else
using Narrow = Floats;
using Small = Floats;
#endif

static void run_item(const AttentionPlan& plan, const AttentionArgs& args, const WorkItem& item, const WorkItem* next,
                     void* scratch) {
  switch (args.kv_dtype) {
    case DType::f32: return ItemRunner<Floats, float, false>(plan, args, item, next, scratch).run();
    case DType::f16: return ItemRunner<Floats, half_t, false>(plan, args, item, next, scratch).run();
    case DType::bf16: return ItemRunner<Narrow, bfloat_t, false>(plan, args, item, next, scratch).run();
    case DType::i8: return ItemRunner<Small, int8_t, true>(plan, args, item, next, scratch).run();
    case DType::f8e4m3: return ItemRunner<Narrow, e4m3_t, true>(plan, args, item, next, scratch).run();
  }
}

// Merge the partials of a split token's head, left to right, and write its output.
static void merge(const AttentionPlan& plan, const AttentionArgs& args, int32_t token, int32_t head) {
  float out[kMaxHeadDim];
  const int D = plan.batch.head_dim, columns = round_up(D, kLanes);
  for (int d = 0; d < columns; ++d) out[d] = 0.0f;
  float top = kNothing, sum = 0.0f;
  const int first = plan.token_low[token] / kPiece, last = (plan.token_high[token] + kPiece - 1) / kPiece;
  for (int piece = first; piece < last; ++piece) {
    const int64_t index = (plan.partial_base[token] + piece) * plan.batch.num_heads + head;
    const float* from = plan.partials.data() + index * plan.partial_stride();
    merge_state(top, sum, out, from[0], from[1], from + 16, columns);
  }
  finish_row(args, head, token, top, sum, out, D);
}

}  // namespace pagedkv::PAGEDKV_NS

#include "attention_write.hpp"

namespace pagedkv::PAGEDKV_NS {

static float read(const float* data, int64_t n) {
  vf sum[8];
  for (int i = 0; i < 8; ++i) sum[i] = splat(0.0f);
  int64_t i = 0;
  for (; i + 8 * kLanes <= n; i += 8 * kLanes)
    for (int j = 0; j < 8; ++j) sum[j] = add(sum[j], load(data + i + j * kLanes));
  float total = 0.0f;
  for (int j = 0; j < 8; ++j) total += hsum(sum[j]);
  for (; i < n; ++i) total += data[i];
  return total;
}

constexpr AttentionKernels kAttention = {run_item, merge, write_rows, read};

}  // namespace pagedkv::PAGEDKV_NS
