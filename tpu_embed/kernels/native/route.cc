// Routes of a placed batch, computed on the host: ids sorted by row, and numbers put in their order.
//
// Plain C functions, which `host_native.py` calls through ctypes. The caller checks all sizes. A
// task is one line of an int64 array, so every field has 8 bytes. Each function returns whether
// there was enough memory.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "entry.h"
#include "sort.h"
#include "threads.h"

namespace tpu_embed {
namespace {

// The ids of one line, sorted. With `blocks` null, the sums are the rows, and not written again.
struct SortTask {
  int64_t row_bytes;      // 4 or 8
  const void* row_ids;    // [n], negative for absent ids
  const int32_t* blocks;  // [n], or null
  int64_t n;
  int32_t* order;  // results, as `SortedIds` describes them; each has room for n numbers
  int32_t* row;
  void* rows;
  int32_t* sum;
  void* sum_rows;
  int64_t present;  // the number of ids, rows and sums found
  int64_t num_rows;
  int64_t num_sums;
};

// out[i] = source[index[i]] - minus for i < n, then `rest`; with `index` null, source[i] - minus.
struct TakeTask {
  int64_t number_bytes;  // 4 or 8
  void* out;  // [size]
  int64_t size;
  const void* source;
  const int32_t* index;
  int64_t n;
  int64_t minus;  // zero unless the numbers are integers
  int64_t rest;   // the bytes of a number, the lowest first
};

// out[order[i]] = place[run[i]] for i < n; elsewhere `rest`.
struct PutTask {
  int32_t* out;  // [size]
  int64_t size;
  const int32_t* order;
  const int32_t* run;
  const int32_t* place;
  int64_t n;
  int64_t rest;
};

// Writes order and numbers of the sorted entries, whose keys are a row and `shift` bits of a block.
template <typename Row, typename Key>
void write_runs(const Position<Key>* entries, Row base, int shift, SortTask& task) {
  Row *rows = static_cast<Row*>(task.rows), *sum_rows = static_cast<Row*>(task.sum_rows);
  int32_t row = -1, sum = -1;
  Key last = 0;
  for (int64_t i = 0; i < task.present; ++i) {
    const auto [key, position] = entries[i];
    const bool new_sum = i == 0 || key != last;
    // Added as rows: a key of 32 bits need not hold the base of rows of 64.
    rows[row += new_sum && (i == 0 || key >> shift != last >> shift)] =
        base + static_cast<Row>(key >> shift);
    task.order[i] = static_cast<int32_t>(position);
    task.row[i] = row;
    last = key;
    if (!task.blocks) continue;
    sum_rows[sum += new_sum] = rows[row];
    task.sum[i] = sum;
  }
  task.num_rows = row + 1;
  task.num_sums = task.blocks ? sum + 1 : row + 1;
}

// Sorts rows in [base, base + range], as keys that hold the range and `shift` bits of a block.
template <typename Row, typename Key>
void sort_as(Row base, uint64_t range, int shift, SortTask& task) {
  const Row* row_ids = static_cast<const Row*>(task.row_ids);
  Serial serial;
  const uint64_t largest = (range << shift) | ((uint64_t{1} << shift) - 1);
  RadixSort<Position<Key>, Serial> sort(serial, task.present, largest);
  Position<Key>* to = sort.entries();
  for (int64_t i = 0; i < task.n; ++i) {
    if (row_ids[i] < 0) continue;
    const Key block = task.blocks ? static_cast<Key>(task.blocks[i]) : Key{0};
    const Key key = static_cast<Key>(row_ids[i] - base) << shift | block;
    *to++ = {key, static_cast<uint32_t>(i)};
  }
  write_runs<Row, Key>(sort.sort(), base, shift, task);
}

template <typename Row>
void sort_ids(SortTask& task) {
  using Unsigned = std::make_unsigned_t<Row>;
  const Row* row_ids = static_cast<const Row*>(task.row_ids);
  // As unsigned numbers absent rows are the largest: a loop without branches, for vector units.
  int64_t present = 0;
  Row largest = 0;
  auto least = static_cast<Unsigned>(std::numeric_limits<Row>::max());
  for (int64_t i = 0; i < task.n; ++i) {
    present += row_ids[i] >= 0;
    largest = std::max(largest, row_ids[i]);
    least = std::min(least, static_cast<Unsigned>(row_ids[i]));
  }
  task.present = present;
  if (present == 0) least = 0;
  const auto base = static_cast<Row>(least);
  const auto range = static_cast<uint64_t>(largest - base);
  int32_t last_block = 0;
  for (int64_t i = 0; task.blocks && i < task.n; ++i) {
    last_block = std::max(last_block, task.blocks[i]);
  }
  const int shift = bit_length(static_cast<uint64_t>(last_block));
  if (range <= std::numeric_limits<uint32_t>::max() >> shift) {
    sort_as<Row, uint32_t>(base, range, shift, task);
  } else {
    sort_as<Row, uint64_t>(base, range, shift, task);
  }
}

// A number of 8 bytes in a line of int32 numbers: its address is a multiple of 4.
struct Wide {
  uint32_t words[2];

  Wide operator-(const Wide& other) const {
    uint64_t mine, theirs;
    std::memcpy(&mine, words, sizeof mine);
    std::memcpy(&theirs, other.words, sizeof theirs);
    mine -= theirs;
    Wide difference;
    std::memcpy(difference.words, &mine, sizeof mine);
    return difference;
  }
};

template <typename Number>
void take(const TakeTask& task) {
  Number* out = static_cast<Number*>(task.out);
  const Number* source = static_cast<const Number*>(task.source);
  Number minus, rest;
  std::memcpy(&minus, &task.minus, sizeof minus);
  std::memcpy(&rest, &task.rest, sizeof rest);
  if (task.index) {
    for (int64_t i = 0; i < task.n; ++i) out[i] = source[task.index[i]] - minus;
  } else {
    for (int64_t i = 0; i < task.n; ++i) out[i] = source[i] - minus;
  }
  std::fill(out + task.n, out + task.size, rest);
}

void put(const PutTask& task) {
  std::fill(task.out, task.out + task.size, static_cast<int32_t>(task.rest));
  for (int64_t i = 0; i < task.n; ++i) task.out[task.order[i]] = task.place[task.run[i]];
}

}  // namespace
}  // namespace tpu_embed

extern "C" bool tpu_embed_host_sort_ids(tpu_embed::SortTask* tasks, int64_t count,
                                        int64_t threads) {
  return tpu_embed::run_on_threads(count, threads, [=](int64_t i) {
    tpu_embed::SortTask& task = tasks[i];
    task.row_bytes == 4 ? tpu_embed::sort_ids<int32_t>(task) : tpu_embed::sort_ids<int64_t>(task);
  });
}

extern "C" bool tpu_embed_host_take(const tpu_embed::TakeTask* tasks, int64_t count,
                                    int64_t threads) {
  return tpu_embed::run_on_threads(count, threads, [=](int64_t i) {
    const tpu_embed::TakeTask& task = tasks[i];
    task.number_bytes == 4 ? tpu_embed::take<uint32_t>(task)
                           : tpu_embed::take<tpu_embed::Wide>(task);
  });
}

extern "C" bool tpu_embed_host_put(const tpu_embed::PutTask* tasks, int64_t count,
                                   int64_t threads) {
  return tpu_embed::run_on_threads(count, threads, [=](int64_t i) { tpu_embed::put(tasks[i]); });
}
