// A step of a recorded model in one call: the plan is laid out, the program runs on it, and if its rows need nothing
// except a draw, their tokens are drawn and stored.
#include "program.h"

#include <algorithm>

#include "sample.h"
#include "simd.h"
#include "stage.h"
#include "team.h"

namespace carousel {

// The binding mirrors it field by field.
struct StepCall {
  StageCall* stage;
  ProgramStep* program;
  DrawCall* draw;            // of the program's result
  const uint16_t* features;  // [max_rows] features of each row's sampling
  int64_t* last_token;       // [max_rows]
  int32_t* tokens;           // [num_sampled]
  int32_t drawable;          // features for which a draw is enough
  int32_t is_drawn;          // in: whether to draw; out: whether tokens were drawn
  int32_t max_threads;       // maximum number of threads for the program's first calls
  int32_t num_limited;       // number of these calls
};

bool draws_alone(const StepCall& step) {
  int features = 0;
  for (int i = 0; i < step.stage->num_sampled; ++i) features |= step.features[step.stage->sample_rows[i]];
  return !(features & ~step.drawable);
}

void run_limited(const StepCall& step) {
  ProgramStep first = *step.program, rest = first;
  first.num_calls = std::min(step.num_limited, first.num_calls);
  rest.calls += first.num_calls;
  rest.num_calls -= first.num_calls;
  limit_threads(step.max_threads);
  run_program(first);
  limit_threads(0);
  run_program(rest);
}

void run_step(StepCall& step) {
  StageCall& plan = *step.stage;
  plan.num_sampled = stage(plan);
  if (plan.num_sampled < 0) return;
  step.program->tokens = plan.num_tokens;
  step.program->outputs = plan.num_sampled;
  step.program->seqs = plan.num_seqs;
  run_limited(step);
  step.is_drawn = step.is_drawn && draws_alone(step);
  if (!step.is_drawn) return;
  step.draw->num_rows = plan.num_sampled;
  draw_rows(*step.draw);
  bool counts = true;
  for (int i = 0; i < plan.num_sampled; ++i) {
    const int64_t token = step.draw->tokens[i], guess = plan.guesses[i];
    if (counts) step.last_token[plan.sample_rows[i]] = token;
    step.tokens[i] = (int32_t)token;
    // What is behind a wrong guess does not, up to the next row.
    counts = guess == NO_GUESS || (counts && token == guess);
  }
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_run_program(const carousel::ProgramStep* step) { carousel::run_program(*step); }

CAROUSEL_EXPORT void carousel_run_step(carousel::StepCall* step) { carousel::run_step(*step); }
