// Rows copied out of tables and into them, whatever their type, row numbers sorted, and new tables.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "buffers.h"
#include "memory.h"
#include "parallel.h"
#include "sort.h"

namespace tpu_embed {
namespace {

constexpr int64_t kBytesPerTask = 1 << 16;
constexpr int64_t kAhead = 16;  // rows whose memory is asked for in advance

// Inlined always: GCC takes a function that only prefetches for one without effect, and drops it.
inline __attribute__((always_inline)) void prefetch(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

// Calls copy(i, place of table row rows[i]) for present rows, absent(i) for the others.
template <typename Row, typename Copy, typename Absent>
void visit(Parallel parallel, const Row* rows, int64_t n, char* table, int64_t table_rows,
           int64_t bytes, const Copy& copy, const Absent& absent) {
  const int64_t tasks = parallel.tasks(n * bytes, kBytesPerTask);
  parallel.for_each(tasks, [&](int64_t task) {
    const int64_t begin = n * task / tasks, end = n * (task + 1) / tasks;
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) {
        const int64_t next = rows[i + kAhead];
        if (next >= 0 && next < table_rows) prefetch(table + next * bytes, bytes);
      }
      const int64_t row = rows[i];
      if (row >= 0 && row < table_rows) {
        copy(i, table + row * bytes);
      } else {
        absent(i);
      }
    }
  });
}

ffi::Error zeros(ffi::ThreadPool pool, ffi::Result<ffi::AnyBuffer> output) {
  char* to = data<char>(*output);
  const int64_t bytes = static_cast<int64_t>(output->size_bytes());
  if (bytes == 0) return ffi::Error::Success();
  ask_for_large_pages(to, bytes);
  Parallel parallel(pool);
  const int64_t tasks = parallel.tasks(bytes, kBytesPerTask);
  parallel.for_each(tasks, [&](int64_t task) {
    const int64_t begin = bytes * task / tasks;
    std::memset(to + begin, 0, bytes * (task + 1) / tasks - begin);
  });
  return ffi::Error::Success();
}

ffi::Error gather_rows(ffi::ThreadPool pool, ffi::AnyBuffer table, ffi::AnyBuffer rows,
                       ffi::Result<ffi::AnyBuffer> output) {
  const int64_t n = length(rows), bytes = row_bytes(table);
  if (length(*output) != n || row_bytes(*output) != bytes) return refuse("gather: shapes differ");
  char* to = data<char>(*output);
  return with_row_type(rows, [&](auto* type) {
    using Row = std::remove_pointer_t<decltype(type)>;
    visit(
        Parallel(pool), data<Row>(rows), n, data<char>(table), length(table), bytes,
        [&](int64_t i, const char* row) { std::memcpy(to + i * bytes, row, bytes); },
        [&](int64_t i) { std::memset(to + i * bytes, 0, bytes); });
    return ffi::Error::Success();
  });
}

// In place: `table` and `output` are one buffer.
ffi::Error set_rows(ffi::ThreadPool pool, ffi::AnyBuffer table, ffi::AnyBuffer rows,
                    ffi::AnyBuffer values, ffi::Result<ffi::AnyBuffer> output) {
  const int64_t n = length(rows), bytes = row_bytes(table);
  if (output->untyped_data() != table.untyped_data()) return refuse("set: not in place");
  if (length(values) != n || row_bytes(values) != bytes) return refuse("set: shapes differ");
  const char* from = data<char>(values);
  return with_row_type(rows, [&](auto* type) {
    using Row = std::remove_pointer_t<decltype(type)>;
    visit(
        Parallel(pool), data<Row>(rows), n, data<char>(table), length(table), bytes,
        [&](int64_t i, char* row) { std::memcpy(row, from + i * bytes, bytes); }, [](int64_t) {});
    return ffi::Error::Success();
  });
}

ffi::Error sort_rows(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::Result<ffi::AnyBuffer> ordered,
                     ffi::Result<ffi::AnyBuffer> order) {
  const int64_t n = length(rows);
  if (length(*ordered) != n || length(*order) != n) return refuse("sort: lengths differ");
  return with_row_type(rows, [&](auto* type) {
    using Row = std::remove_pointer_t<decltype(type)>;
    using Key = std::make_unsigned_t<Row>;
    const Row* from = data<Row>(rows);
    Row* to = data<Row>(*ordered);
    int32_t* positions = data<int32_t>(*order);
    const auto [least, largest] = std::minmax_element(from, from + n);
    if (n == 0) return ffi::Error::Success();
    const Key base = static_cast<Key>(*least);
    Parallel parallel(pool);
    RadixSort<Position<Key>> sort(parallel, n, static_cast<Key>(static_cast<Key>(*largest) - base));
    parallel.for_each(sort.chunks(), [&](int64_t c) {
      for (int64_t i = sort.begin(c); i < sort.begin(c + 1); ++i) {
        const Key key = static_cast<Key>(from[i]) - base;
        sort.entries()[i] = {key, static_cast<uint32_t>(i)};
      }
    });
    const Position<Key>* entries = sort.sort();
    parallel.for_each(sort.chunks(), [&](int64_t c) {
      for (int64_t i = sort.begin(c); i < sort.begin(c + 1); ++i) {
        to[i] = static_cast<Row>(entries[i].key + base);
        positions[i] = static_cast<int32_t>(entries[i].position);
      }
    });
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace tpu_embed

XLA_FFI_DEFINE_HANDLER_SYMBOL(tpu_embed_zeros, tpu_embed::zeros,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(tpu_embed_gather_rows, tpu_embed::gather_rows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(tpu_embed_set_rows, tpu_embed::set_rows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(tpu_embed_sort_rows, tpu_embed::sort_rows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
