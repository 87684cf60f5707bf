// Candidates of top-k are the ids above a bound that certainly leaves enough of them. Candidates of top-p are those
// near which the probability is reached. Then a selection around pivots, as in quickselect, finds the last kept id.
#include "truncate.h"

#include <algorithm>

namespace carousel {
namespace {

// As in truncation.py: ids more than 27.7 nats below the largest logit have no mass.
constexpr float kMassOne = 0x1p40f;
constexpr float kNoMassBelow = 27.8f;
constexpr float kBucketsPerNat = 8;
constexpr int kNumBuckets = (int)(kNoMassBelow * kBucketsPerNat) + 1;

void masses_of(const float (&x)[LogitRow::kBlock], float highest, int64_t (&mass)[LogitRow::kBlock]) {
  alignas(64) float scaled[LogitRow::kBlock];
  for (int i = 0; i < LogitRow::kBlock; i += kLanes) store(scaled + i, exp(load(x + i) - highest) * kMassOne);
  for (int i = 0; i < LogitRow::kBlock; ++i) mass[i] = (int64_t)scaled[i];
}

// A logit's distance from the largest, in eighths of a nat: larger ones have lower buckets.
int bucket_of(float highest, float x) { return (int)((highest - x) * kBucketsPerNat); }

// Calls visit(first id, logits, masses) for each block with an id that has mass.
template <class Visit>
void each_likely_block(const LogitRow& row, const Visit& visit) {
  float x[LogitRow::kBlock];
  int64_t mass[LogitRow::kBlock];
  for (int block = 0; block < row.num_blocks(); ++block) {
    if (row.largest()[block] < row.highest() - kNoMassBelow) continue;
    row.load_block(block, x);
    masses_of(x, row.highest(), mass);
    visit(block * LogitRow::kBlock, x, mass);
  }
}

// Leaves the candidates with less than `limit` before them, in any order; the first always remains.
// The amount before a candidate is `before` plus the sum of `weigh` over those that precede it.
template <class Weigh>
void keep_prefix(std::vector<Candidate>& candidates, int64_t before, double limit, const Weigh& weigh) {
  // [0, begin) are kept, [end, size) are not.
  auto begin = candidates.begin(), end = candidates.end();
  while (begin != end) {
    auto middle = begin + (end - begin) / 2;
    const auto first = [](const Candidate& a, const Candidate& b) { return a.precedes(b); };
    const Candidate pivot = std::max(std::min(*begin, *middle, first),
                                     std::min(std::max(*begin, *middle, first), *(end - 1), first), first);
    const auto upper = std::partition(begin, end, [&](const Candidate& c) { return c.precedes(pivot); });
    int64_t before_pivot = before;
    for (auto c = begin; c != upper; ++c) before_pivot += weigh(*c);
    if ((double)before_pivot >= limit && before_pivot > 0) {
      end = upper;
      continue;
    }
    std::iter_swap(upper, std::find_if(upper, end, [&](const Candidate& c) { return c.id == pivot.id; }));
    before = before_pivot + weigh(pivot);
    begin = upper + 1;
  }
  candidates.erase(begin, candidates.end());
}

void keep_mass(std::vector<Candidate>& candidates, int64_t before, double budget) {
  keep_prefix(candidates, before, budget, [](const Candidate& c) { return c.mass; });
}

// Leaves candidates among which the last id kept by top-p is; all larger ids are kept.
void keep_likely(const LogitRow& row, float top_p, std::vector<Candidate>& candidates) {
  int64_t masses[kNumBuckets] = {}, total = 0, before = 0;
  each_likely_block(row, [&](int, const float* x, const int64_t* mass) {
    for (int i = 0; i < LogitRow::kBlock; ++i) {
      if (mass[i]) masses[bucket_of(row.highest(), x[i])] += mass[i];
    }
  });
  for (int64_t mass : masses) total += mass;
  const double budget = (double)top_p * (double)total;
  int bucket = 0;
  while ((double)(before + masses[bucket]) < budget) before += masses[bucket++];
  candidates.clear();
  each_likely_block(row, [&](int first, const float* x, const int64_t* mass) {
    for (int i = 0; i < LogitRow::kBlock; ++i) {
      if (mass[i] && bucket_of(row.highest(), x[i]) == bucket) candidates.push_back({x[i], first + i, mass[i]});
    }
  });
  keep_mass(candidates, before, budget);
}

int64_t mass_of(const std::vector<Candidate>& candidates) {
  int64_t total = 0;
  for (const Candidate& c : candidates) total += c.mass;
  return total;
}

Cut cut_behind(const std::vector<Candidate>& kept) {
  const auto last = std::max_element(kept.begin(), kept.end(),
                                     [](const Candidate& a, const Candidate& b) { return a.precedes(b); });
  return {last->value, last->id};
}

}  // namespace

void collect_largest(const LogitRow& row, int count, std::vector<Candidate>& out) {
  out.clear();
  float bound = -kInfinity;
  if (count <= row.num_blocks()) {
    // As many blocks have an id that is not below it, so as many ids are not.
    static thread_local std::vector<float> largest;
    largest = row.largest();
    std::nth_element(largest.begin(), largest.begin() + (count - 1), largest.end(), std::greater<float>());
    bound = largest[count - 1];
  }
  float x[LogitRow::kBlock];
  int64_t mass[LogitRow::kBlock];
  for (int block = 0; block < row.num_blocks(); ++block) {
    if (row.largest()[block] < bound) continue;
    row.load_block(block, x);
    masses_of(x, row.highest(), mass);
    const int first = block * LogitRow::kBlock, size = std::min(LogitRow::kBlock, row.size() - first);
    for (int i = 0; i < size; ++i) {
      if (x[i] >= bound) out.push_back({x[i], first + i, mass[i]});
    }
  }
}

void keep_first(std::vector<Candidate>& candidates, int k) {
  keep_prefix(candidates, 0, k, [](const Candidate&) { return 1; });
}

Cut find_cut(const LogitRow& row, int64_t top_k, float top_p, std::vector<Candidate>& memory) {
  const bool has_k = top_k > 0 && top_k < row.size();
  if (!has_k && top_p >= 1.0f) return {};
  if (!has_k) {
    keep_likely(row, top_p, memory);
    return cut_behind(memory);
  }
  collect_largest(row, (int)top_k, memory);
  keep_first(memory, (int)top_k);
  if (top_p < 1.0f) keep_mass(memory, 0, (double)top_p * (double)mass_of(memory));
  return cut_behind(memory);
}

}  // namespace carousel
