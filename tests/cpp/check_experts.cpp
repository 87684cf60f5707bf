// Experts, whose programs are linear layers here.
#include "check.h"
#include "experts.cpp"
#include "linear_call.h"

CAROUSEL_EXPORT void carousel_linear(const carousel::LinearCall* call);

namespace {

using namespace carousel;

template <class T>
void check_dtype() {
  constexpr int kTokens = 21, kSize = 32, kExperts = 5, kPerToken = 2, kChunk = 4;
  const auto hidden = check::narrow<T>(check::normal(kTokens * kSize, 1));
  const auto scores = check::narrow<T>(check::normal(kTokens * kExperts, 2));
  std::vector<std::vector<T>> weights;
  std::vector<T> x(kChunk * kSize), y(kChunk * kSize), outputs(kTokens * kPerToken * kSize), out(kTokens * kSize);
  for (int e = 0; e < kExperts; ++e) weights.push_back(check::narrow<T>(check::normal(kSize * kSize, 3 + e, 0.2f)));
  std::vector<double> expected;
  for (int t = 0; t < kTokens; ++t) {
    const auto score = [&](int e) { return (double)to_float(scores[t * kExperts + e]); };
    std::vector<int> order{0, 1, 2, 3, 4};
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return score(a) > score(b); });
    const double total = std::exp(score(order[0])) + std::exp(score(order[1]));
    for (int j = 0; j < kSize; ++j) {
      double sum = 0;
      for (int i = 0; i < kPerToken; ++i) {
        double product = 0;
        for (int c = 0; c < kSize; ++c) {
          product += (double)to_float(hidden[t * kSize + c]) * to_float(weights[order[i]][j * kSize + c]);
        }
        sum += std::exp(score(order[i])) / total * product;
      }
      expected.push_back(sum);
    }
  }
  std::vector<LinearCall> calls(kExperts);
  std::vector<ProgramCall> program_calls(kExperts);
  std::vector<ProgramStep> steps(kExperts);
  std::vector<ExpertProgram> programs(kExperts);
  for (int e = 0; e < kExperts; ++e) {
    carousel_pack_panels(weights[e].data(), kSize, kSize * sizeof(T), std::is_same_v<T, fp16> ? 2 : 4, 1);
    calls[e].x = x.data(), calls[e].weight = (uint32_t*)weights[e].data(), calls[e].out = y.data();
    calls[e].n = calls[e].k = kSize, calls[e].dtype = check::kType<T>, calls[e].num_threads = 1;
    program_calls[e].run = [](const void* call) { carousel_linear((const LinearCall*)call); };
    program_calls[e].call = &calls[e], program_calls[e].tokens = &calls[e].num_rows;
    steps[e].calls = &program_calls[e], steps[e].num_calls = 1;
    programs[e] = {&steps[e], y.data()};
  }
  ExpertsCall call{};
  call.hidden = hidden.data(), call.scores = scores.data(), call.outputs = outputs.data(), call.out = out.data();
  call.x = x.data(), call.programs = programs.data(), call.num_tokens = kTokens, call.size = kSize;
  call.score_stride = kExperts, call.num_experts = kExperts, call.num_per_token = kPerToken, call.chunk = kChunk;
  call.renormalizes = 1, call.dtype = check::kType<T>, call.num_threads = 2;
  carousel_experts(&call);
  check::near("experts", out, expected, 4 * check::kStep<T>);
}

}  // namespace

void check_experts() {
  check_dtype<float>();
  check_dtype<bf16>();
  check_dtype<fp16>();
}
