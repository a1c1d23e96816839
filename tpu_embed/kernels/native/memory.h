// Memory for arrays that are read at random: zeros, in large pages where the system has them.
#ifndef TPU_EMBED_MEMORY_H_
#define TPU_EMBED_MEMORY_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace tpu_embed {

// Asks for pages of 2 MB where memory has not been touched: of pages of 4 KB, nearly every row of a
// large table has one of its own, which the processor must look up first. No more than a wish.
inline void ask_for_large_pages(char* begin, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const auto from = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t first = (from + kPage - 1) / kPage * kPage, last = (from + bytes) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// An array of zeros. The system gives its memory when it is first written, so that a large array
// of which little is used costs little.
template <typename T>
class Zeros {
 public:
  explicit Zeros(int64_t size = 0) : size_(size), bytes_(std::calloc(size + kSpare, sizeof(T))) {
    if (!bytes_) throw std::bad_alloc();
    // calloc aligns to 16 bytes: an element of 32 would then lie in two lines of the cache.
    const auto begin = reinterpret_cast<uintptr_t>(bytes_.get());
    data_ = reinterpret_cast<T*>((begin + kLine - 1) / kLine * kLine);
    ask_for_large_pages(reinterpret_cast<char*>(data_), size * static_cast<int64_t>(sizeof(T)));
  }

  int64_t size() const { return size_; }
  int64_t bytes() const { return size_ * static_cast<int64_t>(sizeof(T)); }
  T* data() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  struct Free {
    void operator()(void* bytes) const { std::free(bytes); }
  };
  static constexpr uintptr_t kLine = 64;
  static constexpr int64_t kSpare = (kLine + sizeof(T) - 1) / sizeof(T);  // elements of a line

  int64_t size_;
  std::unique_ptr<void, Free> bytes_;
  T* data_;
};

}  // namespace tpu_embed

#endif  // TPU_EMBED_MEMORY_H_
