// Keys that wait for a row, in the order in which they were first counted.
#ifndef TPU_EMBED_WAITING_KEYS_H_
#define TPU_EMBED_WAITING_KEYS_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "key_index.h"
#include "memory.h"

namespace tpu_embed {

// A queue of keys in a ring, and an index of their positions. A key that gets a row leaves a hole:
// its count is zero. Holes are given up when the first key of the ring moves on, or when the ring
// is written anew.
//
// With `begin` at 2, a ring of 8 may look like this after key 9 got a row:
//
//     position   0  1  2  3  4  5  6  7
//     key        -  -  7  9  4  8  -  -      keys in order: 7 4 8; the next one goes to 6
//     count      -  -  1  0  3  1  -  -
//
// What a step changes is logged, as the count there was before. A hole of which the log tells
// stays, with its key, so that an undone step puts the key back into its place.
class WaitingKeys {
  auto key_at() const {
    return [this](int64_t position) { return keys_[position]; };
  }

 public:
  // Args: how many keys are to wait at most; the ring is never made much larger.
  explicit WaitingKeys(int64_t bound) : bound_(bound) {}

  int64_t size() const { return live_; }
  int64_t bytes() const {
    int64_t log = 0;
    for (const Step& step : log_) log += static_cast<int64_t>(step.capacity() * sizeof(Change));
    return keys_.bytes() + counts_.bytes() + index_.bytes() + log;
  }

  // Returns how many changes the log has.
  int64_t changes() const {
    int64_t n = 0;
    for (const Step& step : log_) n += static_cast<int64_t>(step.size());
    return n;
  }

  void prefetch(uint64_t hash) const { index_.prefetch(hash); }
  void prefetch_key(uint64_t hash) const {
    const int64_t position = index_.guess(hash);
    if (position == KeyIndex::kNone) return;
    __builtin_prefetch(&keys_[position]);
    __builtin_prefetch(&counts_[position]);
  }

  // Returns the position of a key, or KeyIndex::kNone.
  int64_t find(uint64_t key, uint64_t hash) const { return index_.find(key, hash, key_at()); }

  uint32_t count(int64_t position) const { return counts_[position]; }

  // Begins a step that counts at most n keys: only this can fail, for want of memory.
  void begin_step(int64_t n) {
    Step step;
    step.reserve(n + std::max<int64_t>(0, live_ + n - bound_));
    if (span_ + n > size_of_ring()) drop_holes();
    if (span_ + n > size_of_ring()) write_anew(n);
    log_.push_back(std::move(step));
  }

  // Counts a key that waits already, or one more.
  void count_again(int64_t position) { set_count(position, counts_[position] + 1); }
  void add(uint64_t key, uint64_t hash) {
    const int64_t position = behind(begin_, span_++);
    keys_[position] = key;
    index_.insert(hash, position);
    ++live_;
    set_count(position, 1);
  }

  void remove(int64_t position, uint64_t hash) {
    index_.erase(hash, position, key_at());
    --live_;
    set_count(position, 0);
  }

  // Removes the key that was first counted longest ago; there is one.
  void remove_first() {
    pass_holes();
    const int64_t position = behind(begin_, first_);
    remove(position, hash_of(keys_[position]));
  }

  void undo_step() {
    Step& step = log_.back();
    for (auto change = step.rbegin(); change != step.rend(); ++change) {
      const uint32_t count = counts_[change->position];
      const uint64_t key = keys_[change->position], hash = hash_of(key);
      if (change->count == 0) {  // it was added, as the last one
        index_.erase(hash, change->position, key_at());
        --live_;
        --span_;
      } else if (count == 0) {  // it was removed
        index_.insert(hash, change->position);
        ++live_;
      }
      counts_[change->position] = change->count;
    }
    log_.pop_back();
    first_ = 0;
  }

  void forget_step() { log_.pop_front(); }

  // Calls visit(key, count) for every key in order, as they were before the last `steps` steps.
  template <typename Visit>
  void visit_before(int64_t steps, const Visit& visit) const {
    std::vector<Change> before;  // of each position that was changed, the oldest entry, by offset
    for (auto step = log_.end() - steps; step != log_.end(); ++step) {
      for (const Change& change : *step) before.push_back({offset(change.position), change.count});
    }
    std::stable_sort(before.begin(), before.end(), [](const Change& a, const Change& b) {
      return a.position < b.position;
    });
    auto next = before.begin();
    for (int64_t i = 0; i < span_; ++i) {
      const int64_t position = behind(begin_, i);
      uint32_t count = counts_[position];
      if (next != before.end() && next->position == i) count = next->count;
      while (next != before.end() && next->position == i) ++next;
      if (count) visit(keys_[position], count);
    }
  }

  // Adds a key with its count, not logged; `reserve` makes room for n.
  void reserve(int64_t n) { write_anew(n); }
  void load(uint64_t key, uint32_t count) {
    const int64_t position = behind(begin_, span_++);
    keys_[position] = key;
    counts_[position] = count;
    index_.insert(hash_of(key), position);
    ++live_;
  }

 private:
  struct Change {
    uint32_t position;
    uint32_t count;  // before
  };
  using Step = std::vector<Change>;

  static constexpr uint32_t kDropped = std::numeric_limits<uint32_t>::max();
  static constexpr int64_t kMaxRing = std::numeric_limits<uint32_t>::max() - 1;

  int64_t size_of_ring() const { return keys_.size(); }
  int64_t behind(int64_t position, int64_t n) const {
    const int64_t at = position + n;
    return at < size_of_ring() ? at : at - size_of_ring();
  }
  uint32_t offset(int64_t position) const {
    return static_cast<uint32_t>(position >= begin_ ? position - begin_
                                                    : position - begin_ + size_of_ring());
  }
  void set_count(int64_t position, uint32_t count) {
    log_.back().push_back({static_cast<uint32_t>(position), counts_[position]});
    counts_[position] = count;
  }

  void pass_holes() {
    while (first_ < span_ && counts_[behind(begin_, first_)] == 0) ++first_;
  }

  // Moves the beginning over the holes that no undone step could fill.
  void drop_holes() {
    pass_holes();
    int64_t gone = first_;
    for (const Step& step : log_) {
      for (const Change& change : step) {
        if (counts_[change.position]) continue;
        gone = std::min<int64_t>(gone, offset(change.position));
      }
    }
    begin_ = behind(begin_, gone);
    span_ -= gone;
    first_ -= gone;
  }

  // Writes the keys, and the holes that an undone step could fill, into a ring with room for n
  // more.
  void write_anew(int64_t n) {
    std::vector<uint32_t> moved(size_of_ring(), kDropped);
    for (const Step& step : log_) {
      for (const Change& change : step) moved[change.position] = 0;
    }
    const auto stays = [&](int64_t p) { return counts_[p] != 0 || moved[p] != kDropped; };
    int64_t kept = 0;
    for (int64_t i = 0; i < span_; ++i) kept += stays(behind(begin_, i));
    // One eighth of holes: they are written anew once for eight keys that left, and with 12 bytes
    // in the ring and 4 * 4 / 3 in the index, a key takes less than 20.
    const int64_t needed = kept + n, at_most = std::min(2 * size_of_ring(), bound_ + bound_ / 8);
    const int64_t size = std::max(needed + needed / 8, at_most) + 8;
    if (size > kMaxRing) throw std::bad_alloc();
    Zeros<uint64_t> keys(size);
    Zeros<uint32_t> counts(size);
    KeyIndex index(size + size / 3 + 1, size);
    int64_t to = 0;
    for (int64_t i = 0; i < span_; ++i) {
      const int64_t from = behind(begin_, i);
      if (!stays(from)) continue;
      keys[to] = keys_[from];
      counts[to] = counts_[from];
      if (counts[to]) index.insert(hash_of(keys[to]), to);
      moved[from] = static_cast<uint32_t>(to++);
    }
    for (Step& step : log_) {
      for (Change& change : step) change.position = moved[change.position];
    }
    keys_ = std::move(keys);
    counts_ = std::move(counts);
    index_ = std::move(index);
    begin_ = first_ = 0;
    span_ = kept;
  }

  const int64_t bound_;
  Zeros<uint64_t> keys_;    // [size of the ring]
  Zeros<uint32_t> counts_;  // [size of the ring]
  KeyIndex index_;
  int64_t begin_ = 0;  // the position at which the ring begins
  int64_t span_ = 0;   // keys and holes in it
  int64_t first_ = 0;  // of those the first that may be a key
  int64_t live_ = 0;   // keys
  std::deque<Step> log_;
};

}  // namespace tpu_embed

#endif  // TPU_EMBED_WAITING_KEYS_H_
