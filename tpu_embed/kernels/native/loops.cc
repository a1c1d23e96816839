// Compiles the loops for each instruction set, and chooses.
#include "loops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#ifdef TPU_EMBED_X86
#include <immintrin.h>
#endif

// Loops over a tile's vectors are unrolled, or the vectors would live in memory.
#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#pragma GCC diagnostic ignored "-Wuninitialized"  // _mm512_undefined_ps in GCC's own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define INLINED inline __attribute__((always_inline))

namespace tpu_embed {

namespace baseline {
#define LOOP_BYTES 16
#include "loops.inc"
#undef LOOP_BYTES
}  // namespace baseline

#define TPU_EMBED_TABLE(space, text)                                                        \
  {text, space::gather_sum<int32_t>, space::gather_sum<int64_t>, space::update<uint32_t>, \
   space::update<uint64_t>}

const Loops kBaseline = TPU_EMBED_TABLE(baseline, "baseline");

#ifdef TPU_EMBED_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace avx2 {
#define LOOP_BYTES 32
#include "loops.inc"
#undef LOOP_BYTES
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq")
#endif
namespace avx512 {
#define LOOP_BYTES 64
#include "loops.inc"
#undef LOOP_BYTES
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const Loops kAvx2 = TPU_EMBED_TABLE(avx2, "avx2");
const Loops kAvx512 = TPU_EMBED_TABLE(avx512, "avx512");

const Loops& loops() {
  static const Loops& chosen = __builtin_cpu_supports("avx512vl") &&
                                       __builtin_cpu_supports("avx512bw") &&
                                       __builtin_cpu_supports("avx512dq")
                                   ? kAvx512
                               : __builtin_cpu_supports("avx2") ? kAvx2
                                                                : kBaseline;
  return chosen;
}

#else

const Loops& loops() { return kBaseline; }

#endif

}  // namespace tpu_embed
