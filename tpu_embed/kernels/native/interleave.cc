// The ids of several features, in batch order: how a line of a batch begins.
//
// A plain C function, which `host_native.py` calls through ctypes, as those of route.cc.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "threads.h"

namespace tpu_embed {
namespace {

// The ids of one feature, on all lines.
struct Column {
  const void* row_ids;    // [n]
  const int32_t* bags;    // [n], non-decreasing
  const void* weights;    // [n], or null for ones
  const int64_t* bounds;  // [lines + 1], where the ids of each line begin
  int64_t per_period;     // bags of one period
};

// Bags of one feature that follow each other in a period.
struct Run {
  int64_t column;
  int64_t bags;
};

struct InterleaveTask {
  int64_t row_bytes;     // 4 or 8
  int64_t weight_bytes;  // 4 or 8
  const Column* columns;
  int64_t num_columns;
  const Run* runs;  // of one period, in batch order
  int64_t num_runs;
  int64_t line;
  int64_t periods;          // of one line
  int64_t bags_per_period;  // of all features
  void* row_ids;            // results, [size]
  int32_t* bags;
  void* weights;  // or null
  int64_t size;
};

template <typename Row, typename Weight>
void interleave(const InterleaveTask& task) {
  Row* row_ids = static_cast<Row*>(task.row_ids);
  Weight* weights = static_cast<Weight*>(task.weights);
  // Of each feature: its next id, and the next bag, as the feature numbers them.
  std::vector<int64_t> next(task.num_columns), bag(task.num_columns);
  for (int64_t c = 0; c < task.num_columns; ++c) {
    next[c] = task.columns[c].bounds[task.line];
    bag[c] = task.line * task.periods * task.columns[c].per_period;
  }
  int64_t to = 0, first = 0;  // the line's next id, and its next bag
  for (int64_t period = 0; period < task.periods; ++period) {
    for (int64_t r = 0; r < task.num_runs; ++r) {
      const int64_t c = task.runs[r].column, count = task.runs[r].bags;
      const Column& column = task.columns[c];
      const int64_t shift = first - bag[c], end = bag[c] + count;
      int64_t i = next[c];
      for (; i < column.bounds[task.line + 1] && column.bags[i] < end; ++i, ++to) {
        row_ids[to] = static_cast<const Row*>(column.row_ids)[i];
        task.bags[to] = static_cast<int32_t>(column.bags[i] + shift);
        if (!weights) continue;
        weights[to] = column.weights ? static_cast<const Weight*>(column.weights)[i] : Weight{1};
      }
      next[c] = i;
      bag[c] = end;
      first += count;
    }
  }
  // The rest is padding: absent rows, in a bag after the last one.
  std::fill(row_ids + to, row_ids + task.size, Row{-1});
  std::fill(task.bags + to, task.bags + task.size,
            static_cast<int32_t>(task.periods * task.bags_per_period));
  if (weights) std::fill(weights + to, weights + task.size, Weight{0});
}

template <typename Row>
void interleave(const InterleaveTask& task) {
  task.weight_bytes == 4 ? interleave<Row, float>(task) : interleave<Row, double>(task);
}

}  // namespace
}  // namespace tpu_embed

extern "C" bool tpu_embed_host_interleave(const tpu_embed::InterleaveTask* tasks, int64_t count,
                                          int64_t threads) {
  return tpu_embed::run_on_threads(count, threads, [=](int64_t i) {
    const tpu_embed::InterleaveTask& task = tasks[i];
    task.row_bytes == 4 ? tpu_embed::interleave<int32_t>(task)
                        : tpu_embed::interleave<int64_t>(task);
  });
}
