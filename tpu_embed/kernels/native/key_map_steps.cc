// Steps of a `KeyMap` that are undone or forgotten, and its state after a step, as arrays.
#include <algorithm>
#include <utility>

#include "key_map.h"
#include "sort.h"
#include "threads.h"

namespace tpu_embed {

// -- Other steps ----------------------------------------------------------------------------------

// Makes the orders of age and count anew, which are not kept when steps are undone.
void KeyMap::put_in_order() {
  Serial serial;
  RadixSort<Position<uint32_t>, Serial> by_age(serial, size_, static_cast<uint64_t>(step_));
  Position<uint32_t>* to = by_age.entries();
  for (uint32_t row = 0; row < rows_.size(); ++row) {
    if (rows_[row].seen) *to++ = {rows_[row].last, row};
  }
  const Position<uint32_t>* sorted = by_age.sort();  // stable: rows of one step are in order
  ages_ = AgeOrder();
  for (int64_t i = 0; has_ages_ && i < size_; ++i) ages_.append(rows_, sorted[i].position);
  if (has_counts_) {
    RadixSort<Position<uint32_t>, Serial> by_count(serial, size_, static_cast<uint64_t>(step_));
    for (int64_t i = 0; i < size_; ++i) {
      by_count.entries()[i] = {rows_[sorted[i].position].seen, sorted[i].position};
    }
    sorted = by_count.sort();
    counts_.clear();
    for (int64_t i = 0; i < size_; ++i) counts_.add_last(rows_, sorted[i].position);
  }
  in_order_ = true;
}

// Gives a row the numbers that it had.
void KeyMap::put(const Numbers& numbers) {
  Row& row = rows_[numbers.row];
  if (row.seen) {
    index_.erase(hash_of(row.key), numbers.row, key_at());
    free_.add(numbers.row);
    --size_;
  }
  row.key = numbers.key;
  row.last = numbers.last;
  row.seen = numbers.seen;
  if (row.seen) {
    index_.insert(hash_of(row.key), numbers.row);
    free_.remove(numbers.row);
    ++size_;
  }
}

void KeyMap::rewind(int64_t step) {
  const Changing changing(*this);
  while (step_ > step) {
    const Step& undone = log_.back();
    for (auto row = undone.rows.rbegin(); row != undone.rows.rend(); ++row) put(*row);
    waiting_.undo_step();
    counters_ = undone.counters;
    log_.pop_back();
    --step_;
    in_order_ = false;
  }
}

void KeyMap::forget(int64_t step) {
  while (earliest() < step) {
    spare_ = std::move(log_.front().rows);
    log_.pop_front();
    waiting_.forget_step();
  }
}

const Counters& KeyMap::counters(int64_t step) const {
  return step == step_ ? counters_ : log_[step - earliest()].counters;
}

// -- States ---------------------------------------------------------------------------------------

std::pair<int64_t, int64_t> KeyMap::state(int64_t step, const StateArrays& to) const {
  std::vector<Numbers> before;  // rows as they were; of each row, the earliest numbers count
  for (size_t i = step - earliest(); i < log_.size(); ++i) {
    before.insert(before.end(), log_[i].rows.begin(), log_[i].rows.end());
  }
  std::stable_sort(before.begin(), before.end(),
                   [](const Numbers& a, const Numbers& b) { return a.row < b.row; });
  auto next = before.begin();
  int64_t n = 0, w = 0;
  for (uint32_t row = 0; row < rows_.size(); ++row) {
    const bool changed = next != before.end() && next->row == row;
    const Numbers then = changed ? *next : numbers(row);
    while (next != before.end() && next->row == row) ++next;
    if (then.seen == 0) continue;
    to.keys[n] = then.key;
    to.rows[n] = row;
    to.last_seen[n] = then.last;
    to.batches_seen[n++] = then.seen;
  }
  waiting_.visit_before(step_ - step, [&](uint64_t key, uint32_t count) {
    to.waiting_keys[w] = key;
    to.waiting_counts[w++] = count;
  });
  return {n, w};
}

void KeyMap::load(const StateArrays& from, int64_t n, int64_t w, int64_t step,
                  const Counters& counters) {
  waiting_.reserve(w);
  for (int64_t i = 0; i < n; ++i) {
    put({from.keys[i], static_cast<uint32_t>(from.rows[i]),
         static_cast<uint32_t>(from.last_seen[i]), static_cast<uint32_t>(from.batches_seen[i])});
  }
  for (int64_t i = 0; i < w; ++i) {
    waiting_.load(from.waiting_keys[i], static_cast<uint32_t>(from.waiting_counts[i]));
  }
  step_ = step;
  counters_ = counters;
  in_order_ = false;
}

}  // namespace tpu_embed
