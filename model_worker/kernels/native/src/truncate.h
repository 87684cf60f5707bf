// Selection of the ids of a row that may be drawn under top-k and top-p, and of the largest, without sorting the row.
// The reference is sampling/truncation.py: ids are ordered by descending logit, equal ones by id, and probability is
// counted in integers, whose sums are exact in any order.
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

// Last kept id in this order, and its logit divided by the temperature.
struct Cut {
  float value = -kInfinity;
  int32_t id = INT32_MAX;

  bool keeps(float x, int32_t i) const { return x > value || (x == value && i <= id); }
};

// The first `count` ids of a row's order or a few more, unsorted; all ids if there are fewer.
void collect_largest(const LogitRow& row, int count, std::vector<Candidate>& out);

// Leaves the first k of the order, unsorted.
void keep_first(std::vector<Candidate>& candidates, int k);

// Ids that top-k (0: all) and top-p (1: all) leave of a sound row; `memory` belongs to the caller.
Cut find_cut(const LogitRow& row, int64_t top_k, float top_p, std::vector<Candidate>& memory);

}  // namespace carousel
