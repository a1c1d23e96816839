// The keys of a batch: which are there, and which of them have no row.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "key_index.h"
#include "threads.h"

namespace tpu_embed {
namespace {

constexpr int64_t kAhead = 8;  // keys whose slots are asked for in advance
constexpr int64_t kFirstSlots = int64_t{1} << 13;

// As `host_reference.distinct_keys`.
struct DistinctTask {
  const uint64_t* keys;  // [n]
  int64_t n;
  uint64_t* distinct;  // result, [n], of which `size` are written
  int32_t* positions;  // result, [n]
  int64_t* first;      // result, [n], of which `size` are written
  int64_t size;        // result
};

// As `host_reference.split_by_row`.
struct SplitTask {
  const int32_t* positions;  // [n]
  int64_t n;
  const int32_t* rows;
  bool* used;       // false before; true of the positions that occur
  int32_t* known;   // result, of which `size` count; room for one more than there are rows
  int64_t* absent;  // result, of which `absences` count; likewise
  int64_t size;      // result
  int64_t absences;  // result
};

// As `host_reference.are_among`.
struct AmongTask {
  const uint64_t* keys;  // [n]
  int64_t n;
  const uint64_t* some;  // [m], perhaps repeated
  int64_t m;
  bool* found;  // result, [n]
};

// As `host_reference.rows_at`.
struct RowsTask {
  const int32_t* rows;
  const int32_t* positions;  // [n]
  int64_t n;
  int32_t* out;  // result, [n]
};

void number_keys(DistinctTask& task) {
  // Most batches have far fewer keys than ids, so the index begins small, and near to the processor,
  // and grows while keys come.
  int64_t slots = std::min(4 * task.n + 1, kFirstSlots);
  KeyIndex index(slots, task.n);
  const auto key_at = [&](int64_t position) { return task.distinct[position]; };
  task.size = 0;
  uint64_t hashes[kAhead];  // of the keys to come
  for (int64_t i = -kAhead; i < task.n; ++i) {
    const uint64_t hash = hashes[i & (kAhead - 1)];
    if (i + kAhead < task.n) {
      index.prefetch(hashes[i & (kAhead - 1)] = hash_of(task.keys[i + kAhead]));
    }
    if (i < 0) continue;
    int64_t position = index.find(task.keys[i], hash, key_at);
    if (position == KeyIndex::kNone) {
      if (4 * task.size >= slots) {
        slots = std::min(4 * task.n + 1, 4 * slots);
        KeyIndex larger(slots, task.n);
        for (int64_t at = 0; at < task.size; ++at) larger.insert(hash_of(task.distinct[at]), at);
        index = std::move(larger);
      }
      position = task.size++;
      index.insert(hash, position);
      task.distinct[position] = task.keys[i];
      task.first[position] = i;
    }
    task.positions[i] = static_cast<int32_t>(position);
  }
}

void split(SplitTask& task) {
  task.size = task.absences = 0;
  for (int64_t i = 0; i < task.n; ++i) {
    const int32_t position = task.positions[i];
    if (position < 0) continue;  // padding
    // Nobody can guess whether it is there for the first time, so nothing branches on it: what is
    // written is written over unless it counts.
    const bool first = !task.used[position], known = task.rows[position] >= 0;
    task.used[position] = true;
    task.known[task.size] = task.rows[position];
    task.absent[task.absences] = i;
    task.size += first & known;
    task.absences += first & !known;
  }
}

void find_among(const AmongTask& task) {
  KeyIndex index(2 * task.m + 1, task.m);
  const auto key_at = [&](int64_t position) { return task.some[position]; };
  for (int64_t i = 0; i < task.m; ++i) {
    if (i + kAhead < task.m) index.prefetch(hash_of(task.some[i + kAhead]));
    const uint64_t hash = hash_of(task.some[i]);
    if (index.find(task.some[i], hash, key_at) == KeyIndex::kNone) index.insert(hash, i);
  }
  for (int64_t i = 0; i < task.n; ++i) {
    if (i + kAhead < task.n) index.prefetch(hash_of(task.keys[i + kAhead]));
    const int64_t at = index.find(task.keys[i], hash_of(task.keys[i]), key_at);
    task.found[i] = at != KeyIndex::kNone;
  }
}

void read_rows(const RowsTask& task) {
  for (int64_t i = 0; i < task.n; ++i) {
    const int32_t position = task.positions[i];
    task.out[i] = position < 0 ? -1 : task.rows[position];
  }
}

}  // namespace
}  // namespace tpu_embed

extern "C" bool tpu_embed_host_distinct_keys(tpu_embed::DistinctTask* tasks, int64_t count,
                                             int64_t threads) {
  return tpu_embed::run_on_threads(count, threads,
                                   [=](int64_t i) { tpu_embed::number_keys(tasks[i]); });
}

extern "C" bool tpu_embed_host_split_by_row(tpu_embed::SplitTask* tasks, int64_t count,
                                            int64_t threads) {
  return tpu_embed::run_on_threads(count, threads,
                                   [=](int64_t i) { tpu_embed::split(tasks[i]); });
}

extern "C" bool tpu_embed_host_are_among(const tpu_embed::AmongTask* tasks, int64_t count,
                                         int64_t threads) {
  return tpu_embed::run_on_threads(count, threads,
                                   [=](int64_t i) { tpu_embed::find_among(tasks[i]); });
}

extern "C" bool tpu_embed_host_rows_at(const tpu_embed::RowsTask* tasks, int64_t count,
                                       int64_t threads) {
  return tpu_embed::run_on_threads(count, threads,
                                   [=](int64_t i) { tpu_embed::read_rows(tasks[i]); });
}

// Writes the hash of each of n keys.
extern "C" void tpu_embed_host_hashes(const uint64_t* keys, int64_t n, uint64_t* hashes) {
  for (int64_t i = 0; i < n; ++i) hashes[i] = tpu_embed::hash_of(keys[i]);
}
