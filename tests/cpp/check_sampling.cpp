// Draws: the largest logit, and the largest sum of logit and noise of what min-p and top-k leave.
#include "check.h"
#include "sample.cpp"

void check_sampling() {
  using namespace carousel;
  const int rows = 6, size = 1003;
  const auto logits = check::normal(rows * size, 1, 3);
  std::vector<FloatColumns> floats(rows, {0.8f, 1, -kInfinity, 1, 0, 0, 1, 0, 0});
  std::vector<IntegerColumns> integers(rows, {0, 0, 0, 7, -1, 0, 0});
  integers[0].is_greedy = 1;
  integers[1].top_k = 1;
  integers[2].top_k = 20;
  floats[3].min_logit_gap = -2;
  std::vector<int64_t> order, positions, got(rows), expected;
  for (int r = 0; r < rows; ++r) {
    order.push_back(r);
    positions.push_back(11 + r);
    const float* row = &logits[r * size];
    std::vector<float> kept;
    for (int id = 0; id < size; ++id) kept.push_back(row[id] / floats[r].temperature);
    std::vector<float> sorted(kept.begin(), kept.end());
    std::sort(sorted.rbegin(), sorted.rend());
    const float lowest = integers[r].top_k ? sorted[integers[r].top_k - 1] : sorted[0] + floats[r].min_logit_gap;
    int64_t best_id = 0;
    float best = -kInfinity;
    for (int id = 0; id < size; ++id) {
      uint32_t words[kIdsAtATime];
      philox(7, (uint32_t)positions[r], (uint32_t)(id / kIdsAtATime * kQuadsAtATime), words);
      const float noise = integers[r].is_greedy ? 0 : gumbel(uniform_of(words[id % kIdsAtATime]));
      if (kept[id] < lowest || kept[id] + noise <= best) continue;
      best = kept[id] + noise, best_id = id;
    }
    expected.push_back(best_id);
  }
  DrawCall call{logits.data(),   order.data(), positions.data(), floats.data(),
                integers.data(), got.data(),   rows,             size,          2};
  carousel_draw(&call);
  check::equal("draw", got, expected);
}
