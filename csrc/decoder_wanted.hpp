// A step seen by the last layer's attention: the wanted tokens alone.
//
// Tokens that follow one another in a sequence stay together, as one sequence that ends with the last of them; so the
// last token of a prefill is a decode step, and a prompt whose rows are all wanted is a prefill as before.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "decoder.hpp"

namespace pagedkv {

struct WantedTokens {
  std::vector<int32_t> query_start{0};  // as in DecoderStep
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> block_table;

  int32_t num_seqs() const { return static_cast<int32_t>(seq_lens.size()); }

  explicit WantedTokens(const DecoderStep& step) {
    int32_t seq = 0;
    for (int64_t i = 0; i < step.num_rows; ++i) {
      const int64_t row = step.rows[i];
      const bool follows = i > 0 && row == step.rows[i - 1] + 1 && row < step.query_start[seq + 1];
      while (row >= step.query_start[seq + 1]) ++seq;
      const int32_t length = step.seq_lens[seq] - static_cast<int32_t>(step.query_start[seq + 1] - row) + 1;
      if (follows) {
        ++query_start.back();
        seq_lens.back() = length;
        continue;
      }
      query_start.push_back(query_start.back() + 1);
      seq_lens.push_back(length);
      const int32_t* table = step.block_table + seq * step.table_width;
      block_table.insert(block_table.end(), table, table + step.table_width);
    }
  }
};

}  // namespace pagedkv
