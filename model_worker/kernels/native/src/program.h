// Recorded sequence of kernel calls, run for the step's numbers of tokens. It does not depend on the kernels: steps
// differ in the number of rows of each call, and in the integers that calls read through their pointers.
#pragma once

#include <cstdint>

namespace carousel {

// The binding mirrors both field by field.
struct ProgramCall {
  void (*run)(const void* call);
  const void* call;
  int32_t* tokens;   // address of each number in the call; null if the call does not depend on it
  int32_t* outputs;
  int32_t* seqs;
  const int32_t* condition;  // null: the call runs in every step
  int32_t is_nonzero;        // the call runs if the condition is not 0; otherwise if it is 0
};

struct ProgramStep {
  const ProgramCall* calls;
  int32_t num_calls;
  int32_t tokens;
  int32_t outputs;
  int32_t seqs;
};

inline void run_program(const ProgramStep& step) {
  for (int i = 0; i < step.num_calls; ++i) {
    const ProgramCall& op = step.calls[i];
    if (op.condition && (*op.condition != 0) != (op.is_nonzero != 0)) continue;
    if (op.tokens) *op.tokens = step.tokens;
    if (op.outputs) *op.outputs = step.outputs;
    if (op.seqs) *op.seqs = step.seqs;
    op.run(op.call);
  }
}

}  // namespace carousel
