// Vectors of float as wide as the compiled-for CPU has them, in the compiler's own vector types: one source
// for AVX-512, AVX2, SSE and NEON. No arithmetic here depends on how many rows or threads a caller has.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__)  // without it, GCC's builtins: the header takes 0.4 s to compile
#include <immintrin.h>
#endif

// Linkage of the functions that the binding calls.
#define CAROUSEL_EXPORT extern "C" __attribute__((visibility("default")))

namespace carousel {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vfloat __attribute__((vector_size(kLanes * 4)));
typedef int32_t vint __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vuint __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vhalf __attribute__((vector_size(kLanes * 2)));

#if defined(__AVX2__)
typedef int16_t vshort8 __attribute__((vector_size(16)));
#else
typedef uint16_t vhalves __attribute__((vector_size(16)));

// Appends zeros. Interleaved with zeros, a vector is widened by one shuffle, where GCC 12 uses five instructions for
// SSE2 and single elements for NEON.
inline vhalves padded(vhalf half) {
  typedef uint64_t vwide __attribute__((vector_size(16)));
  return (vhalves)vwide{(uint64_t)half, 0};
}
#endif

struct bf16 {
  uint16_t bits;
};

struct fp16 {
  uint16_t bits;
};

enum DType : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// Calls body(T()) for the type of a call's elements. CAROUSEL_DTYPE is the model's, if that is known. Then only this
// type and float32, the type of logits in any model, are compiled.
template <class Body>
inline void with_dtype(int32_t dtype, const Body& body) {
  if (dtype == kFloat32) return body(float());
#if !defined(CAROUSEL_DTYPE) || CAROUSEL_DTYPE == 1
  if (dtype == kBfloat16) return body(bf16());
#endif
#if !defined(CAROUSEL_DTYPE) || CAROUSEL_DTYPE == 2
  if (dtype == kFloat16) return body(fp16());
#endif
}

// x - 0 is x for all x, so the compiler removes it. x + 0 is not x for -0.
inline vfloat splat(float x) { return x - vfloat{}; }

inline vfloat load(const float* p) {
  vfloat x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// Elements of 16 bits as the upper halves of words whose lower halves are zeros.
inline vuint upper_halves(vhalf half) {
#if defined(__AVX512F__)
  // One instruction, for which the compiler uses four of half the width.
  return (vuint)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#elif defined(__AVX2__) && !defined(__clang__)
  return (vuint)(__builtin_ia32_pmovzxwd256((vshort8)half) << 16);  // likewise
#elif defined(__AVX2__)
  return __builtin_convertvector(half, vuint) << 16;
#else
  return (vuint)__builtin_shufflevector(vhalves{}, padded(half), 0, 8, 1, 9, 2, 10, 3, 11);
#endif
}

// The upper halves of words.
inline vhalf halves_of(vuint words) {
#if defined(__SSE2__) && !defined(__AVX2__)
  // One instruction, for which the compiler uses four. As signed numbers all fit into 16 bits.
  const vint upper = (vint)words >> 16;
  const auto half = __builtin_ia32_packssdw128(upper, upper);
  vhalf first;
  std::memcpy(&first, &half, sizeof first);
  return first;
#else
  return __builtin_convertvector(words >> 16, vhalf);
#endif
}

inline vfloat load(const bf16* p) {
  vhalf half;
  std::memcpy(&half, p, sizeof half);
  return (vfloat)upper_halves(half);
}

// Exact, also for infinity and NaN.
inline vfloat load(const fp16* p) {
  vhalf half;
  std::memcpy(&half, p, sizeof half);
#if defined(__AVX512F__)
  return (vfloat)_mm512_cvtph_ps((__m256i)half);
#elif defined(__F16C__)
  return (vfloat)__builtin_ia32_vcvtph2ps256((vshort8)half);
#else
  const vint bits = (vint)upper_halves(half) >> 3 & (int32_t)0x8fffe000;  // all bits except the exponent are in place
  const vint above = (bits & 0xf800000) == 0xf800000;                   // infinity and NaN
  return (vfloat)((vint)((vfloat)bits * 0x1p112f) | (above & 0x7f800000));
#endif
}

inline void store(float* p, vfloat x) { std::memcpy(p, &x, sizeof x); }

// bf16 in the upper half of each element, rounded to nearest, ties to even; a NaN becomes the NaN of all ones. The
// lower half is undefined.
inline vuint rounded_upper_half(vfloat x) {
  const vuint bits = (vuint)x;
  return (bits + 0x7fff + (bits >> 16 & 1)) | (vuint)(x != x);
}

// Rounds as above. The instruction treats numbers below 2^-126 as 0.
inline void store(bf16* p, vfloat x) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(p, &half, sizeof half);
#else
  const vhalf half = halves_of(rounded_upper_half(x));
  std::memcpy(p, &half, sizeof half);
#endif
}

// Rounds to nearest, ties to even. Numbers from 65520 on become infinity, and NaN stays NaN.
inline void store(fp16* p, vfloat x) {
#if defined(__AVX512F__)
  const __m256i half = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  const auto half = __builtin_ia32_vcvtps2ph256(x, 0);
#else
  const vuint bits = (vuint)x;
  const vint size = (vint)(bits & 0x7fffffff);  // signed, as SSE2 compares
  const vint normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
  const vint subnormal = (vint)((vfloat)size + 0.5f) - 0x3f000000;  // whose last bit is worth 2^-24 beside 0.5
  vint rounded = size < 0x38800000 ? subnormal : normal;
  rounded = size < 0x477ff000 ? rounded : vint{} + 0x7c00;
  rounded = size > 0x7f800000 ? vint{} + 0x7e00 : rounded;
  const vhalf half = halves_of((vuint)(rounded << 16) | (bits & 0x80000000));
#endif
  std::memcpy(p, &half, sizeof half);
}

inline float to_float(float x) { return x; }

inline float to_float(fp16 x) {
  fp16 lanes[kLanes] = {x};
  return load(lanes)[0];
}

inline float to_float(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// x rounded to T.
template <class T>
inline vfloat rounded_to(vfloat x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
#if !defined(__AVX512BF16__)
  } else if constexpr (std::is_same_v<T, bf16>) {
    return (vfloat)(rounded_upper_half(x) & 0xffff0000);
#endif
  } else {
    T narrow[kLanes];
    store(narrow, x);
    return load(narrow);
  }
}

inline vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }

inline float max_of(vfloat x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float best = x[0];
  for (int i = 1; i < kLanes; ++i) best = best > x[i] ? best : x[i];
  return best;
#endif
}

inline float sum_of(vfloat x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = x[0];
  for (int i = 1; i < kLanes; ++i) total += x[i];
  return total;
#endif
}

// e^x to about one unit in the last place; 0 below -87.3, where the result would not be a normal number, and
// e^88 above 88.
inline vfloat exp(vfloat x) {
  constexpr float kLowest = -87.3f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  vfloat y = x > kLowest ? x : splat(kLowest);
  y = y < 88.0f ? y : splat(88.0f);
  const vfloat shifted = y * 1.44269504088896341f + kRound;
  const vfloat n = shifted - kRound;
  vfloat f = y - n * 0.693359375f;  // ln 2 in two parts: the first has few bits, so its product is exact
  f = f - n * -2.12194440e-4f;
  vfloat p = f * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + f + 1.0f;
  const vint power = ((vint)shifted - 0x4b400000 + 127) << 23;
  const vfloat value = p * (vfloat)power;
  return x < kLowest ? vfloat{} : value;
}

// tanh x, to about 1e-7 of 1: near 0 it loses relative precision, which a capped score does not need.
inline vfloat tanh(vfloat x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

template <int... I>
inline vfloat zip_low(vfloat a, vfloat b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I % 2) * kLanes + I / 2)...);
}

template <int... I>
inline vfloat zip_high(vfloat a, vfloat b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I % 2) * kLanes + kLanes / 2 + I / 2)...);
}

// Transposes kLanes x kLanes elements of 32 bits of any type: log2(kLanes) perfect shuffles.
inline void transpose(vfloat (&row)[kLanes]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
#pragma GCC unroll 4
  for (int width = 1; width < kLanes; width *= 2) {
    vfloat next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = zip_low(row[i], row[i + kLanes / 2], lanes);
      next[2 * i + 1] = zip_high(row[i], row[i + kLanes / 2], lanes);
    }
    std::memcpy(row, next, sizeof next);
  }
}

}  // namespace carousel
