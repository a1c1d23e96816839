// What `KeyMap` finds, and what it does with a batch.
#include "key_map.h"

#include <algorithm>
#include <functional>
#include <new>
#include <thread>
#include <utility>

#include "sort.h"
#include "threads.h"

namespace tpu_embed {
namespace {

constexpr int64_t kBlock = 32;  // keys whose slots are asked for at once
constexpr int64_t kKeysPerTask = 4096;  // a thread costs as much as some thousand keys
constexpr int64_t kQuickSort = 1024;    // rows for which a radix sort is worth its counters
constexpr size_t kAhead = 8;    // rows whose memory is asked for in advance

struct RowEntry {
  using Key = uint32_t;
  Key key;
};

// Sorts rows; without memory for the quick way, in place.
void sort_rows(std::vector<uint32_t>& rows, int64_t num_rows) {
  const auto n = static_cast<int64_t>(rows.size());
  if (n >= kQuickSort) {
    try {
      Serial serial;
      RadixSort<RowEntry, Serial> sort(serial, n, static_cast<uint64_t>(num_rows));
      for (int64_t i = 0; i < n; ++i) sort.entries()[i].key = rows[i];
      const RowEntry* sorted = sort.sort();
      for (int64_t i = 0; i < n; ++i) rows[i] = sorted[i].key;
      return;
    } catch (const std::bad_alloc&) {  // the step has begun, so it must not fail
    }
  }
  std::sort(rows.begin(), rows.end());
}

template <typename T>
int64_t bytes_of(const std::vector<T>& vector) {
  return static_cast<int64_t>(vector.capacity() * sizeof(T));
}

}  // namespace

KeyMap::KeyMap(const MapOptions& options)
    : options_(options),
      has_counts_(options.evict == Evict::kLfu),
      has_ages_(options.evict != Evict::kLfu || options.ttl >= 0),
      rows_(options.num_rows),
      index_(2 * options.num_rows + 1, options.num_rows),
      free_(options.num_rows),
      counts_(has_counts_ ? options.num_rows : 0),
      waiting_(options.waiting) {}

// -- Finding --------------------------------------------------------------------------------------

template <typename Visit>
void KeyMap::find_each(const uint64_t* keys, int64_t n, const Visit& visit) const {
  static_assert(KeyIndex::kNone == -1);
  uint64_t hashes[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t size = std::min(kBlock, n - begin);
    for (int64_t i = 0; i < size; ++i) {
      hashes[i] = hash_of(keys[begin + i]);
      index_.prefetch(hashes[i]);
    }
    for (int64_t i = 0; i < size; ++i) {
      const int64_t row = index_.guess(hashes[i]);
      if (row != KeyIndex::kNone) __builtin_prefetch(&rows_[row]);
    }
    for (int64_t i = 0; i < size; ++i) {
      visit(begin + i, hashes[i], index_.find(keys[begin + i], hashes[i], key_at()));
    }
  }
}

void KeyMap::find(const uint64_t* keys, int64_t n, int64_t* found) const {
  // Those who wait to change the map go first: lookups that overlap could keep them out for long.
  { std::lock_guard<std::mutex> queue(queue_); }
  std::shared_lock<std::shared_mutex> lock(mutex_);
  const int64_t tasks = (n + kKeysPerTask - 1) / kKeysPerTask;
  const auto run = [&](int64_t task) {
    const int64_t begin = task * kKeysPerTask, size = std::min(n - begin, kKeysPerTask);
    find_each(keys + begin, size, [&](int64_t i, uint64_t, int64_t row) { found[begin + i] = row; });
  };
  // A reference fits into a std::function without memory of its own, so this cannot fail.
  run_on_threads(tasks, std::max(1u, std::thread::hardware_concurrency()), std::ref(run));
}

// -- A batch --------------------------------------------------------------------------------------

Conflict KeyMap::take(const int64_t* known, int64_t k, const uint64_t* unknown, int64_t m,
                      bool at_once, int64_t* found) {
  Conflict conflict = read_known(known, k);
  if (conflict.kind == Conflict::kNothing) conflict = read_unknown(unknown, m);
  if (conflict.kind != Conflict::kNothing) return conflict;
  const Changing changing(*this);
  batch_.admit_after = at_once ? 1 : options_.admit_after;
  begin_step();
  see_known();
  expire();
  count_unknown();
  end_step();
  for (int64_t i = 0; i < m; ++i) found[i] = batch_.rows[batch_.number[i]];
  return conflict;
}

// Sorts the distinct rows of known keys.
Conflict KeyMap::read_known(const int64_t* known, int64_t k) {
  Serial serial;
  RadixSort<RowEntry, Serial> sort(serial, k, options_.num_rows);
  bool strange = false;
  for (int64_t i = 0; i < k; ++i) {
    strange |= known[i] < 0 || known[i] >= options_.num_rows;
    sort.entries()[i].key = static_cast<uint32_t>(known[i]);
  }
  const RowEntry* sorted = strange ? nullptr : sort.sort();
  batch_.known.clear();
  for (int64_t i = 0; sorted && i < k; ++i) {
    const int64_t ahead = i + static_cast<int64_t>(kAhead);
    if (ahead < k) __builtin_prefetch(&rows_[sorted[ahead].key]);
    if (i > 0 && sorted[i].key == sorted[i - 1].key) continue;
    strange |= rows_[sorted[i].key].seen == 0;
    batch_.known.push_back(sorted[i].key);
  }
  if (!strange) return {};
  const int64_t* first = std::find_if(known, known + k, [this](int64_t row) {
    return row < 0 || row >= options_.num_rows || rows_[row].seen == 0;
  });
  return {Conflict::kRow, static_cast<uint64_t>(*first)};
}

// Numbers the distinct unknown keys.
Conflict KeyMap::read_unknown(const uint64_t* unknown, int64_t m) {
  Conflict conflict;
  KeyIndex numbers(2 * m + 1, m);
  batch_.keys.clear();
  batch_.hashes.clear();
  batch_.number.clear();
  const auto key_of = [this](int64_t number) { return batch_.keys[number]; };
  find_each(unknown, m, [&](int64_t i, uint64_t hash, int64_t row) {
    if (row >= 0 && conflict.kind == Conflict::kNothing) conflict = {Conflict::kKey, unknown[i]};
    int64_t number = numbers.find(unknown[i], hash, key_of);
    if (number == KeyIndex::kNone) {
      number = static_cast<int64_t>(batch_.keys.size());
      numbers.insert(hash, number);
      batch_.keys.push_back(unknown[i]);
      batch_.hashes.push_back(hash);
    }
    batch_.number.push_back(static_cast<uint32_t>(number));
  });
  return conflict;
}

// Asks for all the memory of a step, and begins it.
void KeyMap::begin_step() {
  if (!in_order_) put_in_order();
  const size_t distinct = batch_.keys.size();
  // At most so many, as some of them may be in the batch.
  const size_t expired = ages_.count_before(rows_, expires_before(step_ + 1));
  new_keys_.clear();
  new_rows_.clear();
  evicted_rows_.clear();
  evicted_keys_.clear();
  new_keys_.reserve(distinct);
  new_rows_.reserve(distinct);
  evicted_rows_.reserve(expired + distinct);
  evicted_keys_.reserve(expired + distinct);
  batch_.rows.resize(distinct);
  batch_.new_rows.reserve(distinct);
  if (has_counts_) counts_.begin_step();
  // Reuse the memory of a forgotten step: new memory comes from the system, which must clear it.
  const size_t changes = batch_.known.size() + expired + distinct;
  Step step{counters_, std::exchange(spare_, {})};
  if (step.rows.capacity() > 2 * changes) step.rows = std::vector<Numbers>();
  step.rows.clear();
  step.rows.reserve(changes);
  log_.push_back(std::move(step));
  try {
    waiting_.begin_step(static_cast<int64_t>(distinct));
  } catch (...) {
    log_.pop_back();
    throw;
  }
  ++step_;
}

// Takes the rows of known keys out of their order of age, and moves their scores.
void KeyMap::see_known() {
  const std::vector<uint32_t>& known = batch_.known;
  for (size_t i = 0; i < known.size(); ++i) {
    if (i + 2 * kAhead < known.size()) prefetch(known[i + 2 * kAhead]);
    if (i + kAhead < known.size()) prefetch_neighbours(known[i + kAhead]);
    const uint32_t row = known[i];
    log_.back().rows.push_back(numbers(row));
    if (has_ages_) ages_.remove(rows_, row);
    rows_[row].last = static_cast<uint32_t>(step_);
    ++rows_[row].seen;
    if (has_counts_) counts_.move_on(rows_, row);
  }
  if (has_counts_) counts_.look_from_the_beginning();
}

// Frees the rows whose ttl has passed.
void KeyMap::expire() {
  const uint32_t limit = expires_before(step_);
  for (uint32_t row; (row = ages_.first(rows_)) != kNoRow && rows_[row].last < limit;) {
    release(row);
    free_.add(row);
    ++counters_[kExpired];
  }
}

// Counts the unknown keys, and admits those that are due while there are rows.
void KeyMap::count_unknown() {
  foresee_victims();
  for (size_t i = 0; i < batch_.keys.size(); ++i) {
    if (i + 2 * kAhead < batch_.keys.size()) waiting_.prefetch(batch_.hashes[i + 2 * kAhead]);
    if (i + kAhead < batch_.keys.size()) {
      index_.prefetch(batch_.hashes[i + kAhead]);
      waiting_.prefetch_key(batch_.hashes[i + kAhead]);
    }
    batch_.rows[i] = count(batch_.keys[i], batch_.hashes[i]);
  }
}

// Returns the row of a key that has just been counted, or -1.
int64_t KeyMap::count(uint64_t key, uint64_t hash) {
  const int64_t position = waiting_.size() ? waiting_.find(key, hash) : KeyIndex::kNone;
  const bool waits = position != KeyIndex::kNone;
  const int64_t batches = 1 + (waits ? waiting_.count(position) : 0);
  const uint32_t row = batches < batch_.admit_after ? kNoRow : find_room();
  if (row == kNoRow) {
    ++counters_[kUnseen];
    waits ? waiting_.count_again(position) : waiting_.add(key, hash);
    return -1;
  }
  if (waits) waiting_.remove(position, hash);
  admit(key, hash, row);
  return row;
}

// Returns the lowest free row, else the row of the key of the lowest score, if it is not protected.
uint32_t KeyMap::find_room() {
  const int64_t free = free_.lowest();
  if (free >= 0) {
    free_.remove(free);
    log_.back().rows.push_back(numbers(static_cast<uint32_t>(free)));
    return static_cast<uint32_t>(free);
  }
  const uint32_t row = first_victim();
  if (row == kNoRow) return kNoRow;
  foresee_one_more(has_counts_ ? 0 : AgeOrder::list_of(row));
  release(row);
  ++counters_[kEvicted];
  return row;
}

// Returns the row of the key of the lowest score, if it is not protected.
uint32_t KeyMap::first_victim() {
  if (options_.evict == Evict::kNone) return kNoRow;
  const auto kept_from = static_cast<uint32_t>(std::max<int64_t>(0, step_ - options_.lookahead));
  if (has_counts_) return counts_.first_before(rows_, kept_from);
  const uint32_t row = ages_.first(rows_);
  return row == kNoRow || rows_[row].last >= kept_from ? kNoRow : row;
}

void KeyMap::foresee_victims() {
  victims_next_.fill(kNoRow);
  const auto admitted = static_cast<int64_t>(batch_.keys.size());
  if (size_ + admitted <= options_.num_rows) return;  // there are free rows for all
  const uint32_t first = first_victim();
  if (first == kNoRow) return;  // nothing can be evicted
  const uint32_t lists = has_counts_ ? 1 : AgeOrder::kLists;
  for (uint32_t list = 0; list < lists; ++list) {
    victims_next_[list] = has_counts_ ? first : ages_.first_of(list);
  }
  for (size_t i = 0; i < kAhead; ++i) foresee_one_more(i % lists);
}

// Asks for the memory of one more row of a list, and of where the key of the one before it stands.
void KeyMap::foresee_one_more(uint32_t list) {
  const uint32_t row = victims_next_[list];
  if (row == kNoRow) return;
  index_.prefetch(hash_of(rows_[row].key));
  const uint32_t next = has_counts_ ? rows_[row].same.after : rows_[row].age.after;
  if (next != kNoRow) prefetch(next);
  victims_next_[list] = next;
}

// Takes a row from its key.
void KeyMap::release(uint32_t row) {
  log_.back().rows.push_back(numbers(row));
  evicted_rows_.push_back(row);
  evicted_keys_.push_back(rows_[row].key);
  index_.erase(hash_of(rows_[row].key), row, key_at());
  if (has_ages_) ages_.remove(rows_, row);
  if (has_counts_) counts_.remove(rows_, row);
  rows_[row].seen = 0;
  --size_;
}

// Gives a row to a key; the row comes into its orders when the batch ends.
void KeyMap::admit(uint64_t key, uint64_t hash, uint32_t row) {
  rows_[row].key = key;
  rows_[row].last = static_cast<uint32_t>(step_);
  rows_[row].seen = 1;
  index_.insert(hash, row);
  ++size_;
  ++counters_[kAdmitted];
  new_keys_.push_back(key);
  new_rows_.push_back(row);
}

// Puts the rows of the batch behind all others, and forgets the waiting keys that are too many.
void KeyMap::end_step() {
  std::vector<uint32_t>& new_rows = batch_.new_rows;
  new_rows.assign(new_rows_.begin(), new_rows_.end());
  sort_rows(new_rows, options_.num_rows);
  if (has_counts_) {
    for (const uint32_t row : new_rows) counts_.add_new(rows_, row);
  }
  if (has_ages_) {
    auto row = new_rows.begin();
    for (const uint32_t known : batch_.known) {
      for (; row != new_rows.end() && *row < known; ++row) ages_.append(rows_, *row);
      ages_.append(rows_, known);
    }
    for (; row != new_rows.end(); ++row) ages_.append(rows_, *row);
  }
  for (; waiting_.size() > options_.waiting; ++counters_[kForgotten]) waiting_.remove_first();
}

// Returns a step: rows that were last seen before it are freed by their ttl in `step`.
uint32_t KeyMap::expires_before(int64_t step) const {
  if (options_.ttl < 0) return 0;
  const int64_t kept = std::max(options_.ttl, options_.lookahead);
  return static_cast<uint32_t>(std::max<int64_t>(0, step - kept));
}

void KeyMap::prefetch(uint32_t row) const {
  __builtin_prefetch(&rows_[row]);
  if (has_counts_) counts_.prefetch(row);
}

void KeyMap::prefetch_neighbours(uint32_t row) const {
  for (const Links& links : {rows_[row].age, rows_[row].same}) {
    if (links.before != kNoRow) __builtin_prefetch(&rows_[links.before]);
    if (links.after != kNoRow) __builtin_prefetch(&rows_[links.after]);
  }
}

// -- Sizes ----------------------------------------------------------------------------------------

std::pair<int64_t, int64_t> KeyMap::most_keys() const {
  int64_t changes = 0;
  for (const Step& step : log_) changes += static_cast<int64_t>(step.rows.size());
  return {size_ + changes, waiting_.size() + waiting_.changes()};
}

int64_t KeyMap::bytes() const {
  int64_t bytes = rows_.bytes() + index_.bytes() + free_.bytes() + waiting_.bytes();
  if (has_counts_) bytes += counts_.bytes();
  bytes += bytes_of(spare_);
  for (const Step& step : log_) bytes += bytes_of(step.rows);
  bytes += bytes_of(batch_.known) + bytes_of(batch_.keys) + bytes_of(batch_.hashes);
  bytes += bytes_of(batch_.rows) + bytes_of(batch_.number) + bytes_of(batch_.new_rows);
  bytes += bytes_of(new_keys_) + bytes_of(new_rows_);
  return bytes + bytes_of(evicted_rows_) + bytes_of(evicted_keys_);
}

}  // namespace tpu_embed
