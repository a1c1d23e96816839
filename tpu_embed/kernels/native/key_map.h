// A map from keys to rows that learns new keys and forgets old ones.
#ifndef TPU_EMBED_KEY_MAP_H_
#define TPU_EMBED_KEY_MAP_H_

#include <array>
#include <cstdint>
#include <deque>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "free_rows.h"
#include "key_index.h"
#include "row_order.h"
#include "waiting_keys.h"

namespace tpu_embed {

enum class Evict : int64_t { kLru, kLfu, kNone };

// As `vocabulary_reference.Options` describes them; ttl is -1 where rows do not expire.
struct MapOptions {
  int64_t num_rows;
  int64_t admit_after;
  Evict evict;
  int64_t ttl;
  int64_t waiting;
  int64_t lookahead;
};

enum Counter { kAdmitted, kEvicted, kExpired, kUnseen, kForgotten, kCounters };
using Counters = std::array<int64_t, kCounters>;

// Why a batch does not fit: a row without a key, or an unknown key that is known.
struct Conflict {
  enum Kind : int64_t { kNothing, kRow, kKey } kind = kNothing;
  uint64_t number = 0;
};

// The arrays of `vocabulary_reference.MapState`.
struct StateArrays {
  uint64_t* keys;
  int64_t* rows;
  int64_t* last_seen;
  int64_t* batches_seen;
  uint64_t* waiting_keys;
  int64_t* waiting_counts;
};

// Does what `vocabulary_reference.KeyMap` does, in time that follows the batch. `find` may be
// called while another thread calls another function; of those, one at a time.
//
// A function that changes the map first asks for all the memory it needs, which may throw
// std::bad_alloc; from then on it cannot fail.
class KeyMap {
 public:
  explicit KeyMap(const MapOptions& options);

  // Gives a new map a state of n keys and w waiting keys.
  void load(const StateArrays& from, int64_t n, int64_t w, int64_t step, const Counters& counters);

  void find(const uint64_t* keys, int64_t n, int64_t* found) const;

  // Takes a batch of k rows of known keys and m unknown keys; writes the rows of the latter. With
  // `at_once` unknown keys are admitted whatever `admit_after` says.
  Conflict take(const int64_t* known, int64_t k, const uint64_t* unknown, int64_t m, bool at_once,
                int64_t* found);

  // What the last batch did.
  const std::vector<uint64_t>& new_keys() const { return new_keys_; }
  const std::vector<int64_t>& new_rows() const { return new_rows_; }
  const std::vector<int64_t>& evicted_rows() const { return evicted_rows_; }
  const std::vector<uint64_t>& evicted_keys() const { return evicted_keys_; }
  int64_t unseen() const { return counters_[kUnseen] - log_.back().counters[kUnseen]; }

  // Undoes the batches after a step that the log reaches.
  void rewind(int64_t step);

  // Drops the log of the batches up to a step.
  void forget(int64_t step);

  int64_t step() const { return step_; }
  int64_t earliest() const { return step_ - static_cast<int64_t>(log_.size()); }
  int64_t size() const { return size_; }
  const Counters& counters(int64_t step) const;
  int64_t bytes() const;

  // Returns no less than the keys with a row, and the waiting keys, after any step of the log.
  std::pair<int64_t, int64_t> most_keys() const;

  // Writes the state after a step that the log reaches; returns how many keys it has of each kind.
  std::pair<int64_t, int64_t> state(int64_t step, const StateArrays& to) const;

 private:
  // What the log keeps of a row: how it was.
  struct Numbers {
    uint64_t key;
    uint32_t row, last, seen;
  };

  struct Step {
    Counters counters;  // before it
    std::vector<Numbers> rows;
  };

  // The batch that is being taken.
  struct Batch {
    std::vector<uint32_t> known;     // distinct rows, ascending
    std::vector<uint64_t> keys;      // distinct unknown keys, in order
    std::vector<uint64_t> hashes;    // of these
    std::vector<int64_t> rows;       // of these
    std::vector<uint32_t> number;    // of each unknown key, its number among the distinct ones
    std::vector<uint32_t> new_rows;  // ascending
    int64_t admit_after;             // 1 if the keys are admitted at once
  };

  // Keeps `find` out while it lives.
  class Changing {
   public:
    explicit Changing(const KeyMap& map) : queue_(map.queue_), lock_(map.mutex_) {}

   private:
    const std::lock_guard<std::mutex> queue_;
    const std::lock_guard<std::shared_mutex> lock_;
  };

  auto key_at() const {
    return [this](int64_t row) { return rows_[row].key; };
  }
  Numbers numbers(uint32_t row) const {
    return {rows_[row].key, row, rows_[row].last, rows_[row].seen};
  }

  // Calls visit(i, hash, row) for every key; the row of an unknown one is -1.
  template <typename Visit>
  void find_each(const uint64_t* keys, int64_t n, const Visit& visit) const;

  // The parts of `take`, in order.
  Conflict read_known(const int64_t* known, int64_t k);
  Conflict read_unknown(const uint64_t* unknown, int64_t m);
  void begin_step();
  void see_known();
  void expire();
  void count_unknown();
  void end_step();

  uint32_t first_victim();
  void foresee_victims();
  void foresee_one_more(uint32_t list);
  void put_in_order();
  void prefetch(uint32_t row) const;
  void prefetch_neighbours(uint32_t row) const;
  uint32_t expires_before(int64_t step) const;
  int64_t count(uint64_t key, uint64_t hash);
  uint32_t find_room();
  void admit(uint64_t key, uint64_t hash, uint32_t row);
  void release(uint32_t row);
  void put(const Numbers& numbers);

  const MapOptions options_;
  const bool has_counts_, has_ages_;  // which orders are kept
  int64_t step_ = 0;
  int64_t size_ = 0;
  Counters counters_{};
  Rows rows_;
  KeyIndex index_;
  FreeRows free_;
  AgeOrder ages_;
  CountOrder counts_;
  bool in_order_ = true;  // else the orders are made anew before they are used
  WaitingKeys waiting_;
  std::deque<Step> log_;
  Batch batch_;
  std::vector<Numbers> spare_;  // memory for the log of a step
  // For each list of `ages_`, a row that is evicted some evictions later; with `lfu` only [0]. Set
  // by `foresee_victims`.
  std::array<uint32_t, AgeOrder::kLists> victims_next_;
  std::vector<uint64_t> new_keys_, evicted_keys_;
  std::vector<int64_t> new_rows_, evicted_rows_;
  mutable std::mutex queue_;
  mutable std::shared_mutex mutex_;
};

}  // namespace tpu_embed

#endif  // TPU_EMBED_KEY_MAP_H_
