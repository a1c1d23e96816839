// Gather and sum: activations of bags out of a table, partial sums out of gradients.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "buffers.h"
#include "columns.h"
#include "loops.h"
#include "parallel.h"

namespace tpu_embed {
namespace {

constexpr int64_t kBytesPerTask = 1 << 16;

void run(const Loops& loops, const GatherSum<int32_t>& job, int64_t begin, int64_t end, int64_t n) {
  loops.gather_sum_32(job, begin, end, n);
}

void run(const Loops& loops, const GatherSum<int64_t>& job, int64_t begin, int64_t end, int64_t n) {
  loops.gather_sum_64(job, begin, end, n);
}

// Operands: source [R, D] float32, or bfloat16 as uint16; index [N]; segments int32 [N],
// non-decreasing; weights float32 [N] or []; factors float32 [segments] or []. Results: one array
// a feature, float32 [examples * bags, D].
ffi::Error gather_sum(ffi::ThreadPool pool, ffi::AnyBuffer source, ffi::AnyBuffer index,
                      ffi::AnyBuffer segments, ffi::AnyBuffer weights, ffi::AnyBuffer factors,
                      ffi::RemainingRets results, ffi::Span<const int64_t> bags,
                      int64_t examples) {
  const int64_t n = length(index), dim = source.dimensions()[1];
  if (length(segments) != n) return refuse("gather_sum: one segment an index is needed");
  const ColumnTable table(bags, dim);
  const int64_t count = examples * table.columns();
  if (!optional_of_length(weights, n)) return refuse("gather_sum: one weight an index is needed");
  if (!optional_of_length(factors, count)) {
    return refuse("gather_sum: one factor a segment is needed");
  }
  if (static_cast<int64_t>(results.size()) != table.features()) {
    return refuse("gather_sum: one result a feature is needed");
  }
  std::vector<float*> outputs;
  for (size_t f = 0; f < results.size(); ++f) {
    auto output = results.get<ffi::AnyBuffer>(f);
    if (!output.has_value()) return output.error();
    if (!table.fits((**output).element_count(), f, examples)) {
      return refuse("gather_sum: a result has another size than its feature");
    }
    outputs.push_back(data<float>(**output));
  }
  return with_row_type(index, [&](auto* type) {
    using Row = std::remove_pointer_t<decltype(type)>;
    GatherSum<Row> job{source.untyped_data(),
                       storage_of(source),
                       length(source),
                       data<Row>(index),
                       data<int32_t>(segments),
                       optional<float>(weights),
                       optional<float>(factors),
                       outputs.data(),
                       table.columns_of()};
    Parallel parallel(pool);
    const int64_t work = (n + count) * dim * static_cast<int64_t>(sizeof(float));
    const int64_t tasks = parallel.tasks(work, kBytesPerTask);
    parallel.for_each(tasks, [&](int64_t task) {
      run(loops(), job, count * task / tasks, count * (task + 1) / tasks, n);
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
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Span<const int64_t>>("bags")
                                  .Attr<int64_t>("examples"));
