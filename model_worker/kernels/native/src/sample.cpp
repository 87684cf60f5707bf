#include "sample.h"

#include <numeric>
#include <utility>

#include "noise.h"
#include "team.h"
#include "truncate.h"

namespace carousel {

constexpr int64_t kMinParallelDraw = 1 << 14;
static_assert(kIdsAtATime == LogitRow::kBlock, "noise is made for a block at a time");

// Index of the first maximum. A NaN is larger than any number, as in torch.
int64_t argmax(const float* x, int size) {
  vfloat highest = splat(-kInfinity);
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

// Id with the maximum sum of logit and noise among those that `cut` keeps.
int64_t draw(const LogitRow& row, const Cut& cut, uint64_t seed, uint32_t position) {
  float best = -kInfinity;
  int64_t token = 0;
  float x[LogitRow::kBlock], rest[LogitRow::kBlock];
  alignas(64) uint32_t words[kIdsAtATime];
  for (int block = 0; block < row.num_blocks(); ++block) {
    const float largest = row.largest()[block];
    if (largest < cut.value || largest + kHighestNoise < best) continue;
    row.load_block(block, x);
    philox(seed, position, (uint32_t)(block * kQuadsAtATime), words);
    for (int i = 0; i < LogitRow::kBlock; ++i) rest[i] = 1.0f - uniform_of(words[i]);
    for (int i = 0; i < LogitRow::kBlock; i += kLanes) {
      const vfloat value = load(x + i);
      // -log u >= 1 - u, so noise <= -log(1 - u): to pass the best so far, 1 - u must not exceed
      // e^(x - best). The margin covers the rounding of both sides.
      const vfloat limit = exp(value - best) * 1.001f + 1e-6f;
      const vint hopeful = (load(rest + i) <= limit) & (value >= cut.value);
      for (int lane = i; lane < i + kLanes; ++lane) {
        const int id = block * LogitRow::kBlock + lane;
        if (!hopeful[lane - i] || !cut.keeps(x[lane], id)) continue;
        const float perturbed = x[lane] + gumbel(uniform_of(words[lane]));
        if (perturbed > best) {
          best = perturbed;
          token = id;
        }
      }
    }
  }
  return token;
}

// As in top_p_decay.py: in double, so that rounding gives the same number everywhere.
float top_p_of(const FloatColumns& floats, const IntegerColumns& integers) {
  if (floats.top_p_decay == 1.0f) return floats.top_p;
  const double factor = std::pow((double)floats.top_p_decay, (double)integers.top_p_age);
  return std::max(floats.top_p_min, (float)(floats.top_p * factor));
}

// Sum of visit(value) over the finite values of a sound row, and their number; lane by lane, in double.
template <class Visit>
std::pair<double, double> sum_finite(const LogitRow& row, const Visit& visit) {
  double sums[kLanes] = {}, counts[kLanes] = {};
  float x[LogitRow::kBlock];
  for (int block = 0; block < row.num_blocks(); ++block) {
    row.load_block(block, x);
    for (int i = 0; i < LogitRow::kBlock; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const bool is_finite = x[i + lane] > -kInfinity;
        sums[lane] += is_finite ? visit((double)x[i + lane]) : 0.0;
        counts[lane] += is_finite;
      }
    }
  }
  return {std::accumulate(sums, sums + kLanes, 0.0), std::accumulate(counts, counts + kLanes, 0.0)};
}

// Copy of a sound row with -inf for logits that are more than a number of standard deviations of the finite logits
// below the maximum, as in truncation.py. `largest` is that of LogitRow.
LogitRow within_sigmas(const LogitRow& row, float num_sigmas, std::vector<float>& largest) {
  static thread_local std::vector<float> kept;
  const auto [sum, count] = sum_finite(row, [](double x) { return x; });
  const double mean = sum / count;
  const double square = sum_finite(row, [mean](double x) { return (x - mean) * (x - mean); }).first;
  const float lowest = (float)(row.highest() - (double)num_sigmas * std::sqrt(square / count));
  kept.resize((size_t)row.num_blocks() * LogitRow::kBlock);
  float x[LogitRow::kBlock];
  for (int block = 0; block < row.num_blocks(); ++block) {
    row.load_block(block, x);
    float* out = kept.data() + (size_t)block * LogitRow::kBlock;
    for (int i = 0; i < LogitRow::kBlock; ++i) out[i] = x[i] < lowest ? -kInfinity : x[i];
  }
  return LogitRow(kept.data(), row.size(), 1.0f, largest);
}

int64_t sample(const float* logits, int size, const FloatColumns& floats, const IntegerColumns& integers,
               uint32_t position) {
  if (integers.is_greedy) return argmax(logits, size);
  static thread_local std::vector<float> largest;
  static thread_local std::vector<Candidate> candidates;
  const LogitRow whole(logits, size, floats.temperature, largest);
  if (!whole.is_sound()) return argmax(logits, size);
  static thread_local std::vector<float> largest_kept;
  const LogitRow row =
      floats.top_n_sigma > 0 ? within_sigmas(whole, floats.top_n_sigma, largest_kept) : whole;
  Cut cut = find_cut(row, integers.top_k, top_p_of(floats, integers), candidates);
  const float lowest = row.highest() + floats.min_logit_gap;
  if (lowest > cut.value) cut = {lowest, INT32_MAX};
  return draw(row, cut, (uint64_t)integers.seed, position);
}

void draw_rows(const DrawCall& call) {
  const int threads = (int64_t)call.num_rows * call.vocab_size < kMinParallelDraw ? 1 : call.num_threads;
  parallel_for(threads, call.num_rows, [&](int i) {
    const int64_t row = call.rows[i];
    call.tokens[i] = sample(call.logits + (int64_t)i * call.vocab_size, call.vocab_size, call.floats[row],
                            call.integers[row], (uint32_t)call.positions[i]);
  });
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_draw(const carousel::DrawCall* call) { carousel::draw_rows(*call); }
