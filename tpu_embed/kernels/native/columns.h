// How the bags of several features lie in their arrays.
#ifndef TPU_EMBED_COLUMNS_H_
#define TPU_EMBED_COLUMNS_H_

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

// Owns what `Columns` points to.
class ColumnTable {
 public:
  // Args: bags a period has of each feature; of each column, its number if columns are counted
  // feature by feature, or [] if they are; numbers a row; periods; places of each feature, or [] if
  // none has any.
  ColumnTable(xla::ffi::Span<const int64_t> bags, xla::ffi::Span<const int64_t> order, int64_t dim,
              int64_t periods, xla::ffi::Span<const int64_t> places = {})
      : bags_(bags.begin(), bags.end()),
        places_(places.begin(), places.end()),
        dim_(dim),
        periods_(periods) {
    places_.resize(bags_.size());
    for (size_t f = 0; f < bags_.size(); ++f) {
      for (int64_t column = 0; column < bags_[f]; ++column) {
        feature_.push_back(static_cast<int64_t>(f));
        offset_.push_back(column);
      }
    }
    if (order.size() != feature_.size()) return;
    const std::vector<int64_t> feature = feature_, offset = offset_;
    for (size_t column = 0; column < order.size(); ++column) {
      const size_t from = std::min<size_t>(order[column], order.size() - 1);
      feature_[column] = feature[from];
      offset_[column] = offset[from];
    }
  }

  int64_t features() const { return static_cast<int64_t>(bags_.size()); }
  int64_t columns() const { return static_cast<int64_t>(feature_.size()); }

  // Segments in bags, and all of them.
  int64_t in_bags() const { return periods_ * columns(); }
  int64_t segments() const {
    return std::accumulate(places_.begin(), places_.end(), in_bags());
  }

  // Returns whether a feature's array has the size of its segments.
  bool fits(int64_t elements, int64_t feature) const {
    return elements == (periods_ * bags_[feature] + places_[feature]) * dim_;
  }

  Columns columns_of() const {
    const uint64_t reciprocal = columns() > 1 ? UINT64_MAX / columns() + 1 : 0;
    return {feature_.data(), offset_.data(), bags_.data(),   columns(),
            dim_,            reciprocal,     places_.data(), in_bags()};
  }

 private:
  std::vector<int64_t> bags_, places_, feature_, offset_;
  int64_t dim_, periods_;
};

}  // namespace tpu_embed

#endif  // TPU_EMBED_COLUMNS_H_
