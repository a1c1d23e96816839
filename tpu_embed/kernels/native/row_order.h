// The rows of a map in the order in which they lose their keys, kept up to date row by row.
#ifndef TPU_EMBED_ROW_ORDER_H_
#define TPU_EMBED_ROW_ORDER_H_

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "memory.h"

namespace tpu_embed {

constexpr uint32_t kNoRow = std::numeric_limits<uint32_t>::max();

// The neighbours of a row in a list; kNoRow at an end.
struct Links {
  uint32_t before;
  uint32_t after;
};

// What a map knows of a row: half a line of the cache.
struct Row {
  uint64_t key;
  uint32_t last;  // the last step whose batch had the key
  uint32_t seen;  // how many batches had it since its admission; 0: the row is free
  Links age;      // among all rows
  Links same;     // among those that as many batches had
};

using Rows = Zeros<Row>;

// A list of rows that are linked by a member of theirs.
template <Links Row::*links>
struct RowList {
  uint32_t head = kNoRow, tail = kNoRow;

  void append(Rows& rows, uint32_t row) {
    rows[row].*links = {tail, kNoRow};
    (tail == kNoRow ? head : (rows[tail].*links).after) = row;
    tail = row;
  }

  void remove(Rows& rows, uint32_t row) {
    const auto [before, after] = rows[row].*links;
    (before == kNoRow ? head : (rows[before].*links).after) = after;
    (after == kNoRow ? tail : (rows[after].*links).before) = before;
  }
};

// Rows by the last step that had them, then by number: those of a step are appended in order.
//
// Rows are dealt out by `row % 4` to four lists, each in this order; the oldest row is the oldest of
// the four heads. A list's next row is known only once the row before it has been read, so four
// lists let four reads overlap.
class AgeOrder {
 public:
  static constexpr uint32_t kLists = 4;

  static uint32_t list_of(uint32_t row) { return row % kLists; }

  void append(Rows& rows, uint32_t row) { lists_[list_of(row)].append(rows, row); }
  void remove(Rows& rows, uint32_t row) { lists_[list_of(row)].remove(rows, row); }

  // Returns the first row of a list, or kNoRow.
  uint32_t first_of(uint32_t list) const { return lists_[list].head; }

  // Returns the first row, or kNoRow.
  uint32_t first(const Rows& rows) const {
    uint32_t found = kNoRow;
    uint64_t least = std::numeric_limits<uint64_t>::max();
    for (const auto& list : lists_) {
      if (list.head == kNoRow) continue;
      const uint64_t age = uint64_t{rows[list.head].last} << 32 | list.head;
      if (age < least) {
        least = age;
        found = list.head;
      }
    }
    return found;
  }

  // Returns how many rows were last seen before a step.
  size_t count_before(const Rows& rows, uint32_t step) const {
    size_t count = 0;
    for (const auto& list : lists_) {
      for (uint32_t row = list.head; row != kNoRow; row = rows[row].age.after) {
        if (rows[row].last >= step) break;
        ++count;
      }
    }
    return count;
  }

 private:
  RowList<&Row::age> lists_[kLists];
};

// Rows by the number of batches that had them, then as in `AgeOrder`: one list per number that
// occurs, and these lists in order. A row that is seen moves to the end of the next list.
//
//     number 1: rows 4 7     number 2: row 0     number 5: rows 1 3
//     row 4 is seen:
//     number 1: row 7        number 2: rows 0 4  number 5: rows 1 3
class CountOrder {
 public:
  explicit CountOrder(int64_t num_rows) : list_of_(num_rows), lists_(1) {}

  int64_t bytes() const {
    return list_of_.bytes() + static_cast<int64_t>(lists_.capacity() * sizeof(List));
  }

  void prefetch(uint32_t row) const { __builtin_prefetch(&list_of_[row]); }

  // Makes room for the lists of one step: only this can fail. Every list makes at most one more, as
  // its rows move on together, and new rows make one.
  void begin_step() {
    const size_t most = 2 * in_use_ + 2;
    if (most > lists_.capacity()) lists_.reserve(2 * most);
  }

  void clear() {
    lists_.assign(1, List());
    in_use_ = 0;
    unused_ = passed_ = kEnds;
  }

  // Adds a row that no more batches had than any other row: it becomes the last of its number.
  void add_new(Rows& rows, uint32_t row) { append(rows, row, next_to(kEnds, rows[row].seen)); }

  // Adds a row that no fewer batches had than any other row.
  void add_last(Rows& rows, uint32_t row) {
    const uint32_t last = lists_[kEnds].before;
    const bool there = last != kEnds && lists_[last].seen == rows[row].seen;
    append(rows, row, there ? last : next_to(last, rows[row].seen));
  }

  // Moves a row whose number has just become one more.
  void move_on(Rows& rows, uint32_t row) {
    const uint32_t from = list_of_[row];
    lists_[from].rows.remove(rows, row);
    append(rows, row, next_to(from, rows[row].seen));
    drop_if_empty(from);
  }

  void remove(Rows& rows, uint32_t row) {
    lists_[list_of_[row]].rows.remove(rows, row);
    drop_if_empty(list_of_[row]);
  }

  // Returns the first row in order that was last seen before `step`, or kNoRow. While rows are only
  // removed, lists that have no such row are passed once: of a list the first row is the oldest.
  uint32_t first_before(const Rows& rows, uint32_t step) {
    while (passed_ != kEnds && rows[lists_[passed_].rows.head].last >= step) {
      passed_ = lists_[passed_].after;
    }
    return passed_ == kEnds ? kNoRow : lists_[passed_].rows.head;
  }
  void look_from_the_beginning() { passed_ = lists_[kEnds].after; }

 private:
  struct List {
    uint32_t seen = 0;
    RowList<&Row::same> rows;
    uint32_t before = kEnds, after = kEnds;  // lists; of one that is not used, `after` is another
  };
  static constexpr uint32_t kEnds = 0;  // no list, but before the first one and after the last

  // Returns the list of a number, which stands after `from`; a new one, unless it is there.
  uint32_t next_to(uint32_t from, uint32_t seen) {
    const uint32_t after = lists_[from].after;
    if (after != kEnds && lists_[after].seen == seen) return after;
    uint32_t made = unused_;
    if (made == kEnds) {
      made = static_cast<uint32_t>(lists_.size());
      lists_.emplace_back();
    } else {
      unused_ = lists_[made].after;
    }
    lists_[made] = {seen, {}, from, after};
    lists_[from].after = lists_[after].before = made;
    ++in_use_;
    return made;
  }

  void append(Rows& rows, uint32_t row, uint32_t list) {
    lists_[list].rows.append(rows, row);
    list_of_[row] = list;
  }

  void drop_if_empty(uint32_t list) {
    if (lists_[list].rows.head != kNoRow) return;
    const auto [before, after] = std::pair(lists_[list].before, lists_[list].after);
    lists_[before].after = after;
    lists_[after].before = before;
    if (passed_ == list) passed_ = after;
    lists_[list].after = unused_;
    unused_ = list;
    --in_use_;
  }

  Zeros<uint32_t> list_of_;  // [rows]
  std::vector<List> lists_;
  size_t in_use_ = 0;
  uint32_t unused_ = kEnds;
  uint32_t passed_ = kEnds;
};

}  // namespace tpu_embed

#endif  // TPU_EMBED_ROW_ORDER_H_
