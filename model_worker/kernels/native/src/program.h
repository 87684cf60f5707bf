// A recorded sequence of kernel calls, run for a step's own numbers of tokens. Knows no kernel: what differs
// between steps is how many rows each call works on, and the integers that it reads through its pointers.
#pragma once

#include <cstdint>

namespace carousel {

// The binding mirrors both field by field.
struct ProgramCall {
  void (*run)(const void* call);
  const void* call;
  int32_t* tokens;   // where the call keeps each number, or null: it does not depend on it
  int32_t* outputs;
  int32_t* seqs;
  const int32_t* condition;  // null: it runs in every step
  int32_t is_nonzero;        // it runs where the condition is another number than 0; else where it is 0
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
