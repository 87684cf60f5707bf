// The Gumbel noise of sampling/philox.py and sampling/noise.py: a function of seed, position and id.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace carousel {

constexpr int kQuad = 4;  // ids whose words come from one counter
constexpr int kQuadsAtATime = 16;
constexpr int kIdsAtATime = kQuad * kQuadsAtATime;
constexpr float kHighestNoise = 16.7f;  // 24 ln 2 = 16.64, and a margin for rounding

// words[4 * q + lane] = word of id 4 * (first_quad + q) + lane.
inline void philox(uint64_t seed, uint32_t position, uint32_t first_quad, uint32_t* words) {
  uint32_t c0[kQuadsAtATime], c1[kQuadsAtATime], c2[kQuadsAtATime], c3[kQuadsAtATime];
  for (int q = 0; q < kQuadsAtATime; ++q) {
    c0[q] = first_quad + q;
    c1[q] = position;
    c2[q] = c3[q] = 0;
  }
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int q = 0; q < kQuadsAtATime; ++q) {
      const uint64_t a = (uint64_t)c0[q] * 0xD2511F53u;
      const uint64_t b = (uint64_t)c2[q] * 0xCD9E8D57u;
      c0[q] = (uint32_t)(b >> 32) ^ c1[q] ^ k0;
      c1[q] = (uint32_t)b;
      c2[q] = (uint32_t)(a >> 32) ^ c3[q] ^ k1;
      c3[q] = (uint32_t)a;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int q = 0; q < kQuadsAtATime; ++q) {
    words[4 * q] = c0[q];
    words[4 * q + 1] = c1[q];
    words[4 * q + 2] = c2[q];
    words[4 * q + 3] = c3[q];
  }
}

// Uniform number strictly between 0 and 1, from a word's upper 24 bits, exact.
inline float uniform_of(uint32_t word) { return std::max((float)(word >> 8), 0.5f) * 0x1p-24f; }

// Rounded after each logarithm, as float32 arithmetic does it.
inline float gumbel(float uniform) {
  const float inner = (float)std::log((double)uniform);
  return -(float)std::log(-(double)inner);
}

}  // namespace carousel
