// What is sorted by row.
#ifndef TPU_EMBED_ENTRY_H_
#define TPU_EMBED_ENTRY_H_

#include <cstdint>

namespace tpu_embed {

// A row, as an unsigned number, and the position that it came from.
template <typename Row>
struct Position {
  using Key = Row;
  Key key;
  uint32_t position;
};

// A row, and the bag whose gradient it gets, times a weight. They travel together: looked up after
// the sort, bags and weights would each cost a miss in the cache that nothing can hide.
template <typename Row>
struct Contribution {
  using Key = Row;
  Key key;
  uint32_t bag;
  float weight;
};

}  // namespace tpu_embed

#endif  // TPU_EMBED_ENTRY_H_
