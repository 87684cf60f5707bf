// Activations of feed-forward layers, between their two products.
#pragma once

#include "simd.h"

namespace carousel {

enum Activation { kSilu, kGelu, kGeluTanh };

// The error function to 1.5e-7. Source: Abramowitz and Stegun, 7.1.26.
inline vfloat erf(vfloat x) {
  const vfloat size = x < 0 ? -x : x;
  const vfloat t = 1.0f / (size * 0.3275911f + 1.0f);
  const vfloat p =
      ((((t * 1.061405429f - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
  const vfloat y = 1.0f - p * exp(-size * size);
  return x < 0 ? -y : y;
}

template <int activation>
vfloat activate(vfloat x) {
  if constexpr (activation == kSilu) return x / (exp(-x) + 1.0f);
  if constexpr (activation == kGelu) return 0.5f * x * (1.0f + erf(x * 0.70710678f));
  if constexpr (activation == kGeluTanh) {
    return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x)));
  }
}

// activation(gate) * up as separate operations of T compute it: each result is rounded to T.
template <class T, int activation>
vfloat gated(vfloat gate, vfloat up) {
  return rounded_to<T>(activate<activation>(gate)) * up;
}

}  // namespace carousel
