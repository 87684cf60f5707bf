// Log-probabilities, penalties and masks.
#include <algorithm>
#include <numeric>

#include "check.h"
#include "logits.cpp"

void check_logits() {
  using namespace carousel;
  const int rows = 3, size = 203, num_top = 4;
  auto logits = check::normal(rows * size, 1, 3);
  const std::vector<int64_t> tokens{0, 202, 77};
  std::vector<float> chosen(rows), top(rows * num_top);
  std::vector<int32_t> ids(rows * num_top), best, ranks(rows), places;
  std::vector<double> expected, expected_top;
  for (int r = 0; r < rows; ++r) {
    const float* row = &logits[r * size];
    double total = 0;
    for (int id = 0; id < size; ++id) total += std::exp((double)row[id]);
    expected.push_back(row[tokens[r]] - std::log(total));
    std::vector<int32_t> order(size);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
    places.push_back((int32_t)(std::find(order.begin(), order.end(), tokens[r]) - order.begin()) + 1);
    for (int i = 0; i < num_top; ++i) best.push_back(order[i]), expected_top.push_back(row[order[i]] - std::log(total));
  }
  LogprobsCall logprobs{logits.data(), tokens.data(), chosen.data(), ranks.data(), ids.data(),
                        top.data(), rows, size, num_top, 2};
  carousel_logprobs(&logprobs);
  check::near("logprobs", chosen, expected, 1e-5);
  check::near("top logprobs", top, expected_top, 1e-5);
  check::equal("top ids", ids, best);
  check::equal("ranks", ranks, places);

  const std::vector<int64_t> order{2, 0}, table{0, 1};
  std::vector<int32_t> counts(2 * size);
  for (int i = 0; i < 2 * size; i += 3) counts[i] = i % 2 ? kInPrompt : i % 5;
  const std::vector<FloatColumns> floats(2, {1, 1, 0, 1.5f, 0.25f, 0.5f, 1, 0, 0});
  std::vector<double> penalised = check::wide(logits);
  for (int i = 0; i < 2; ++i) {
    for (int id = 0; id < size; ++id) {
      const int32_t count = counts[i * size + id], times = count & (kInPrompt - 1);
      double& x = penalised[order[i] * size + id];
      if (count) x = (x > 0 ? x / 1.5 : x * 1.5) - 0.5 * times - 0.25 * (times > 0);
    }
  }
  PenaltyCall penalty{logits.data(), order.data(), table.data(), counts.data(), floats.data(), 2, size, 2};
  carousel_penalise(&penalty);
  check::near("penalise", logits, penalised, 1e-6);

  const std::vector<int32_t> masked{1};
  std::vector<uint32_t> words(7, 0x5a5a00ffu);
  words[3] = ~0u;
  std::vector<float> allowed = logits;
  for (int id = 0; id < size; ++id) {
    if (!(words[id / 32] >> id % 32 & 1)) allowed[size + id] = -kInfinity;
  }
  MaskCall mask{logits.data(), masked.data(), words.data(), 1, size, 7, 2};
  carousel_mask(&mask);
  check::equal("mask", logits, allowed);
}
