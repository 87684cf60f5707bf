// What the programs that compare kernels with scalar loops have in common.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "simd.h"

CAROUSEL_EXPORT void carousel_pack_panels(void* weight, int64_t n, int64_t row_bytes, int32_t word_bytes,
                                          int32_t num_threads);

namespace check {

using carousel::bf16;
using carousel::fp16;
using Floats = std::vector<float>;

inline int num_checks = 0;

inline std::vector<float> normal(size_t size, int seed, float deviation = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution(0, deviation);
  std::vector<float> values(size);
  for (float& value : values) value = distribution(generator);
  return values;
}

template <class T>
constexpr carousel::DType kType = std::is_same_v<T, float>  ? carousel::kFloat32
                                  : std::is_same_v<T, bf16> ? carousel::kBfloat16
                                                            : carousel::kFloat16;

// To the nearest, ties to even.
template <class T>
T narrow(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, fp16>) {
    const double size = std::fabs((double)value);
    const int power = size > 0 ? std::max(std::ilogb(size), -14) : -14;
    const double steps = std::nearbyint(std::ldexp(size, 10 - power));
    const int bits = std::min((power + 14) * 1024 + (int)steps, 0x7c00);
    return fp16{(uint16_t)(bits | (std::signbit(value) ? 0x8000 : 0))};
  } else {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bf16{(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  }
}

template <class T>
std::vector<T> narrow(const Floats& values) {
  std::vector<T> out;
  for (float value : values) out.push_back(narrow<T>(value));
  return out;
}

template <class T>
std::vector<double> wide(const std::vector<T>& values) {
  std::vector<double> out;
  for (T value : values) out.push_back(carousel::to_float(value));
  return out;
}

template <class T>
constexpr double kStep = kType<T> == carousel::kBfloat16 ? 1.0 / 128 : kType<T> == carousel::kFloat16 ? 1.0 / 1024 : 1e-5;  // two roundings, or sums in another order

// Each value within `tolerance` of its size or of `scale`.
template <class T>
void near(const std::string& name, const std::vector<T>& got, const std::vector<double>& expected, double tolerance,
          double scale = 1) {
  ++num_checks;
  if (got.size() != expected.size()) {
    std::printf("%s: %zu values instead of %zu\n", name.c_str(), got.size(), expected.size());
    std::exit(1);
  }
  for (size_t i = 0; i < got.size(); ++i) {
    const double value = carousel::to_float(got[i]);
    if (std::abs(value - expected[i]) <= tolerance * std::max(std::abs(expected[i]), scale)) continue;
    std::printf("%s: [%zu] is %g instead of %g\n", name.c_str(), i, value, expected[i]);
    std::exit(1);
  }
}

template <class A, class B>
void equal(const std::string& name, const A& got, const B& expected) {
  ++num_checks;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (got[i] == expected[i]) continue;
    std::printf("%s: [%zu] differs\n", name.c_str(), i);
    std::exit(1);
  }
}

}  // namespace check

// Of the other files.
void check_halves();
void check_linear();
void check_int8();
void check_elementwise();
void check_experts();
void check_rows();
void check_attention();
void check_sampling();
void check_logits();
void check_ranks();
