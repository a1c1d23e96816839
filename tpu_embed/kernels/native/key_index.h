// Where keys of 64 bits stand: a hash table of positions, of four bytes for each slot.
#ifndef TPU_EMBED_KEY_INDEX_H_
#define TPU_EMBED_KEY_INDEX_H_

#include <algorithm>
#include <cstdint>

#include "hash_secret.h"
#include "memory.h"

namespace tpu_embed {

// The numbers that open addressing needs of a key: every bit depends on every bit of the key, and on
// the secret of the process. Without it nobody can choose keys that stand in each other's way, which
// would make a batch of n keys cost n * n. No result depends on where a key stands.
inline uint64_t hash_of(uint64_t key) {
  // The halves of a product of 128 bits, added: a multiplication and a shift of 64 in one.
  const unsigned __int128 product =
      static_cast<unsigned __int128>(key ^ kHashSecret.added) * kHashSecret.factor;
  const uint64_t folded = static_cast<uint64_t>(product >> 64) ^ static_cast<uint64_t>(product);
  const uint64_t mixed = folded * 0x94D049BB133111EBu;
  return mixed ^ (mixed >> 32);
}

// Finds the position of a key. The keys themselves stand in an array of the owner, which gives a
// function from positions to keys; a slot holds a position, and beside it how far the slot is from
// the one that the hash names, and as many bits of the hash as there is room for. So a slot of
// another key is mostly passed, or moved, without a look at that key.
//
// With positions below 100, which take 7 bits, a slot is 22 bits of the hash, 3 bits of distance,
// then position + 1. Keys are looked for from the slot that their hash names onwards, up to an empty
// slot.
class KeyIndex {
 public:
  static constexpr int64_t kNone = -1;

  // Args: slots, more than there are ever keys; a number above all positions, below 2^32.
  explicit KeyIndex(int64_t slots = 1, uint64_t positions = 0) : slots_(slots) {
    while (position_mask_ < positions) position_mask_ = 2 * position_mask_ + 1;
    if (position_mask_ < (uint32_t{1} << 29)) far_ = 7 * (position_mask_ + 1);
    hash_mask_ = ~(position_mask_ | far_);
  }

  int64_t bytes() const { return slots_.bytes(); }

  void prefetch(uint64_t hash) const { __builtin_prefetch(&slots_[home(hash)]); }

  // Returns a position at which the key of this hash may stand, to prefetch what is there.
  int64_t guess(uint64_t hash) const {
    for (int64_t slot = home(hash); slots_[slot]; slot = after(slot)) {
      if (may_be(slot, hash)) return position(slot);
    }
    return kNone;
  }

  template <typename KeyAt>
  int64_t find(uint64_t key, uint64_t hash, const KeyAt& key_at) const {
    for (int64_t slot = home(hash); slots_[slot]; slot = after(slot)) {
      if (may_be(slot, hash) && key_at(position(slot)) == key) return position(slot);
    }
    return kNone;
  }

  // Calls run(position) for all keys, in no order that means anything.
  template <typename Run>
  void for_each(const Run& run) const {
    for (int64_t slot = 0; slot < slots_.size(); ++slot) {
      if (slots_[slot]) run(position(slot));
    }
  }

  // Adds a key that is not here.
  void insert(uint64_t hash, int64_t position) {
    int64_t slot = home(hash), distance = 0;
    for (; slots_[slot]; ++distance) slot = after(slot);
    slots_[slot] = mark(hash) | at_distance(distance) | static_cast<uint32_t>(position + 1);
  }

  // Removes a key that is here; the keys of all positions must still stand there.
  template <typename KeyAt>
  void erase(uint64_t hash, int64_t position, const KeyAt& key_at) {
    int64_t hole = home(hash);
    while (this->position(hole) != position) hole = after(hole);
    // Keys behind the hole move into it, unless their search begins behind it: then no empty slot
    // lies between the beginning of a search and its key.
    int64_t back = 1;  // from the slot to the hole
    for (int64_t slot = after(hole); slots_[slot]; slot = after(slot), ++back) {
      const uint32_t told = slots_[slot] & far_;
      int64_t walked = told / (position_mask_ + 1);
      if (told == far_) {  // that far, or farther
        walked = distance(home(hash_of(key_at(this->position(slot)))), slot);
      }
      if (walked < back) continue;
      slots_[hole] = (slots_[slot] & ~far_) | at_distance(walked - back);
      hole = slot;
      back = 0;
    }
    slots_[hole] = 0;
  }

 private:
  int64_t home(uint64_t hash) const {  // the upper half of the hash, scaled to [0, slots)
    return static_cast<int64_t>((hash >> 32) * static_cast<uint64_t>(slots_.size()) >> 32);
  }
  int64_t after(int64_t slot) const { return slot + 1 == slots_.size() ? 0 : slot + 1; }
  int64_t distance(int64_t from, int64_t to) const {
    return to >= from ? to - from : to - from + slots_.size();
  }
  uint32_t at_distance(int64_t distance) const {
    return static_cast<uint32_t>(std::min<int64_t>(distance, 7)) * (position_mask_ + 1) & far_;
  }
  uint32_t mark(uint64_t hash) const { return static_cast<uint32_t>(hash) & hash_mask_; }
  bool may_be(int64_t slot, uint64_t hash) const {
    return (slots_[slot] & hash_mask_) == mark(hash);
  }
  int64_t position(int64_t slot) const {
    return static_cast<int64_t>(slots_[slot] & position_mask_) - 1;
  }

  Zeros<uint32_t> slots_;
  uint32_t position_mask_ = 1;
  uint32_t far_ = 0;  // the bits of the distance, all set: far; none, if there is no room for them
  uint32_t hash_mask_ = 0;
};

}  // namespace tpu_embed

#endif  // TPU_EMBED_KEY_INDEX_H_
