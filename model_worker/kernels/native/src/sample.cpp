// One token for each row of logits: the largest, or a draw from the whole vocabulary less what min-p cuts
// off. The noise is that of sampling/philox.py and sampling/noise.py: a function of seed, position and id.
#include <algorithm>
#include <limits>

#include "simd.h"
#include "team.h"

namespace carousel {

constexpr int64_t kMinParallelLogits = 1 << 14;
constexpr int kQuad = 4;          // ids whose words one counter makes
constexpr int kQuadsAtATime = 16;
constexpr int kIdsAtATime = kQuad * kQuadsAtATime;
constexpr float kHighestNoise = 16.7f;  // 24 ln 2 = 16.64, and a margin for rounding

// The binding mirrors it field by field. Columns are addressed by row, `_stride` elements apart.
struct DrawCall {
  const float* logits;       // [num_rows, vocab_size]
  const uint16_t* features;  // [max_rows] bits of each row
  const int64_t* rows;       // [num_rows]
  const int64_t* positions;  // [num_rows] of the token that is drawn
  const float* temperature;
  const float* min_logit_gap;  // log of min-p: ids further below the largest are cut off
  const int64_t* seed;
  int64_t* tokens;  // [num_rows]; skipped rows are left alone
  int32_t num_rows;
  int32_t vocab_size;
  int32_t float_stride;
  int32_t integer_stride;
  int32_t num_threads;
  uint16_t draw_bits;  // rows with one of these are drawn, others get the largest
  uint16_t skip_bits;  // rows with one of these are left alone
};

// The first of the largest; a NaN is larger than any number, as torch has it.
inline int64_t argmax(const float* x, int size) {
  vfloat highest = splat(-std::numeric_limits<float>::infinity());
  vint strange = {};
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const vfloat value = load(x + i);
    strange |= value != value;
    highest = max(highest, value);
  }
  float best = max_of(highest);
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) has_nan |= strange[lane] != 0;
  for (; i < size; ++i) {
    has_nan |= x[i] != x[i];
    best = x[i] > best ? x[i] : best;
  }
  for (int id = 0; id < size; ++id) {
    if (has_nan ? x[id] != x[id] : x[id] == best) return id;
  }
  return 0;
}

// words[4 * q + lane] = the word of id 4 * (first_quad + q) + lane.
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

// A uniform number strictly between 0 and 1 of a word's upper 24 bits, exact.
inline float uniform_of(uint32_t word) { return std::max((float)(word >> 8), 0.5f) * 0x1p-24f; }

// Rounded after each logarithm, as float32 arithmetic does it.
inline float gumbel(float uniform) {
  const float inner = (float)std::log((double)uniform);
  return -(float)std::log(-(double)inner);
}

inline int64_t draw(const float* logits, int size, float temperature, float gap, uint64_t seed,
                    uint32_t position) {
  const int64_t largest = argmax(logits, size);
  const float highest = logits[largest] / temperature;
  if (!std::isfinite(highest)) return largest;
  const float lowest = highest + gap;
  float best = -std::numeric_limits<float>::infinity();
  int64_t token = largest;
  alignas(64) uint32_t words[kIdsAtATime];
  for (int first = 0; first < size; first += kIdsAtATime) {
    const int count = std::min(kIdsAtATime, size - first);
    if (*std::max_element(logits + first, logits + first + count) / temperature + kHighestNoise < best) continue;
    philox(seed, position, (uint32_t)(first / kQuad), words);
    for (int i = 0; i < count; i += kLanes) {
      alignas(64) float block[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        block[lane] = i + lane < count ? logits[first + i + lane] : -std::numeric_limits<float>::infinity();
      }
      const vfloat x = load(block) / temperature;
      for (int lane = 0; lane < kLanes; ++lane) block[lane] = 1.0f - uniform_of(words[i + lane]);
      // -log u >= 1 - u, so noise <= -log(1 - u): to pass the best so far, 1 - u must not exceed
      // e^(x - best). The margin covers the rounding of both sides.
      const vfloat limit = exp(x - best) * 1.001f + 1e-6f;
      const vint hopeful = (load(block) <= limit) & (x >= lowest);
      for (int lane = 0; lane < kLanes; ++lane) {
        if (!hopeful[lane]) continue;
        const float value = x[lane] + gumbel(uniform_of(words[i + lane]));
        if (value > best) {
          best = value;
          token = first + i + lane;
        }
      }
    }
  }
  return token;
}

void draw_rows(const DrawCall& call) {
  const int threads = (int64_t)call.num_rows * call.vocab_size < kMinParallelLogits ? 1 : call.num_threads;
  parallel_for(threads, call.num_rows, [&](int i) {
    const float* logits = call.logits + (int64_t)i * call.vocab_size;
    const int64_t row = call.rows[i];
    const uint16_t features = call.features[row];
    if (features & call.skip_bits) return;
    if (!(features & call.draw_bits)) {
      call.tokens[i] = argmax(logits, call.vocab_size);
    } else {
      call.tokens[i] =
          draw(logits, call.vocab_size, call.temperature[row * call.float_stride],
               call.min_logit_gap[row * call.float_stride], (uint64_t)call.seed[row * call.integer_stride],
               (uint32_t)call.positions[i]);
    }
  });
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_draw(const carousel::DrawCall* call) { carousel::draw_rows(*call); }
