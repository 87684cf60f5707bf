// The parameters of a row, laid out as SamplingColumns of sampling/columns.py has them on the device.
#pragma once

#include <cstdint>

namespace carousel {

struct FloatColumns {
  float temperature;
  float top_p;
  float top_p_decay;
  float top_p_min;
  float min_logit_gap;  // log of min-p: ids further below the largest are cut off
  float repetition;
  float presence;
  float frequency;
};

struct IntegerColumns {
  int64_t seed;
  int64_t top_k;  // 0: all
  int64_t top_p_age;
  int64_t is_greedy;
  int64_t min_len;
};

}  // namespace carousel
