// Maps from keys to rows, for callers that are not C++.
//
// Plain C functions, which `host_native.py` calls through ctypes. The caller checks all
// sizes, and that no two calls for one map overlap, `find` excepted. Functions return false if there
// was not enough memory; the map is then as it was.
#include <algorithm>
#include <cstdint>
#include <new>
#include <tuple>

#include "key_map.h"

namespace tpu_embed {
namespace {

// Returns whether run() had enough memory.
template <typename Run>
bool had_memory(const Run& run) {
  try {
    run();
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

// One batch: what it has, and what was done with it.
struct TakeTask {
  const int64_t* known;  // [k]
  int64_t k;
  const uint64_t* unknown;  // [m]
  int64_t m;
  int64_t* rows;      // result, [m]
  int64_t conflict;   // result, a `Conflict::Kind`
  uint64_t number;    // result, of the conflict
  int64_t num_new;    // results, for `tpu_embed_vocabulary_taken`
  int64_t num_evicted;
  int64_t unseen;
  int64_t at_once;    // whether unknown keys need not wait
};

// A state, with its sizes; to write one, the arrays have the sizes that `Numbers` tells.
struct StateTask {
  StateArrays arrays;
  int64_t n;
  int64_t w;
  int64_t step;
  Counters counters;
};

// What a map tells of itself.
struct Numbers {
  int64_t step;
  int64_t earliest;
  int64_t size;
  int64_t bytes;
  int64_t most_keys;
  int64_t most_waiting;
  Counters counters;
};

}  // namespace
}  // namespace tpu_embed

// Returns a map, or null; `tpu_embed_vocabulary_delete` ends it.
extern "C" tpu_embed::KeyMap* tpu_embed_vocabulary_new(const tpu_embed::MapOptions* options) {
  tpu_embed::KeyMap* made = nullptr;
  tpu_embed::had_memory([&] { made = new tpu_embed::KeyMap(*options); });
  return made;
}

extern "C" void tpu_embed_vocabulary_delete(tpu_embed::KeyMap* map) { delete map; }

extern "C" void tpu_embed_vocabulary_find(const tpu_embed::KeyMap* map, const uint64_t* keys,
                                          int64_t n, int64_t* rows) {
  map->find(keys, n, rows);
}

extern "C" bool tpu_embed_vocabulary_take(tpu_embed::KeyMap* map, tpu_embed::TakeTask* task) {
  return tpu_embed::had_memory([&] {
    const tpu_embed::Conflict conflict =
        map->take(task->known, task->k, task->unknown, task->m, task->at_once != 0, task->rows);
    task->conflict = conflict.kind;
    task->number = conflict.number;
    if (conflict.kind != tpu_embed::Conflict::kNothing) return;
    task->num_new = static_cast<int64_t>(map->new_keys().size());
    task->num_evicted = static_cast<int64_t>(map->evicted_rows().size());
    task->unseen = map->unseen();
  });
}

// Writes what the last `take` did.
extern "C" void tpu_embed_vocabulary_taken(const tpu_embed::KeyMap* map, uint64_t* new_keys,
                                           int64_t* new_rows, int64_t* evicted_rows,
                                           uint64_t* evicted_keys) {
  std::copy(map->new_keys().begin(), map->new_keys().end(), new_keys);
  std::copy(map->new_rows().begin(), map->new_rows().end(), new_rows);
  std::copy(map->evicted_rows().begin(), map->evicted_rows().end(), evicted_rows);
  std::copy(map->evicted_keys().begin(), map->evicted_keys().end(), evicted_keys);
}

extern "C" void tpu_embed_vocabulary_rewind(tpu_embed::KeyMap* map, int64_t step) {
  map->rewind(step);
}

extern "C" void tpu_embed_vocabulary_forget(tpu_embed::KeyMap* map, int64_t step) {
  map->forget(step);
}

extern "C" int64_t tpu_embed_vocabulary_step(const tpu_embed::KeyMap* map) { return map->step(); }

extern "C" void tpu_embed_vocabulary_numbers(const tpu_embed::KeyMap* map,
                                             tpu_embed::Numbers* numbers) {
  const auto [keys, waiting] = map->most_keys();
  *numbers = {map->step(), map->earliest(), map->size(), map->bytes(),
              keys,        waiting,         map->counters(map->step())};
}

extern "C" bool tpu_embed_vocabulary_state(const tpu_embed::KeyMap* map,
                                           tpu_embed::StateTask* task) {
  return tpu_embed::had_memory([&] {
    std::tie(task->n, task->w) = map->state(task->step, task->arrays);
    task->counters = map->counters(task->step);
  });
}

// Gives a new map a state.
extern "C" bool tpu_embed_vocabulary_load(tpu_embed::KeyMap* map,
                                          const tpu_embed::StateTask* task) {
  return tpu_embed::had_memory(
      [&] { map->load(task->arrays, task->n, task->w, task->step, task->counters); });
}
