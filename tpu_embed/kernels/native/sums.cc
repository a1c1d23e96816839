// Gather and sum: activations of bags out of a table, partial sums out of gradients.
#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "buffers.h"
#include "pieces.h"
#include "loops.h"
#include "parallel.h"

namespace tpu_embed {
namespace {

constexpr int64_t kBytesPerTask = 1 << 16;

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

// Returns the same where every bag of a feature has as many entries: with 2 bags of 1 and 1 bag of
// 3, the segments begin at 0 1 2, and the last one ends at 5.
std::unique_ptr<int64_t[]> starts_of(ffi::Span<const int64_t> bags,
                                     ffi::Span<const int64_t> widths, int64_t count) {
  std::unique_ptr<int64_t[]> starts(new int64_t[count + 1]);
  int64_t* to = starts.get();
  int64_t at = 0;
  for (size_t f = 0; f < bags.size(); ++f) {
    for (int64_t i = 0; i < bags[f]; ++i, at += widths[f]) *to++ = at;
  }
  *to = at;
  return starts;
}

// Operands: source [R, D] float32, or bfloat16 as uint16; index [N]; segments int32 [N],
// non-decreasing, or [] if `widths` say where they begin; weights float32 [N] or []. Results: one
// array a feature, float32 [bags, D].
ffi::Error gather_sum(ffi::ThreadPool pool, ffi::AnyBuffer source, ffi::AnyBuffer index,
                      ffi::AnyBuffer segments, ffi::AnyBuffer weights,
                      ffi::RemainingRets results, ffi::Span<const int64_t> bags,
                      ffi::Span<const int64_t> widths) {
  const int64_t n = length(index), dim = source.dimensions()[1];
  PieceTable<float> table(bags, nullptr, 0);
  const bool dense = widths.size() > 0;
  if (dense) {
    int64_t entries = widths.size() == bags.size() ? 0 : -1;
    for (size_t f = 0; f < bags.size() && entries >= 0; ++f) entries += bags[f] * widths[f];
    if (entries != n) return refuse("gather_sum: the widths of all bags must add up to the indices");
  } else if (length(segments) != n) {
    return refuse("gather_sum: one segment an index is needed");
  }
  const int64_t count = table.bags();
  if (!optional_of_length(weights, n)) return refuse("gather_sum: one weight an index is needed");
  if (static_cast<int64_t>(results.size()) != table.features()) {
    return refuse("gather_sum: one result a feature is needed");
  }
  std::vector<float*> outputs;
  for (size_t f = 0; f < results.size(); ++f) {
    auto output = results.get<ffi::AnyBuffer>(f);
    if (!output.has_value()) return output.error();
    if (static_cast<int64_t>((**output).element_count()) != table.bags_of(f) * dim) {
      return refuse("gather_sum: a result has another size than its feature");
    }
    outputs.push_back(data<float>(**output));
  }
  if (count == 0) return ffi::Error::Success();
  return with_row_type(index, [&](auto* type) {
    using Row = std::remove_pointer_t<decltype(type)>;
    Parallel parallel(pool);
    const int64_t read = n * dim * static_cast<int64_t>(sizeof(float));
    // The width of all bags, if they have the same.
    const int64_t width = dense ? *std::max_element(widths.begin(), widths.end()) : 0;
    const bool alike = dense && count * width == n;
    std::unique_ptr<int64_t[]> starts;
    if (!alike) {
      starts = dense ? starts_of(bags, widths, count)
                     : starts_of(parallel, data<int32_t>(segments), n, count);
    }
    GatherSum<Row> job{source.untyped_data(),
                       storage_of(source),
                       length(source),
                       data<Row>(index),
                       starts.get(),
                       alike ? width : 0,
                       optional<float>(weights),
                       table.of(outputs),
                       dim,
                       count};
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
                                  .Attr<xla::ffi::Span<const int64_t>>("widths"));
