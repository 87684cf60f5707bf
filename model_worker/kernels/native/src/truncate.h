// Which ids of a row may be drawn under top-k and top-p, and which are the largest, without sorting the row. The
// reference is sampling/truncation.py: the order is that of logits, largest first, equals by id, and probability
// is counted in integers, whose sums are exact in any order.
#pragma once

#include <cstdint>
#include <vector>

#include "logit_row.h"

namespace carousel {

struct Candidate {
  float value;
  int32_t id;
  int64_t mass;  // unnormalised probability in units of 2^-40

  bool precedes(const Candidate& other) const {
    return value > other.value || (value == other.value && id < other.id);
  }
};

// The last id of the order that is kept, and its logit over the temperature.
struct Cut {
  float value = -kInfinity;
  int32_t id = INT32_MAX;

  bool keeps(float x, int32_t i) const { return x > value || (x == value && i <= id); }
};

// The first of a row's order, as many as `count` or a few more, in no order; all of them when it has fewer.
void collect_largest(const LogitRow& row, int count, std::vector<Candidate>& out);

// Leaves the first k of the order, in no order.
void keep_first(std::vector<Candidate>& candidates, int k);

// What top-k (0: all) and top-p (1: all) leave of a sound row; `memory` is the caller's.
Cut find_cut(const LogitRow& row, int64_t top_k, float top_p, std::vector<Candidate>& memory);

}  // namespace carousel
