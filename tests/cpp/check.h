// What the programs that compare kernels with scalar loops have in common.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "simd.h"

namespace check {

using carousel::bf16;
using Floats = std::vector<float>;

inline int num_checks = 0;

inline std::vector<float> normal(size_t size, int seed, float deviation = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution(0, deviation);
  std::vector<float> values(size);
  for (float& value : values) value = distribution(generator);
  return values;
}

// To the nearest, ties to even.
template <class T>
T narrow(float value) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return value;
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
constexpr double kStep = sizeof(T) == 2 ? 1.0 / 128 : 1e-5;  // two roundings, or sums in another order

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
void check_linear();
void check_int8();
void check_elementwise();
void check_experts();
void check_rows();
void check_attention();
void check_sampling();
void check_logits();
void check_ranks();
