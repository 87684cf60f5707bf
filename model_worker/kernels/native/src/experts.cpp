// Mixture of experts: each token goes through the few experts with the highest scores of the router, weighted by
// these. Tokens are sorted by expert, and the recorded kernels of each expert run on its rows. The reference is
// SparseMLP of models/feed_forward.py. A token's result does not depend on the batch.
#include <algorithm>
#include <vector>

#include "program.h"
#include "simd.h"
#include "team.h"

namespace carousel {

// The binding mirrors both field by field.
struct ExpertProgram {
  ProgramStep* step;  // of up to `chunk` rows of x
  const void* y;      // results of these rows
};

struct ExpertsCall {
  const void* hidden;  // [num_tokens, size]
  const void* scores;  // [num_tokens, score_stride] of the router
  void* outputs;       // [num_tokens, num_per_token * size] of each token's experts
  void* out;           // [num_tokens, size]
  void* x;             // [chunk, size] input of an expert's program
  const ExpertProgram* programs;  // [num_experts]
  int32_t num_tokens;
  int32_t size;
  int32_t score_stride;
  int32_t num_experts;
  int32_t num_per_token;
  int32_t chunk;
  int32_t renormalizes;
  int32_t dtype;
  int32_t num_threads;
};

constexpr int64_t kMinParallelExperts = 1 << 15;  // elements

// Experts of one token by descending score, equal ones by number, and their weights, rounded to T.
template <class T>
void route(const ExpertsCall& call, int token, int32_t* ids, float* weights) {
  const T* scores = (const T*)call.scores + (int64_t)token * call.score_stride;
  const auto score = [&](int expert) { return to_float(scores[expert]); };
  static thread_local std::vector<int32_t> order;
  order.resize(call.num_experts);
  for (int expert = 0; expert < call.num_experts; ++expert) order[expert] = expert;
  std::partial_sort(order.begin(), order.begin() + call.num_per_token, order.end(),
                    [&](int a, int b) { return score(a) > score(b) || (score(a) == score(b) && a < b); });
  const float highest = score(order[0]);
  float total = 0, chosen = 0;
  for (int expert = 0; expert < call.num_experts; ++expert) total += std::exp(score(expert) - highest);
  for (int i = 0; i < call.num_per_token; ++i) {
    ids[i] = order[i];
    weights[i] = std::exp(score(order[i]) - highest) / total;
    chosen += weights[i];
  }
  for (int i = 0; i < call.num_per_token; ++i) {
    const float weight = call.renormalizes ? weights[i] / chosen : weights[i];
    weights[i] = rounded_to<T>(splat(weight))[0];
  }
}

template <class T>
void run_experts(const ExpertsCall& call) {
  const int num_pairs = call.num_tokens * call.num_per_token;
  const int64_t size = call.size;
  static thread_local std::vector<int32_t> ids, first, pairs;
  static thread_local std::vector<float> weights;
  ids.resize(num_pairs);
  weights.resize(num_pairs);
  pairs.resize(num_pairs);
  for (int token = 0; token < call.num_tokens; ++token) {
    route<T>(call, token, &ids[token * call.num_per_token], &weights[token * call.num_per_token]);
  }
  // Pairs of token and expert, sorted by expert: those of expert e are [first[e], first[e + 1]).
  first.assign(call.num_experts + 2, 0);
  for (int32_t id : ids) ++first[id + 2];
  for (int expert = 2; expert < call.num_experts + 2; ++expert) first[expert] += first[expert - 1];
  for (int pair = 0; pair < num_pairs; ++pair) pairs[first[ids[pair] + 1]++] = pair;

  T* const outputs = (T*)call.outputs;
  for (int expert = 0; expert < call.num_experts; ++expert) {
    const ExpertProgram& program = call.programs[expert];
    for (int begin = first[expert]; begin < first[expert + 1]; begin += call.chunk) {
      const int32_t* own = &pairs[begin];
      const int count = std::min(call.chunk, first[expert + 1] - begin);
      for (int i = 0; i < count; ++i) {
        std::copy_n((const T*)call.hidden + own[i] / call.num_per_token * size, size, (T*)call.x + i * size);
      }
      program.step->tokens = count;
      run_program(*program.step);
      for (int i = 0; i < count; ++i) {
        const T* y = (const T*)program.y + i * size;
        T* to = outputs + own[i] * size;
        for (int c = 0; c < size; c += kLanes) store(to + c, load(y + c) * weights[own[i]]);
      }
    }
  }
  const int threads = num_pairs * size < kMinParallelExperts ? 1 : call.num_threads;
  parallel_ranges(threads, call.num_tokens, [&](int64_t token, int64_t end) {
    for (; token < end; ++token) {
      const T* from = outputs + token * call.num_per_token * size;
      for (int c = 0; c < size; c += kLanes) {
        vfloat sum = load(from + c);
        for (int i = 1; i < call.num_per_token; ++i) sum += load(from + i * size + c);
        store((T*)call.out + token * size + c, sum);
      }
    }
  });
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_experts(const carousel::ExpertsCall* call) {
  using namespace carousel;
  with_dtype(call->dtype, [&](auto element) { run_experts<decltype(element)>(*call); });
}
