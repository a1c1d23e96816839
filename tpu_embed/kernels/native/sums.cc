// Gather and sum: activations of bags out of a table, partial sums out of gradients.
#include <algorithm>
#include <memory>
#include <numeric>
#include <type_traits>
#include <vector>

#include "buffers.h"
#include "columns.h"
#include "loops.h"
#include "parallel.h"

namespace tpu_embed {
namespace {

constexpr int64_t kBytesPerTask = 1 << 16;
constexpr int64_t kLongSegment = 256;  // bytes of rows from which on the order of sums pays
constexpr int64_t kManyPeriods = 64;   // periods from which on it always does, if segments are alike

void run(const Loops& loops, const GatherSum<int32_t>& job, int64_t begin, int64_t end) {
  loops.gather_sum_32(job, begin, end);
}

void run(const Loops& loops, const GatherSum<int64_t>& job, int64_t begin, int64_t end) {
  loops.gather_sum_64(job, begin, end);
}

// Returns the first entry of each of `count` segments, and the end of the last one.
std::unique_ptr<int64_t[]> starts_of(Parallel& parallel, const int32_t* segments, int64_t n,
                                     int64_t count) {
  std::unique_ptr<int64_t[]> starts(new int64_t[count + 1]);
  const int64_t tasks = parallel.tasks((n + count) * sizeof(int64_t), kBytesPerTask);
  parallel.for_each(tasks, [&](int64_t task) {
    const int64_t begin = (count + 1) * task / tasks, end = (count + 1) * (task + 1) / tasks;
    int64_t i = std::lower_bound(segments, segments + n, static_cast<int32_t>(begin)) - segments;
    for (int64_t segment = begin; segment < end; ++segment) {
      starts[segment] = i;
      while (i < n && segments[i] == segment) ++i;
    }
  });
  return starts;
}

// Returns the same where every period has `widths[c]` entries in its segment of column c: with widths
// 1 and 2, the segments begin at 0 1 | 3 4 | 6 7.
std::unique_ptr<int64_t[]> starts_of(ffi::Span<const int64_t> widths, int64_t periods) {
  const int64_t columns = static_cast<int64_t>(widths.size());
  std::unique_ptr<int64_t[]> starts(new int64_t[periods * columns + 1]);
  int64_t* to = starts.get();
  int64_t at = 0;
  for (int64_t period = 0; period < periods; ++period) {
    for (const int64_t width : widths) {
      *to++ = at;
      at += width;
    }
  }
  *to = at;
  return starts;
}

// Operands: source [R, D] float32, or bfloat16 as uint16; index [N]; segments int32 [N],
// non-decreasing, or [] if `widths` say where they begin; weights float32 [N] or []. Results: one array a feature, float32 [periods * bags, D].
ffi::Error gather_sum(ffi::ThreadPool pool, ffi::AnyBuffer source, ffi::AnyBuffer index,
                      ffi::AnyBuffer segments, ffi::AnyBuffer weights,
                      ffi::RemainingRets results, ffi::Span<const int64_t> bags,
                      ffi::Span<const int64_t> order, ffi::Span<const int64_t> widths,
                      int64_t periods) {
  const int64_t n = length(index), dim = source.dimensions()[1];
  const ColumnTable table(bags, order, dim, periods);
  const bool dense = widths.size() > 0;
  if (dense) {
    const int64_t entries = std::accumulate(widths.begin(), widths.end(), int64_t{0});
    if (static_cast<int64_t>(widths.size()) != table.columns() || entries * periods != n) {
      return refuse("gather_sum: the widths of all columns and periods must add up to the indices");
    }
  } else if (length(segments) != n) {
    return refuse("gather_sum: one segment an index is needed");
  }
  const int64_t count = periods * table.columns();
  if (!optional_of_length(weights, n)) return refuse("gather_sum: one weight an index is needed");
  if (static_cast<int64_t>(results.size()) != table.features()) {
    return refuse("gather_sum: one result a feature is needed");
  }
  std::vector<float*> outputs;
  for (size_t f = 0; f < results.size(); ++f) {
    auto output = results.get<ffi::AnyBuffer>(f);
    if (!output.has_value()) return output.error();
    if (!table.fits((**output).element_count(), f)) {
      return refuse("gather_sum: a result has another size than its feature");
    }
    outputs.push_back(data<float>(**output));
  }
  if (count == 0) return ffi::Error::Success();
  return with_row_type(index, [&](auto* type) {
    using Row = std::remove_pointer_t<decltype(type)>;
    Parallel parallel(pool);
    const int64_t read = n * dim * static_cast<int64_t>(sizeof(float));
    const bool alike = dense && *std::min_element(widths.begin(), widths.end()) ==
                                    *std::max_element(widths.begin(), widths.end());
    std::unique_ptr<int64_t[]> starts;
    if (!alike) {
      starts = dense ? starts_of(widths, periods)
                     : starts_of(parallel, data<int32_t>(segments), n, count);
    }
    // A column's segments one after the other, as long as finding them costs little beside the sums:
    // most rows that two segments share are of one column, and they stay in the cache. And the sums
    // of a column lie together, those of a period often as far apart as the cache has room.
    const bool by_column = (alike && periods >= kManyPeriods) || read >= count * kLongSegment;
    GatherSum<Row> job{source.untyped_data(),
                       storage_of(source),
                       length(source),
                       data<Row>(index),
                       starts.get(),
                       alike ? widths[0] : 0,
                       optional<float>(weights),
                       outputs.data(),
                       table.columns_of(),
                       count,
                       by_column ? table.columns() : 1};
    const int64_t written = count * dim * static_cast<int64_t>(sizeof(float));
    const int64_t tasks = parallel.tasks(read + written, kBytesPerTask);
    parallel.for_each(tasks, [&](int64_t task) {
      run(loops(), job, count * task / tasks, count * (task + 1) / tasks);
    });
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace tpu_embed

XLA_FFI_DEFINE_HANDLER_SYMBOL(tpu_embed_gather_sum, tpu_embed::gather_sum,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Span<const int64_t>>("bags")
                                  .Attr<xla::ffi::Span<const int64_t>>("order")
                                  .Attr<xla::ffi::Span<const int64_t>>("widths")
                                  .Attr<int64_t>("periods"));
