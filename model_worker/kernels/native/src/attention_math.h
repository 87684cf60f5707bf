// Arithmetic of attention: the type of one element ("unit") of a packed block, and the product and sum of two
// units. FloatMath multiplies floats. Bf16PairMath multiplies two bf16 at a time, if the CPU can. Bf16TileMath
// (attention_tiles.h) multiplies whole tiles of those.
#pragma once

#include "simd.h"

namespace carousel {

struct NoShapes {};

template <class T>
struct FloatMath {
  using Stored = T;  // in the KV pool, in q and in the output
  using Unit = float;
  using Vector = vfloat;
  using Shapes = NoShapes;
  static constexpr int kPerUnit = 1;
  static constexpr int kKeysApart = 0;
  static constexpr bool kHasTiles = false;
  static constexpr int kUnitStep = 1;  // units of values beyond the last are zero up to a multiple of it

  static Vector broadcast(Unit x) { return splat(x); }
  static Vector load_units(const Unit* p) { return load(p); }
  static vfloat multiply_add(vfloat sum, Vector a, Vector b) { return a * b + sum; }

  // kLanes units that begin at stored element p.
  static vfloat units_of(const T* p) { return load(p); }
  static void store_units(Unit* to, vfloat values) { store(to, values); }

  // Weights of 2 * kLanes consecutive keys, in the order of the packed values.
  static void store_weights(Unit* to, vfloat low, vfloat high) {
    store(to, low);
    store(to + kLanes, high);
  }

  // One row of values [head_dim]; a unit holds the value of one key.
  static void pack_values(Unit* to, const T* row, const T*, int head_dim) {
    for (int c = 0; c < head_dim; c += kLanes) store(to + c, load(row + c));
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

// 16 pairs of elements of 16 bits: `first` and the one `apart` from it, then the next ones of both, and so on.
inline __m512i interleaving(int first, int apart) {
  const __m512i step = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i low = _mm512_add_epi32(step, _mm512_set1_epi32(first));
  return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(apart)), 16));
}

struct Bf16PairMath {
  using Stored = bf16;
  using Unit = uint32_t;  // two: adjacent dimensions of q and k; for weights and v, two keys that are kKeysApart
  using Vector = __m512bh;
  using Shapes = NoShapes;
  static constexpr int kPerUnit = 2;
  static constexpr int kKeysApart = 16;
  static constexpr bool kHasTiles = false;
  static constexpr int kUnitStep = 1;  // units of values beyond the last are zero up to a multiple of it

  static Vector broadcast(Unit x) { return (__m512bh)_mm512_set1_epi32((int)x); }
  static Vector load_units(const Unit* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static vfloat multiply_add(vfloat sum, Vector a, Vector b) {
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, a, b);
  }

  static vfloat units_of(const bf16* p) { return (vfloat)_mm512_loadu_si512(p); }

  // Rounds kLanes floats into kLanes / 2 units.
  static void store_units(Unit* to, vfloat values) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)values));
  }

  // Weights of 2 * kLanes consecutive keys, in the order of the packed values.
  static void store_weights(Unit* to, vfloat low, vfloat high) {
    const __m512i words = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(interleaving(0, 16), words));
  }

  // Two rows of values [head_dim], interleaved; a unit holds the values of two keys.
  static void pack_values(Unit* to, const bf16* row, const bf16* next, int head_dim) {
    const __m512i low = interleaving(0, 32);
    const __m512i high = interleaving(16, 32);
    for (int c = 0; c < head_dim; c += 32) {
      const __m512i a = _mm512_loadu_si512(row + c);
      const __m512i b = _mm512_loadu_si512(next + c);
      _mm512_storeu_si512(to + c, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(to + c + 16, _mm512_permutex2var_epi16(a, high, b));
    }
  }
};

#endif

}  // namespace carousel
