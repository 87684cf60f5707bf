// Products of a linear layer. W and x are taken 32 bits at a time:
//
//   Product          a word of packed W   a unit of x and of widened W   a sum
//   Floats           one float32          one float32                    float32
//   Widened<T>       two of T, 16 bits    one float32                    float32
//   Bf16Pairs        two bf16             two bf16                       float32    AVX512-BF16
//   ByteQuads        four int8            four uint8 of x                int32      VNNI
//   SignedQuads      four int8            four int8, and magnitudes      int32      AVX2, one row
//   BytePairs        four int8            two int16                      int32
//   UpperBytePairs   four int8            two int16                      int32      SSE2, one row
//
// units_of gives units of a panel's words from a lane on. A widened word becomes two, which `Plain` multiplies.
// x of int8 has 128 added, because VNNI multiplies unsigned by signed; kOffset times the sum of W's row is
// subtracted at the end. Sums of int32 are exact: no instruction saturates, and k is at most 2^16.
#pragma once

#include <cstdint>
#include <cstring>

#include "panels.h"
#include "simd.h"

#if defined(__AVXVNNI__)
#include <immintrin.h>
#endif

namespace carousel {

// Number of vectors of sums in the 32 or 16 registers. If W is widened beside them, the registers for that must fit,
// too: with 12 of 16 it computes a quarter slower (GCC 12).
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSumRegisters = 24, kSumRegistersInPlace = 24;
#else
constexpr int kSumRegisters = 12, kSumRegistersInPlace = 10;
#endif

constexpr int kMaxPanels = 4;  // whose sums are in registers together
constexpr int kTaskRows = 96;  // maximum of a task

inline vuint load_words(const uint32_t* words) {
  vuint bits;
  std::memcpy(&bits, words, sizeof bits);
  return bits;
}

// Product whose words of W are units: the vector of its sums, its unit, and the number of elements of k in a unit.
template <class Product, class S, class U, int depth>
struct PlainProduct {
  using Sum = S;
  using Unit = U;
  using Plain = Product;
  static constexpr int kUnits = 1;  // in a word
  static constexpr int kDepth = depth;
  static constexpr int kSums = kSumRegisters;  // maximum number of vectors of sums in registers
  static constexpr int kPanels = kMaxPanels;
  static constexpr int kOffset = 128;  // for int8: offset that is still added to x
  static constexpr int kExactWords = 0;  // maximum whose sums fit; 0: no limit

  template <int>
  static S units_of(const uint32_t* words, int lane) {
    return (S)load_words(words + lane);
  }
};

struct Floats : PlainProduct<Floats, vfloat, float, 1> {
  static vfloat add(vfloat sum, vfloat w, float x) { return sum + w * x; }

  template <class T>
  static void widen_x(const T* x, int size, float* units) {
    int c = 0;
    for (; c + kLanes <= size; c += kLanes) store(units + c, load(x + c));
    for (; c < size; ++c) units[c] = to_float(x[c]);
  }
};

template <class T>
struct Widened : Floats {
  static constexpr int kUnits = 2;
  static constexpr int kSums = kSumRegistersInPlace;

  template <int unit>
  static vfloat units_of(const uint32_t* words, int lane) {
    if constexpr (std::is_same_v<T, fp16>) return load((const fp16*)words + unit * kPanel + lane);
    const vuint bits = load_words(words + lane);
    return (vfloat)(unit == 0 ? bits << 16 : bits & 0xffff0000u);
  }
};

#if defined(__AVX512BF16__)

struct Bf16Pairs : PlainProduct<Bf16Pairs, vfloat, int32_t, 2> {
  static vfloat add(vfloat sum, vfloat w, int32_t x) {
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)w);
  }
  static void widen_x(const bf16* x, int size, int32_t* units) { std::memcpy(units, x, size * sizeof(bf16)); }
};

#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

struct ByteQuads : PlainProduct<ByteQuads, vint, int32_t, 4> {
  static vint add(vint sum, vint w, int32_t x) {
#if defined(__AVX512VNNI__)
    return (vint)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(x), (__m512i)w);
#else
    return (vint)_mm256_dpbusd_avx_epi32((__m256i)sum, _mm256_set1_epi32(x), (__m256i)w);
#endif
  }
  static void widen_x(const uint8_t* x, int size, int32_t* units) { std::memcpy(units, x, size); }
};

#endif

typedef int16_t vshort __attribute__((vector_size(kLanes * 4)));

// The sums of both products of two pairs of int16.
inline vint multiply_pairs(vint a, vint b) {
#if defined(__AVX512BW__)
  return (vint)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return __builtin_ia32_pmaddwd256((vshort)a, (vshort)b);
#elif defined(__SSE2__)
  return __builtin_ia32_pmaddwd128((vshort)a, (vshort)b);
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)

struct SignedUnit {
  int32_t x;     // four int8
  int32_t size;  // their magnitudes
};

// W with the signs of x, times the unsigned magnitudes of x: two products of at most 127 * 127 are added without
// saturation. W has no -128, whose sign cannot be changed. For one row these are fewer instructions than widening
// takes; for more rows they are slower, since three of four go to the same units. One panel at a time is one stream of
// memory, which the processor prefetches itself: 25 to 30 GB/s on one core of an EPYC Zen 4, and 19 to 25 with explicit
// prefetches (2026-11).
struct SignedQuads : PlainProduct<SignedQuads, vint, SignedUnit, 4> {
  typedef char vbytes __attribute__((vector_size(32)));
  static constexpr int kOffset = 0;

  static vint add(vint sum, vint w, SignedUnit x) {
    const vbytes signed_w = __builtin_ia32_psignb256((vbytes)w, (vbytes)(vint{} + x.x));
    const auto pairs = (vshort)__builtin_ia32_pmaddubsw256((vbytes)(vint{} + x.size), signed_w);
    return sum + __builtin_ia32_pmaddwd256(pairs, vshort{} + (int16_t)1);
  }

  static void widen_x(const uint8_t* x, int size, SignedUnit* units) {
    typedef int8_t vquads __attribute__((vector_size(16)));
    typedef int32_t vwords __attribute__((vector_size(16)));
    for (int c = 0; c < size; c += 16, units += 4) {
      vquads bytes;
      std::memcpy(&bytes, x + c, sizeof bytes);
      bytes ^= (int8_t)-128;
      const vquads sizes = bytes < 0 ? -bytes : bytes;
      const vwords both[2] = {__builtin_shufflevector((vwords)bytes, (vwords)sizes, 0, 4, 1, 5),
                              __builtin_shufflevector((vwords)bytes, (vwords)sizes, 2, 6, 3, 7)};
      std::memcpy(units, both, sizeof both);
    }
  }
};

#endif

struct ShortPairs : PlainProduct<ShortPairs, vint, int32_t, 2> {
  static vint add(vint sum, vint w, int32_t x) { return sum + multiply_pairs(w, vint{} + x); }

  // Elements 0 and 2 of four, then 1 and 3, which shifts can extract from W.
  static void widen_x(const uint8_t* x, int size, int32_t* units) {
    for (int c = 0; c < size; c += 4, units += 2) {
      uint32_t word;
      std::memcpy(&word, x + c, sizeof word);
      units[0] = (int32_t)(word & 0x00ff00ff);
      units[1] = (int32_t)(word >> 8 & 0x00ff00ff);
    }
  }
};

// One panel at a time: with more, 2 rows take 1.5 times as long (GCC 12, AVX2, EPYC Zen 4, 2026-11).
struct BytePairs : ShortPairs {
  static constexpr int kUnits = 2;
  static constexpr int kSums = kSumRegistersInPlace;
  static constexpr int kPanels = 1;

  template <int unit>
  static vint units_of(const uint32_t* words, int lane) {
    const vshort bytes = (vshort)load_words(words + lane);
    return (vint)(unit == 0 ? bytes << 8 >> 8 : bytes >> 8);
  }
};

#if defined(__SSE2__) && !defined(__AVX2__)

// BytePairs times 2^kShift, for one row: bytes stay in the upper halves of their words, which takes a shift and a mask
// instead of three shifts. 256 products of 128 * 255 * 2^8 are below 2^31.
struct UpperBytePairs : ShortPairs {
  static constexpr int kUnits = 2;
  static constexpr int kExactWords = 64;
  static constexpr int kShift = 8;

  template <int unit>
  static vint units_of(const uint32_t* words, int lane) {
    const vuint bytes = load_words(words + lane);
    return unit == 0 ? (vint)((vshort)bytes << 8) : (vint)(bytes & 0xff00ff00);
  }
};

#endif

}  // namespace carousel
