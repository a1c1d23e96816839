// How the bags of several features lie in their arrays.
#ifndef TPU_EMBED_COLUMNS_H_
#define TPU_EMBED_COLUMNS_H_

#include <cstdint>
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
  // Args: bags an example has of each feature; numbers a row.
  ColumnTable(xla::ffi::Span<const int64_t> bags, int64_t dim)
      : bags_(bags.begin(), bags.end()), dim_(dim) {
    for (size_t f = 0; f < bags_.size(); ++f) {
      for (int64_t column = 0; column < bags_[f]; ++column) {
        feature_.push_back(static_cast<int64_t>(f));
        offset_.push_back(column);
      }
    }
  }

  int64_t features() const { return static_cast<int64_t>(bags_.size()); }
  int64_t columns() const { return static_cast<int64_t>(feature_.size()); }

  // Returns whether a feature's array has the size of `examples` examples.
  bool fits(int64_t elements, int64_t feature, int64_t examples) const {
    return elements == examples * bags_[feature] * dim_;
  }

  Columns columns_of() const {
    const uint64_t reciprocal = columns() > 1 ? UINT64_MAX / columns() + 1 : 0;
    return {feature_.data(), offset_.data(), bags_.data(), columns(), dim_, reciprocal};
  }

 private:
  std::vector<int64_t> bags_, feature_, offset_;
  int64_t dim_;
};

}  // namespace tpu_embed

#endif  // TPU_EMBED_COLUMNS_H_
