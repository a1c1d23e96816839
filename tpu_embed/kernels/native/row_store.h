// Rows at home in the host's memory, or in a scratch file: whoever has an id finds its row.
#ifndef TPU_EMBED_ROW_STORE_H_
#define TPU_EMBED_ROW_STORE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "key_index.h"
#include "memory.h"

namespace tpu_embed {

// Memory of a fixed size that is given back to the system as a whole: of its own, or of a file.
class Segment {
 public:
  // Args: a file, -1 for memory; where in the file. Throws std::bad_alloc, or std::system_error if
  // the file cannot have so many bytes.
  Segment(int file, int64_t offset, int64_t bytes);
  Segment(Segment&& other) noexcept : begin_(other.begin_), bytes_(other.bytes_) {
    other.begin_ = nullptr;
  }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  char* begin() const { return begin_; }

 private:
  char* begin_;
  int64_t bytes_;
};

// A row has several fields, such as the values of a table and each of its slots: some bytes each.
//
//   ids      9 4 . 7      a dot is a free place
//   place    0 1 2 3
//   rows     |values slot|values slot|…      places of one segment are next to each other
//
// The first segment is small, so that a small table takes little; each next one has as many rows as
// all before it, up to full segments. With a first one of 2 rows and full ones of 8:
//
//   place    0 1 | 2 3 | 4 5 6 7 | 8 … 15 | 16 … 23 | …
//
// The index is cut into parts, by hash, so that none takes long to grow. Calls may come from any
// threads; a row must not be read while it is written, nor written twice at once.
class RowStore {
 public:
  static constexpr int64_t kParts = 256;
  static constexpr int64_t kMostRows = (int64_t{1} << 32) - 2;

  // Args: the bytes of each field; a file that nobody else uses, or -1; it is closed at the end.
  RowStore(const int64_t* widths, int64_t fields, int file);
  ~RowStore();

  int64_t size() const;
  int64_t index_bytes() const;  // of index, ids and marks
  int64_t row_bytes() const;    // of all segments
  int64_t places() const;       // places that were ever used since the last `compact`

  // Writes rows, of distinct ids, and marks them; what was not here is added. Throws
  // std::bad_alloc or std::system_error; nothing has changed then.
  // Args: fields: for each, vectors of its bytes; at: which of them are the row of each id, null for
  // 0, 1, ….
  void write(const uint64_t* ids, int64_t n, const char* const* fields, const int64_t* at,
             uint32_t mark);

  // Reads the row of each id that is here into its place in the fields, and sets found.
  void read(const uint64_t* ids, int64_t n, char* const* fields, const int64_t* at,
            bool* found) const;

  // Sets found to whether each id is here.
  void find(const uint64_t* ids, int64_t n, bool* found) const;

  // Removes the ids that are here; returns how many were.
  int64_t remove(const uint64_t* ids, int64_t n);

  // Lists the ids whose mark is at least this one, in order of their places, as far as there is
  // room for them; returns how many there are.
  int64_t list(uint32_t mark, uint64_t* ids, int64_t most) const;

  // Moves rows from the last places to free ones, and gives the segments without rows back.
  void compact();

 private:
  struct Part {
    KeyIndex index;
    int64_t slots = 1, size = 0;
    uint64_t positions = 0;  // the index can hold positions below
  };
  // What the places of a segment hold beside the row: mark 0 is a free place.
  struct Heads {
    explicit Heads(int64_t n) : ids(n), marks(n) {}
    Zeros<uint64_t> ids;
    Zeros<uint32_t> marks;
  };

  // Where a place is: its segment, and its row among those of the segment.
  struct At {
    int64_t segment, row;
  };
  At at(int64_t place) const {
    if (place > mask_) return {(place >> shift_) + doublings_, place & mask_};
    const int64_t times = place >> first_shift_;  // how many first segments stand before it
    if (times == 0) return {0, place};
    const int64_t segment = 64 - __builtin_clzll(times);
    return {segment, place - begin_of(segment)};
  }
  // The first place of a segment, which is also how many places the segments before it have.
  int64_t begin_of(int64_t segment) const {
    if (segment > doublings_) return (segment - doublings_) << shift_;
    return segment == 0 ? 0 : int64_t{1} << (first_shift_ + segment - 1);
  }
  int64_t segments() const { return static_cast<int64_t>(segments_.size()); }
  uint64_t& id_at(int64_t place) {
    const At it = at(place);
    return heads_[it.segment].ids[it.row];
  }
  const uint64_t& id_at(int64_t place) const {
    const At it = at(place);
    return heads_[it.segment].ids[it.row];
  }
  char* row_at(int64_t place) const {
    const At it = at(place);
    return segments_[it.segment].begin() + it.row * row_width_;
  }
  uint32_t& mark_at(int64_t place) {
    const At it = at(place);
    return heads_[it.segment].marks[it.row];
  }
  uint32_t mark_at(int64_t place) const {
    const At it = at(place);
    return heads_[it.segment].marks[it.row];
  }
  // By the lowest bits of a hash: an index needs the upper half, and those above its positions.
  Part& part_of(uint64_t hash) { return parts_[hash % kParts]; }
  const Part& part_of(uint64_t hash) const { return parts_[hash % kParts]; }

  void places_of(const uint64_t* ids, int64_t n, int64_t* places) const;
  void reserve(int64_t more);
  void make_room(Part& part, int64_t more, int64_t places);
  void make_index(Part& part, int64_t slots, uint64_t positions);
  void insert(uint64_t id, int64_t place);
  void erase(uint64_t id, int64_t place);
  int64_t free_place();
  template <typename Copy>
  void for_each_row(const int64_t* places, int64_t n, const Copy& copy) const;

  std::vector<int64_t> widths_;
  int64_t row_width_;
  int64_t shift_, mask_;  // a full segment has 1 << shift_ rows
  int64_t first_shift_;   // the first one has 1 << first_shift_ rows
  int64_t doublings_;     // the first full segment has number doublings_ + 1
  const int file_;
  std::vector<Segment> segments_;
  std::vector<Heads> heads_;
  std::vector<Part> parts_;
  std::vector<uint32_t> free_;  // places below top_ without a row; the last one is taken first
  int64_t top_ = 0;             // all places from here on are free
  mutable std::shared_mutex mutex_;
};

}  // namespace tpu_embed

#endif  // TPU_EMBED_ROW_STORE_H_
