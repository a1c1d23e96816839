// Which rows have no key, and the lowest of them.
#ifndef TPU_EMBED_FREE_ROWS_H_
#define TPU_EMBED_FREE_ROWS_H_

#include <cstdint>
#include <vector>

namespace tpu_embed {

// A set of rows: one bit per row, and above 64 words one word that tells which of them are not
// zero, up to a single word. So the lowest row of 50 million is found in five words.
class FreeRows {
 public:
  // All rows of [0, rows) are free.
  explicit FreeRows(int64_t rows) {
    for (int64_t bits = rows; levels_.empty() || levels_.back().size() > 1;
         bits = static_cast<int64_t>(levels_.back().size())) {
      levels_.emplace_back((bits + 63) / 64, ~uint64_t{0});
      if (bits % 64) levels_.back().back() = (uint64_t{1} << bits % 64) - 1;
    }
  }

  // Returns the lowest free row, or -1.
  int64_t lowest() const {
    if (levels_.back()[0] == 0) return -1;
    int64_t at = 0;
    for (auto level = levels_.rbegin(); level != levels_.rend(); ++level) {
      at = at * 64 + __builtin_ctzll((*level)[at]);
    }
    return at;
  }

  void add(int64_t row) {
    for (std::vector<uint64_t>& level : levels_) {
      uint64_t& word = level[row / 64];
      const bool was_empty = word == 0;
      word |= uint64_t{1} << row % 64;
      if (!was_empty) return;
      row /= 64;
    }
  }

  void remove(int64_t row) {
    for (std::vector<uint64_t>& level : levels_) {
      uint64_t& word = level[row / 64];
      word &= ~(uint64_t{1} << row % 64);
      if (word) return;
      row /= 64;
    }
  }

  int64_t bytes() const {
    int64_t words = 0;
    for (const std::vector<uint64_t>& level : levels_) words += level.size();
    return 8 * words;
  }

 private:
  std::vector<std::vector<uint64_t>> levels_;  // the lowest first
};

}  // namespace tpu_embed

#endif  // TPU_EMBED_FREE_ROWS_H_
