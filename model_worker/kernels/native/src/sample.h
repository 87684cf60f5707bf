// One token for each row of logits: the maximum, or a draw from the ids that top-n-sigma, top-k, top-p and min-p leave.
#pragma once

#include "sampling_columns.h"

namespace carousel {

// The binding mirrors it field by field. Columns are addressed by row.
struct DrawCall {
  const float* logits;       // [num_rows, vocab_size]
  const int64_t* rows;       // [num_rows]
  const int64_t* positions;  // [num_rows] of the token that is drawn
  const FloatColumns* floats;
  const IntegerColumns* integers;
  int64_t* tokens;  // [num_rows]
  int32_t num_rows;
  int32_t vocab_size;
  int32_t num_threads;
};

void draw_rows(const DrawCall& call);

}  // namespace carousel
