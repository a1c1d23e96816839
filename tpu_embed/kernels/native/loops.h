// The loops over numbers, compiled once for each instruction set and chosen when they are called.
//
// Every variant computes the same bits: products and sums are rounded one by one
// (-ffp-contract=off), and the order of a sum does not depend on the width of a vector.
#ifndef TPU_EMBED_LOOPS_H_
#define TPU_EMBED_LOOPS_H_

#include <cstdint>

#include "entry.h"

namespace tpu_embed {

// How rows are stored; arithmetic is in float32.
enum class Storage { kFloat32, kBfloat16 };

// Bags of one feature and one block that follow each other. Bags are numbered feature after feature.
template <typename Number>
struct Piece {
  Number* array;       // of the feature, [bags, dim]
  int64_t start;       // the feature's first bag
  int64_t begin, end;  // the piece's
  int32_t block;
};

// Where the numbers of every bag lie.
template <typename Number>
struct Pieces {
  const Piece<Number>* all;
  const int32_t* first;  // the piece of bag i << shift
  int shift;

  // Returns the piece of a bag that there is.
  const Piece<Number>& of(int64_t bag) const {
    const Piece<Number>* piece = all + first[bag >> shift];
    while (bag >= piece->end) ++piece;
    return *piece;
  }

  // Returns the numbers of a bag.
  Number* at(int64_t bag, int64_t dim) const {
    const Piece<Number>& piece = of(bag);
    return piece.array + (bag - piece.start) * dim;
  }
};

// Weighted sums of gathered rows, a sum a segment.
template <typename Row>
struct GatherSum {
  const void* source;  // [rows, dim]
  Storage storage;
  int64_t rows;
  const Row* index;       // [entries], rows outside the source are left out
  const int64_t* starts;  // [segments + 1], the first entry of each segment, and the last one's end;
                          // null: every segment has `width` entries
  int64_t width;
  const float* weights;   // [entries] or null; an entry of weight zero adds nothing
  Pieces<float> outputs;
  int64_t dim;
  int64_t segments;

  // Returns whether the source has a row.
  bool has(int64_t row) const { return static_cast<uint64_t>(row) < static_cast<uint64_t>(rows); }

  // Returns the first entry of a segment, and the first of the one behind it.
  int64_t start(int64_t segment) const {
    return starts == nullptr ? segment * width : starts[segment];
  }
};

enum class RuleKind { kSgd, kMomentum, kAdagrad, kRowWiseAdagrad, kAdam, kFtrl };

// An optimizer's rule: its numbers, in the order that `loops.inc` reads them, and its switches.
struct Rule {
  RuleKind kind;
  int64_t flags;
  float keep;                          // 1 - weight decay
  float gradient_low, gradient_high;   // infinite: no clipping
  float weight_low, weight_high;
  bool clips_gradient, clips_weight;
  const float* numbers;
};

// What the random bits depend on with which new rows are rounded (`kernels/stochastic.py`).
struct Draws {
  const uint32_t* tables;      // [count], a number per table; null: rows are rounded to nearest
  const int64_t* firsts;       // [count], the first local row of each table
  const int64_t* shard_steps;  // [count], the table's first row on shard s + 1 minus that on shard s
  int64_t count;
  int64_t row_step;            // a row of a table minus the one before it on the same shard
  int64_t shard;
  const uint32_t* numbers;     // [rows] or null, of each row in the hash; null: its own number
};

// Rows to update with the sums of their gradients: within a block of the batch, then over blocks.
// Of routed entries the host has numbered the partial sums; of others the bags tell the blocks.
struct RowUpdate {
  void* table;  // [rows, dim]
  Storage storage;
  float* slots[2];        // [rows, dim]; [rows] for row-wise Adagrad's accumulators
  Pieces<const float> gradients;
  int64_t dim;
  bool rounds;  // whether the sum of a block, or a partial sum, is rounded to bfloat16
  Rule rule;
  Draws draws;
};

// Entries that are sorted by row.
template <typename Key>
struct Entries {
  const Contribution<Key>* at;  // [count]
  const int32_t* sums;          // [count], the partial sum of each, if they are routed; or null
  int64_t count;

  // Returns `count` entries from the first one on.
  Entries part(int64_t first, int64_t count) const {
    return {at + first, sums == nullptr ? nullptr : sums + first, count};
  }
};

// One instruction set's loops.
struct Loops {
  const char* name;
  // Write sums [begin, end).
  void (*gather_sum_32)(const GatherSum<int32_t>&, int64_t begin, int64_t end);
  void (*gather_sum_64)(const GatherSum<int64_t>&, int64_t begin, int64_t end);
  // Update the rows of sorted entries; a row's entries are all among them, absent rows are not.
  // `scratch` has room for 3 * dim numbers, for the rule that needs a whole gradient.
  void (*update_32)(const RowUpdate&, const Entries<uint32_t>&, float* scratch);
  void (*update_64)(const RowUpdate&, const Entries<uint64_t>&, float* scratch);
};

extern const Loops kBaseline;
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define TPU_EMBED_X86 1
extern const Loops kAvx2;
extern const Loops kAvx512;
#endif

// Returns the fastest loops that this machine runs.
const Loops& loops();

}  // namespace tpu_embed

#endif  // TPU_EMBED_LOOPS_H_
