// Row numbers in ascending order, equal ones in order of position: a stable radix sort.
#ifndef TPU_EMBED_SORT_H_
#define TPU_EMBED_SORT_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "entry.h"
#include "parallel.h"

namespace tpu_embed {

// Memory that is not filled: every entry is written before it is read.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t size) : data_(new T[std::max<int64_t>(1, size)]) {}
  T* data() { return data_.get(); }
  T& operator[](int64_t i) { return data_[i]; }

 private:
  std::unique_ptr<T[]> data_;
};

constexpr int64_t kSerialSort = 1 << 14;  // entries that are not worth a second thread
constexpr int kDigitBits = 12;            // 4,096 counters a chunk stay in the first-level cache

// Returns the parts in which n entries are read at once.
template <typename Pool>
int64_t sort_chunks(const Pool& parallel, int64_t n) {
  return n < kSerialSort ? 1 : parallel.threads();
}

inline int bit_length(uint64_t x) {
  int bits = 0;
  for (; x; x >>= 1) ++bits;
  return bits;
}

// Sorts entries by key, least significant digit first, every pass over chunks in parallel.
template <typename Entry, typename Pool = Parallel>
class RadixSort {
 public:
  // Args: the pool; n entries; the largest key.
  RadixSort(Pool& parallel, int64_t n, uint64_t largest)
      : parallel_(parallel),
        n_(n),
        bits_(std::max(1, bit_length(largest))),
        chunks_(sort_chunks(parallel, n)),
        first_(n),
        second_(n) {}

  // Entries to be filled before `sort`, by chunk: [begin(c), begin(c + 1)).
  Entry* entries() { return first_.data(); }
  int64_t chunks() const { return chunks_; }
  int64_t begin(int64_t chunk) const { return n_ * chunk / chunks_; }

  // Returns the sorted entries, which live as long as this object.
  const Entry* sort() {
    const int passes = (bits_ + kDigitBits - 1) / kDigitBits;
    const int digit = (bits_ + passes - 1) / passes;
    Entry*from = first_.data(), *to = second_.data();
    for (int pass = 0; pass < passes; ++pass) {
      scatter(from, to, pass * digit, digit);
      std::swap(from, to);
    }
    return from;
  }

 private:
  void scatter(const Entry* from, Entry* to, int shift, int digit) {
    const int64_t size = int64_t{1} << digit;
    const auto mask = static_cast<typename Entry::Key>(size - 1);
    std::vector<uint32_t> counts(chunks_ * size);
    parallel_.for_each(chunks_, [&](int64_t c) {
      uint32_t* mine = counts.data() + c * size;
      for (int64_t i = begin(c); i < begin(c + 1); ++i) ++mine[(from[i].key >> shift) & mask];
    });
    uint32_t total = 0;
    for (int64_t d = 0; d < size; ++d) {
      for (int64_t c = 0; c < chunks_; ++c) {
        total += std::exchange(counts[c * size + d], total);
      }
    }
    parallel_.for_each(chunks_, [&](int64_t c) {
      uint32_t* mine = counts.data() + c * size;
      for (int64_t i = begin(c); i < begin(c + 1); ++i) {
        to[mine[(from[i].key >> shift) & mask]++] = from[i];
      }
    });
  }

  Pool& parallel_;
  const int64_t n_;
  const int bits_;
  const int64_t chunks_;
  Scratch<Entry> first_, second_;
};

}  // namespace tpu_embed

#endif  // TPU_EMBED_SORT_H_
