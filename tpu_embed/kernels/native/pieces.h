// Where the numbers of bags lie: the arrays of several features, and the blocks of their bags.
#ifndef TPU_EMBED_PIECES_H_
#define TPU_EMBED_PIECES_H_

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "loops.h"
#include "xla/ffi/api/ffi.h"

namespace tpu_embed {

// Returns how a table of float32, or of bfloat16 as uint16, is stored; callers give no other.
inline Storage storage_of(const xla::ffi::AnyBuffer& table) {
  return table.element_type() == xla::ffi::DataType::F32 ? Storage::kFloat32 : Storage::kBfloat16;
}

// Owns what `Pieces` points to.
template <typename Number>
class PieceTable {
 public:
  // Args: bags of each feature; for each feature, the first bags of `later` blocks, all but the first.
  PieceTable(xla::ffi::Span<const int64_t> bags, const int32_t* blocks, int64_t later)
      : bags_(bags.begin(), bags.end()) {
    int64_t start = 0;
    for (size_t f = 0; f < bags_.size(); ++f) {
      const int64_t end = start + bags_[f];
      int64_t begin = start;
      for (int64_t block = 0; block <= later; ++block) {
        // Whatever is given, pieces follow each other and end with the feature.
        const int64_t next = block < later ? int64_t{blocks[f * later + block]} : end;
        const int64_t stop = std::clamp(next, begin, end);
        if (stop > begin) {
          pieces_.push_back({nullptr, start, begin, stop, static_cast<int32_t>(block)});
          feature_.push_back(f);
        }
        begin = stop;
      }
      start = end;
    }
    blocks_ = later + 1;
    while ((start >> shift_) > 8 * static_cast<int64_t>(pieces_.size()) + 64) ++shift_;
    size_t piece = 0;
    for (int64_t bag = 0; bag < start; bag += int64_t{1} << shift_) {
      while (bag >= pieces_[piece].end) ++piece;
      first_.push_back(static_cast<int32_t>(piece));
    }
  }

  int64_t features() const { return static_cast<int64_t>(bags_.size()); }
  int64_t bags() const { return std::accumulate(bags_.begin(), bags_.end(), int64_t{0}); }
  int64_t bags_of(int64_t feature) const { return bags_[feature]; }
  int64_t blocks() const { return blocks_; }

  // Calls call(first bag, end) for every piece: by block, then by feature.
  template <typename Call>
  void for_each(const Call& call) const {
    std::vector<size_t> order(pieces_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return pieces_[a].block < pieces_[b].block;
    });
    for (const size_t i : order) call(pieces_[i].begin, pieces_[i].end);
  }

  // Returns the pieces, given one array a feature.
  Pieces<Number> of(const std::vector<Number*>& arrays) {
    for (size_t i = 0; i < pieces_.size(); ++i) pieces_[i].array = arrays[feature_[i]];
    return {pieces_.data(), first_.data(), shift_};
  }

 private:
  std::vector<int64_t> bags_;
  std::vector<Piece<Number>> pieces_;
  std::vector<size_t> feature_;  // of each piece
  std::vector<int32_t> first_;
  int64_t blocks_ = 1;
  int shift_ = 0;
};

}  // namespace tpu_embed

#endif  // TPU_EMBED_PIECES_H_
