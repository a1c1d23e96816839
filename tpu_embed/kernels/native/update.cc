// One training update of a table in place: sort the ids, sum each row's gradients, apply the rule.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>
#include <vector>

#include "buffers.h"
#include "loops.h"
#include "parallel.h"
#include "pieces.h"
#include "sort.h"

namespace tpu_embed {
namespace {

constexpr int64_t kEntriesPerTask = 256;
constexpr int64_t kCommonNumbers = 5;  // keep, and the bounds of gradients and weights

void run(const RowUpdate& job, const Entries<uint32_t>& entries, float* scratch) {
  loops().update_32(job, entries, scratch);
}

void run(const RowUpdate& job, const Entries<uint64_t>& entries, float* scratch) {
  loops().update_64(job, entries, scratch);
}

// The ids of a batch, by position; or, where the host has routed them, entries sorted by row.
template <typename Row>
struct Ids {
  const Row* rows;           // of ids, or, with sums, of merged sums
  const int32_t* bags;       // null: position i has bag i
  const float* weights;      // null: all ones
  const int32_t* sums;       // the partial sum of each entry, non-decreasing; null: not routed
  const int32_t* merged;     // the merged sum of each partial sum; null: they are the same
  int64_t n, count;          // ids; bags
  int64_t partials, totals;  // lengths of merged and, with sums, of rows

  static bool below(int64_t position, int64_t length) {
    return static_cast<uint64_t>(position) < static_cast<uint64_t>(length);
  }

  // Returns the row of an id, or -1 if it has none.
  int64_t row(int64_t i) const {
    if (sums == nullptr) return rows[i];
    // Numbers that are read are positions, and may be any: as unsigned ones, negative ones are too
    // large, too.
    int64_t sum = sums[i];
    if (merged != nullptr) sum = below(sum, partials) ? merged[sum] : totals;
    return below(sum, totals) ? int64_t{rows[sum]} : -1;
  }
};

// Positions of ids that are taken one range after the other: by block, then by feature, so that the
// ids of one row, sorted stably, are in the order in which their gradients are added.
class Order {
 public:
  void add(int64_t begin, int64_t end) {
    if (begin >= end) return;
    begins_.push_back(begin);
    ends_.push_back(count() + end - begin);
  }
  int64_t count() const { return ends_.empty() ? 0 : ends_.back(); }

  // Calls call(position) for numbers [first, last) of the positions.
  template <typename Call>
  void for_each(int64_t first, int64_t last, const Call& call) const {
    size_t range = std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin();
    for (; first < last; ++range) {
      const int64_t before = range == 0 ? 0 : ends_[range - 1];
      const int64_t stop = std::min(last, ends_[range]);
      for (; first < stop; ++first) call(begins_[range] + first - before);
    }
  }

 private:
  std::vector<int64_t> begins_, ends_;  // ends_: how many positions there are up to a range's end
};

// Returns the order of ids whose bags do not descend.
template <typename Row>
Order order_of(const Ids<Row>& ids, const PieceTable<const float>& table) {
  Order order;
  if (ids.sums != nullptr || table.blocks() == 1) {
    order.add(0, ids.n);
    return order;
  }
  const auto first = [&](int64_t bag) {
    if (ids.bags == nullptr) return std::min(bag, ids.n);
    const int32_t* at = std::lower_bound(ids.bags, ids.bags + ids.n, bag);
    return static_cast<int64_t>(at - ids.bags);
  };
  table.for_each([&](int64_t begin, int64_t end) { order.add(first(begin), first(end)); });
  return order;
}

// Updates the rows of all ids; ids outside [0, table_rows) are left out.
template <typename Row>
void update_rows(Parallel parallel, const RowUpdate& job, const Ids<Row>& ids, const Order& order,
                 int64_t table_rows) {
  using Key = std::make_unsigned_t<Row>;
  const int64_t n = order.count();
  const auto bag_of = [&](int64_t i) { return ids.bags == nullptr ? i : int64_t{ids.bags[i]}; };
  const auto counts = [&](int64_t i) {
    const int64_t row = ids.row(i), bag = bag_of(i);
    return row >= 0 && row < table_rows && bag >= 0 && bag < ids.count;
  };
  // Absent ids go first: on one of many devices, most of them.
  const int64_t chunks = sort_chunks(parallel, n);
  const auto each = [&](int64_t c, const auto& call) {
    order.for_each(n * c / chunks, n * (c + 1) / chunks, call);
  };
  std::vector<int64_t> kept(chunks + 1);
  parallel.for_each(chunks, [&](int64_t c) {
    int64_t mine = 0;
    each(c, [&](int64_t i) { mine += counts(i); });
    kept[c + 1] = mine;
  });
  std::partial_sum(kept.begin(), kept.end(), kept.begin());
  const int64_t present = kept[chunks];
  RadixSort<Contribution<Key>> sort(parallel, present, static_cast<uint64_t>(table_rows));
  const bool routed = ids.sums != nullptr;
  Scratch<int32_t> sums(routed ? present : 0);
  parallel.for_each(chunks, [&](int64_t c) {
    int64_t to = kept[c];
    each(c, [&](int64_t i) {
      if (!counts(i)) return;
      const float weight = ids.weights == nullptr ? 1.0f : ids.weights[i];
      if (routed) sums[to] = ids.sums[i];
      sort.entries()[to++] = {static_cast<Key>(ids.row(i)), static_cast<uint32_t>(bag_of(i)), weight};
    });
  });
  // Routed entries are sorted already.
  const Contribution<Key>* entries = routed ? sort.entries() : sort.sort();
  const Entries<Key> sorted{entries, routed ? sums.data() : nullptr, present};
  const int64_t tasks = parallel.tasks(present, kEntriesPerTask);
  // A task's share begins where a row begins: at the first entry of the row that stands there.
  const auto start = [&](int64_t task) {
    int64_t i = present * task / tasks;
    while (i > 0 && i < present && entries[i].key == entries[i - 1].key) ++i;
    return i;
  };
  parallel.for_each(tasks, [&](int64_t task) {
    const int64_t begin = start(task), end = start(task + 1);
    if (begin == end) return;
    Scratch<float> scratch(3 * job.dim);
    run(job, sorted.part(begin, end - begin), scratch.data());
  });
}

Rule rule_of(int64_t kind, int64_t flags, const float* numbers) {
  const auto bounded = [&](int low) {
    return !std::isinf(numbers[low]) || !std::isinf(numbers[low + 1]);
  };
  return {static_cast<RuleKind>(kind), flags,      numbers[0], numbers[1], numbers[2],
          numbers[3],                  numbers[4], bounded(1), bounded(3), numbers + kCommonNumbers};
}

struct Operand {
  ffi::AnyBuffer rows, bags, weights, sums, merged, blocks, draws, drawn_numbers, numbers;
};

constexpr size_t kOperands = 9;  // besides tables, slots and gradients

// Returns whether the operands of rounding at random are absent, or fit the table and its rows.
bool can_draw(const Operand& operand, const ffi::AnyBuffer& table, size_t firsts, size_t steps) {
  if (operand.draws.element_count() == 0) return operand.drawn_numbers.element_count() == 0;
  return storage_of(table) == Storage::kBfloat16 && firsts > 0 && steps == firsts &&
         operand.draws.element_count() == 1 + firsts &&
         optional_of_length(operand.drawn_numbers, length(table));
}

// Operands: table [R, D] and its slots, each in place of the result of the same number; rows [N];
// bags int32 [N] or []; weights float32 [N] or []; sums int32 [N] or [], then rows are [U]; merged
// int32 [P] or []; blocks int32 [features * (G - 1)] or [], for each feature the first bags of the
// second block of the batch and of all later ones; draws uint32 [1 + tables], the shard and the
// tables' numbers, or [], then new rows are rounded to nearest; drawn_numbers uint32 [R] or [];
// numbers float32; gradients, one array a feature, float32 [bags, D]. Rounds: whether partial sums
// are rounded to bfloat16.
ffi::Error update(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results,
                  ffi::Span<const int64_t> bags, int64_t rule, int64_t flags, int64_t rounds,
                  ffi::Span<const int64_t> firsts, ffi::Span<const int64_t> shard_steps,
                  int64_t row_step) {
  const size_t held = results.size();
  const size_t features = bags.size();
  if (held < 1 || held > 3 || operands.size() != held + kOperands + features) {
    return refuse("update: another number of operands");
  }
  std::vector<ffi::AnyBuffer> given;
  for (size_t i = 0; i < operands.size(); ++i) {
    auto operand = operands.get<ffi::AnyBuffer>(i);
    if (!operand.has_value()) return operand.error();
    given.push_back(*operand);
  }
  for (size_t i = 0; i < held; ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return result.error();
    if ((**result).untyped_data() != given[i].untyped_data()) return refuse("update: not in place");
    if (length(given[i]) != length(given[0])) return refuse("update: slots of another length");
  }
  const Operand operand{given[held],     given[held + 1], given[held + 2], given[held + 3],
                        given[held + 4], given[held + 5], given[held + 6], given[held + 7],
                        given[held + 8]};
  const ffi::AnyBuffer& table = given[0];
  const bool routed = operand.sums.element_count() > 0;
  const int64_t n = length(routed ? operand.sums : operand.rows), dim = table.dimensions()[1];
  const size_t starts = operand.blocks.element_count();
  if (features == 0 ? starts != 0 : starts % features != 0) {
    return refuse("update: as many blocks of each feature are needed");
  }
  const int64_t later = features == 0 ? 0 : static_cast<int64_t>(starts / features);
  PieceTable<const float> table_of_bags(bags, data<int32_t>(operand.blocks), later);
  const int64_t count = table_of_bags.bags();
  if (!optional_of_length(operand.bags, n) || !optional_of_length(operand.weights, n) ||
      (operand.bags.element_count() == 0 && n > count)) {
    return refuse("update: ids, bags or weights of another length");
  }
  if (!can_draw(operand, table, firsts.size(), shard_steps.size())) {
    return refuse("update: draws of other tables, or of a table that is not bfloat16");
  }
  std::vector<const float*> gradients;
  for (size_t f = 0; f < features; ++f) {
    const ffi::AnyBuffer& gradient = given[held + kOperands + f];
    if (static_cast<int64_t>(gradient.element_count()) != bags[f] * dim) {
      return refuse("update: gradients of another size than their feature");
    }
    gradients.push_back(data<float>(gradient));
  }
  RowUpdate job{};
  job.table = table.untyped_data();
  job.storage = storage_of(table);
  for (size_t s = 1; s < held; ++s) job.slots[s - 1] = data<float>(given[s]);
  job.gradients = table_of_bags.of(gradients);
  job.dim = dim;
  job.rounds = rounds != 0;
  if (const uint32_t* draws = optional<uint32_t>(operand.draws)) {
    job.draws = {draws + 1, firsts.begin(), shard_steps.begin(), static_cast<int64_t>(firsts.size()),
                 row_step,  draws[0],       optional<uint32_t>(operand.drawn_numbers)};
  }
  job.rule = rule_of(rule, flags, data<float>(operand.numbers));
  return with_row_type(operand.rows, [&](auto* type) {
    using Row = std::remove_pointer_t<decltype(type)>;
    const Ids<Row> ids{data<Row>(operand.rows), optional<int32_t>(operand.bags),
                       optional<float>(operand.weights), optional<int32_t>(operand.sums),
                       optional<int32_t>(operand.merged), n, count,
                       length(operand.merged), length(operand.rows)};
    update_rows(Parallel(pool), job, ids, order_of(ids, table_of_bags), length(table));
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace tpu_embed

XLA_FFI_DEFINE_HANDLER_SYMBOL(tpu_embed_update, tpu_embed::update,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Span<const int64_t>>("bags")
                                  .Attr<int64_t>("rule")
                                  .Attr<int64_t>("flags")
                                  .Attr<int64_t>("rounds")
                                  .Attr<xla::ffi::Span<const int64_t>>("firsts")
                                  .Attr<xla::ffi::Span<const int64_t>>("shard_steps")
                                  .Attr<int64_t>("row_step"));
