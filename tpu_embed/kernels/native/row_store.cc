#include "row_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <mutex>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>

#include "threads.h"

namespace tpu_embed {
namespace {

constexpr int64_t kFirstBytes = int64_t{1} << 16;
constexpr int64_t kSegmentBytes = int64_t{1} << 24;  // of a full segment
constexpr int64_t kLeastRows = 4096;                 // of a full segment
constexpr int64_t kRowsPerTask = 2048;
constexpr int64_t kAhead = 16;  // how many ids ahead memory is asked for

// Gives a file bytes that a full disk cannot take away again.
int extend(int file, int64_t offset, int64_t bytes) {
#ifdef __APPLE__
  fstore_t wanted = {F_ALLOCATEALL, F_PEOFPOSMODE, 0, bytes, 0};
  if (fcntl(file, F_PREALLOCATE, &wanted) == -1) return errno;
  return ftruncate(file, offset + bytes) == -1 ? errno : 0;
#else
  return posix_fallocate(file, offset, bytes);
#endif
}

// Calls run(begin, end) for parts of [0, n) on several threads; asks for no memory that it needs.
template <typename Run>
void in_tasks(int64_t n, const Run& run) {
  const int64_t tasks = (n + kRowsPerTask - 1) / kRowsPerTask;
  const auto task = [&](int64_t i) {
    run(i * kRowsPerTask, std::min(n, (i + 1) * kRowsPerTask));
  };
  const int64_t threads = std::max(1u, std::thread::hardware_concurrency());
  run_on_threads(tasks, threads, std::ref(task));  // a reference fits into a std::function
}

}  // namespace

Segment::Segment(int file, int64_t offset, int64_t bytes) : bytes_(bytes) {
  if (file >= 0) {
    if (const int error = extend(file, offset, bytes)) {
      throw std::system_error(error, std::generic_category());
    }
  }
  const int kind = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kind, file, file < 0 ? 0 : offset);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  begin_ = static_cast<char*>(memory);
  if (file < 0) ask_for_large_pages(begin_, bytes);
}

Segment::~Segment() {
  if (begin_) munmap(begin_, bytes_);
}

RowStore::RowStore(const int64_t* widths, int64_t fields, int file)
    : widths_(widths, widths + fields),
      row_width_(std::accumulate(widths, widths + fields, int64_t{0})),
      file_(file),
      parts_(kParts) {
  // A file is mapped by whole pages, so every segment of one has whole pages.
  const int64_t page = file < 0 ? 1 : sysconf(_SC_PAGESIZE);
  const auto bytes = [this](int64_t shift) { return row_width_ << shift; };
  first_shift_ = 0;
  while (bytes(first_shift_ + 1) <= kFirstBytes || bytes(first_shift_) % page) ++first_shift_;
  shift_ = first_shift_;
  while (bytes(shift_ + 1) <= kSegmentBytes || (int64_t{1} << shift_) < kLeastRows) ++shift_;
  mask_ = (int64_t{1} << shift_) - 1;
  doublings_ = shift_ - first_shift_;
}

RowStore::~RowStore() {
  segments_.clear();
  if (file_ >= 0) close(file_);
}

int64_t RowStore::size() const {
  std::shared_lock lock(mutex_);
  return top_ - static_cast<int64_t>(free_.size());
}

int64_t RowStore::places() const {
  std::shared_lock lock(mutex_);
  return top_;
}

int64_t RowStore::index_bytes() const {
  std::shared_lock lock(mutex_);
  int64_t bytes = free_.capacity() * sizeof(uint32_t);
  for (const Part& part : parts_) bytes += part.index.bytes();
  for (const Heads& heads : heads_) bytes += heads.ids.bytes() + heads.marks.bytes();
  return bytes;
}

int64_t RowStore::row_bytes() const {
  std::shared_lock lock(mutex_);
  return begin_of(segments()) * row_width_;
}

// Finds the place of each id, -1 for none; several ids are on their way at once.
void RowStore::places_of(const uint64_t* ids, int64_t n, int64_t* places) const {
  const auto key_at = [this](int64_t place) { return id_at(place); };
  in_tasks(n, [&](int64_t begin, int64_t end) {
    uint64_t hashes[2 * kAhead];
    const auto hash_and_ask = [&](int64_t i) {
      const uint64_t hash = hashes[i % (2 * kAhead)] = hash_of(ids[i]);
      part_of(hash).index.prefetch(hash);
    };
    const auto ask_for_id = [&](int64_t i) {
      const uint64_t hash = hashes[i % (2 * kAhead)];
      const int64_t place = part_of(hash).index.guess(hash);
      if (place >= 0) __builtin_prefetch(&id_at(place));
    };
    for (int64_t i = begin; i < end + 2 * kAhead - 1; ++i) {
      if (i < end) hash_and_ask(i);
      if (i - kAhead >= begin && i - kAhead < end) ask_for_id(i - kAhead);
      if (const int64_t j = i - 2 * kAhead + 1; j >= begin && j < end) {
        const uint64_t hash = hashes[j % (2 * kAhead)];
        places[j] = part_of(hash).index.find(ids[j], hash, key_at);
      }
    }
  });
}

// Calls copy(i, row) for the place of every i that has one, on several threads.
template <typename Copy>
void RowStore::for_each_row(const int64_t* places, int64_t n, const Copy& copy) const {
  in_tasks(n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end && places[i + kAhead] >= 0) {
        const char* row = row_at(places[i + kAhead]);
        for (int64_t byte = 0; byte < row_width_; byte += 64) __builtin_prefetch(row + byte);
      }
      if (places[i] >= 0) copy(i, row_at(places[i]));
    }
  });
}

// Gets the memory for more rows, whatever their parts; no row changes.
void RowStore::reserve(int64_t more) {
  const int64_t needed = top_ + more - static_cast<int64_t>(free_.size());
  while (begin_of(segments()) < needed) {
    const int64_t begin = begin_of(segments()), rows = begin_of(segments() + 1) - begin;
    heads_.reserve(heads_.size() + 1);
    Heads heads(rows);
    segments_.emplace_back(file_, begin * row_width_, rows * row_width_);
    heads_.push_back(std::move(heads));
  }
}

// Makes sure that a part's index has slots for more ids, at places below a number.
void RowStore::make_room(Part& part, int64_t more, int64_t places) {
  int64_t slots = part.slots;
  while (4 * (part.size + more) > 3 * slots) slots = std::max<int64_t>(8, slots + slots / 2);
  if (slots == part.slots && static_cast<uint64_t>(places) <= part.positions) return;
  // Twice the places of now: an index is not made anew for each segment.
  make_index(part, slots, std::min<uint64_t>(kMostRows, 2 * (places + mask_)));
}

void RowStore::make_index(Part& part, int64_t slots, uint64_t positions) {
  KeyIndex larger(slots, positions);
  part.index.for_each([&](int64_t at) { larger.insert(hash_of(id_at(at)), at); });
  part.index = std::move(larger);
  part.slots = slots;
  part.positions = positions;
}

// Gives an id a place; there is room.
void RowStore::insert(uint64_t id, int64_t place) {
  const uint64_t hash = hash_of(id);
  Part& part = part_of(hash);
  id_at(place) = id;
  part.index.insert(hash, place);
  ++part.size;
}

void RowStore::erase(uint64_t id, int64_t place) {
  const uint64_t hash = hash_of(id);
  Part& part = part_of(hash);
  const auto key_at = [this](int64_t at) { return id_at(at); };
  part.index.erase(hash, place, key_at);
  --part.size;
}

int64_t RowStore::free_place() {
  if (free_.empty()) return top_++;
  const int64_t place = free_.back();
  free_.pop_back();
  return place;
}

void RowStore::write(const uint64_t* ids, int64_t n, const char* const* fields, const int64_t* at,
                     uint32_t mark) {
  std::vector<int64_t> places(n);
  {
    std::unique_lock lock(mutex_);
    places_of(ids, n, places.data());
    // All memory is asked for first, so nothing has to be taken back.
    std::vector<int64_t> in_part(kParts, 0);
    int64_t more = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (places[i] >= 0) continue;
      ++in_part[hash_of(ids[i]) % kParts];
      ++more;
    }
    if (top_ + more > kMostRows) throw std::bad_alloc();
    reserve(more);
    for (int64_t part = 0; part < kParts; ++part) {
      if (in_part[part]) make_room(parts_[part], in_part[part], top_ + more);
    }
    for (int64_t i = 0; i < n; ++i) {
      if (places[i] < 0) insert(ids[i], places[i] = free_place());
    }
    for (int64_t i = 0; i < n; ++i) mark_at(places[i]) = mark;
  }
  std::shared_lock lock(mutex_);
  for_each_row(places.data(), n, [&](int64_t i, char* row) {
    const int64_t place = at ? at[i] : i;
    for (size_t f = 0; f < widths_.size(); row += widths_[f++]) {
      std::memcpy(row, fields[f] + place * widths_[f], widths_[f]);
    }
  });
}

void RowStore::read(const uint64_t* ids, int64_t n, char* const* fields, const int64_t* at,
                    bool* found) const {
  std::vector<int64_t> places(n);
  std::shared_lock lock(mutex_);
  places_of(ids, n, places.data());
  for_each_row(places.data(), n, [&](int64_t i, const char* row) {
    const int64_t place = at ? at[i] : i;
    for (size_t f = 0; f < widths_.size(); row += widths_[f++]) {
      std::memcpy(fields[f] + place * widths_[f], row, widths_[f]);
    }
  });
  for (int64_t i = 0; i < n; ++i) found[i] = places[i] >= 0;
}

void RowStore::find(const uint64_t* ids, int64_t n, bool* found) const {
  std::vector<int64_t> places(n);
  std::shared_lock lock(mutex_);
  places_of(ids, n, places.data());
  for (int64_t i = 0; i < n; ++i) found[i] = places[i] >= 0;
}

int64_t RowStore::remove(const uint64_t* ids, int64_t n) {
  std::unique_lock lock(mutex_);
  const auto key_at = [this](int64_t place) { return id_at(place); };
  free_.reserve(free_.size() + std::min(n, top_));
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = hash_of(ids[i]);
    const int64_t place = part_of(hash).index.find(ids[i], hash, key_at);
    if (place < 0) continue;
    erase(ids[i], place);
    mark_at(place) = 0;
    free_.push_back(static_cast<uint32_t>(place));
    ++count;
  }
  return count;
}

int64_t RowStore::list(uint32_t mark, uint64_t* ids, int64_t most) const {
  std::shared_lock lock(mutex_);
  int64_t count = 0;
  for (int64_t place = 0; place < top_; ++place) {
    const uint32_t has = mark_at(place);
    if (has == 0 || has < mark) continue;
    if (count < most) ids[count] = id_at(place);
    ++count;
  }
  return count;
}

void RowStore::compact() {
  std::unique_lock lock(mutex_);
  // Places 0 … 5 with 1 and 3 free: 5 moves to 1, 4 to 3, and 4 places are left.
  std::sort(free_.begin(), free_.end());
  size_t lowest = 0, highest = free_.size();
  while (lowest < highest) {
    const int64_t last = top_ - 1;
    if (free_[highest - 1] == last) {
      --highest;
    } else {
      const int64_t place = free_[lowest++];
      const uint64_t id = id_at(last);
      erase(id, last);
      std::memcpy(row_at(place), row_at(last), row_width_);
      mark_at(place) = mark_at(last);
      insert(id, place);
    }
    mark_at(last) = 0;
    top_ = last;
  }
  free_ = {};
  while (!segments_.empty() && begin_of(segments() - 1) >= top_) {
    segments_.pop_back();
    heads_.pop_back();
  }
  for (Part& part : parts_) {
    make_index(part, std::max<int64_t>(8, part.size + part.size / 2), part.positions);
  }
  // A file that stays long takes room on the disk, but no row is lost.
  if (file_ >= 0 && ftruncate(file_, begin_of(segments()) * row_width_) == -1) return;
}

}  // namespace tpu_embed
