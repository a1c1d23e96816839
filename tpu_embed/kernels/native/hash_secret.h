// A random number of the process, so that nobody can know how it hashes keys.
#ifndef TPU_EMBED_HASH_SECRET_H_
#define TPU_EMBED_HASH_SECRET_H_

#include <chrono>
#include <cstdint>
#include <exception>
#include <random>

namespace tpu_embed {

struct HashSecret {
  uint64_t added;
  uint64_t factor;  // odd, with about half of its bits set

  static HashSecret draw() {
    const uint64_t added = random_bits();
    uint64_t factor = random_bits() | 1;
    // One number in a million has few bits set, or few that are not, and would mix badly.
    while (bits_set(factor) < 20 || bits_set(factor) > 44) factor = random_bits() | 1;
    return {added, factor};
  }

 private:
  static int bits_set(uint64_t x) {
    int count = 0;
    for (; x; x &= x - 1) ++count;
    return count;
  }

  static uint64_t random_bits() {
    try {
      std::random_device device;
      return static_cast<uint64_t>(device()) << 32 | static_cast<uint32_t>(device());
    } catch (const std::exception&) {  // a system without a source of random numbers
      static std::mt19937_64 engine(static_cast<uint64_t>(
          std::chrono::steady_clock::now().time_since_epoch().count()));
      return engine();
    }
  }
};

// Drawn when the library is loaded.
inline const HashSecret kHashSecret = HashSecret::draw();

}  // namespace tpu_embed

#endif  // TPU_EMBED_HASH_SECRET_H_
