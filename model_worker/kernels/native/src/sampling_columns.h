// The parameters of a row, laid out as SamplingColumns of sampling/columns.py has them.
#pragma once

#include <cstdint>

namespace carousel {

// Written by python -m runtime.sampling.generate: begin.
struct FloatColumns {
  float temperature;
  float top_p;
  float min_logit_gap;  // log of min-p: ids further below the largest are cut off
  float repetition;
  float presence;
  float frequency;
  float top_p_decay;
  float top_p_min;
  float top_n_sigma;  // ids more standard deviations below the largest are cut off; 0: none
};

struct IntegerColumns {
  int64_t min_len;  // no stop id is drawn at a position below it
  int64_t is_greedy;
  int64_t top_k;  // 0: all
  int64_t seed;
  int64_t num_logprobs;  // -1: none; k: the chosen token's and the k most likely ones'
  int64_t ngram;  // size of the n-grams; 0: off
  int64_t top_p_age;  // output tokens since the last reset
};
// Written by python -m runtime.sampling.generate: end.

}  // namespace carousel
