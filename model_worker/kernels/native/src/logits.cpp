// Log-probabilities of logits, and their changes before a token is drawn: penalties, masks.
#include "sampling_columns.h"
#include "team.h"
#include "truncate.h"

namespace carousel {

constexpr int64_t kMinParallelLogits = 1 << 14;
constexpr int32_t kInPrompt = 1 << 30;  // IN_PROMPT of columns.py
constexpr float kNothingBelow = 88.0f;  // nats below the maximum, where exp gives 0

// The binding mirrors each field by field.
struct LogprobsCall {
  const float* logits;    // [num_rows, vocab_size]
  const int64_t* tokens;  // [num_rows]
  float* chosen;          // [num_rows] of the tokens
  int32_t* ranks;         // [num_rows] ranks of the tokens, from 1; null: not requested
  int32_t* top_ids;       // [num_rows, num_top] in descending order, equal ones by id
  float* top;             // [num_rows, num_top]
  int32_t num_rows;
  int32_t vocab_size;
  int32_t num_top;  // at most vocab_size
  int32_t num_threads;
};

struct PenaltyCall {
  float* logits;               // [.., vocab_size]
  const int64_t* rows;         // [num_rows] which of the logits' rows
  const int64_t* table_rows;   // [num_rows] of counts and columns
  const int32_t* counts;       // [max_rows, vocab_size] times sampled, plus kInPrompt
  const FloatColumns* floats;  // [max_rows]
  int32_t num_rows;
  int32_t vocab_size;
  int32_t num_threads;
};

struct MaskCall {
  float* logits;          // [.., vocab_size]
  const int32_t* rows;    // [num_rows] which of the logits' rows
  const uint32_t* words;  // [num_rows, num_words] bit i of word j allows id 32 * j + i
  int32_t num_rows;
  int32_t vocab_size;  // at most 32 * num_words
  int32_t num_words;
  int32_t num_threads;
};

// Rank of a token by descending logit, equal ones by id. Blocks without a logit as large are skipped.
int32_t rank_of(const LogitRow& row, float own, int32_t token) {
  float x[LogitRow::kBlock];
  int32_t rank = 1;
  for (int block = 0; block < row.num_blocks(); ++block) {
    if (row.largest()[block] < own) continue;
    row.load_block(block, x);
    const int32_t before = token - block * LogitRow::kBlock;
    for (int i = 0; i < LogitRow::kBlock; ++i) rank += (x[i] > own) | ((x[i] == own) & (i < before));
  }
  return rank;
}

double log_sum(const LogitRow& row) {
  float x[LogitRow::kBlock];
  double total = 0;
  for (int block = 0; block < row.num_blocks(); ++block) {
    if (row.largest()[block] < row.highest() - kNothingBelow) continue;
    row.load_block(block, x);
    vfloat sum = {};
    for (int i = 0; i < LogitRow::kBlock; i += kLanes) sum += exp(load(x + i) - row.highest());
    total += sum_of(sum);
  }
  return row.highest() + std::log(total);
}

void score(const LogprobsCall& call, int i) {
  static thread_local std::vector<float> largest;
  static thread_local std::vector<Candidate> candidates;
  const float* logits = call.logits + (int64_t)i * call.vocab_size;
  int32_t* ids = call.top_ids + (int64_t)i * call.num_top;
  float* top = call.top + (int64_t)i * call.num_top;
  const LogitRow row(logits, call.vocab_size, 1.0f, largest);
  if (!row.is_sound()) {
    call.chosen[i] = std::numeric_limits<float>::quiet_NaN();
    if (call.ranks) call.ranks[i] = 1;
    for (int n = 0; n < call.num_top; ++n) ids[n] = n, top[n] = call.chosen[i];
    return;
  }
  const double sum = log_sum(row);
  call.chosen[i] = (float)(logits[call.tokens[i]] - sum);
  if (call.ranks) call.ranks[i] = rank_of(row, logits[call.tokens[i]], (int32_t)call.tokens[i]);
  if (call.num_top == 0) return;
  collect_largest(row, call.num_top, candidates);
  keep_first(candidates, call.num_top);
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.precedes(b); });
  for (int n = 0; n < call.num_top; ++n) {
    ids[n] = candidates[n].id;
    top[n] = (float)(candidates[n].value - sum);
  }
}

void penalise(const PenaltyCall& call, int i) {
  float* logits = call.logits + call.rows[i] * call.vocab_size;
  const int32_t* counts = call.counts + call.table_rows[i] * call.vocab_size;
  const FloatColumns& by = call.floats[call.table_rows[i]];
  for (int first = 0; first < call.vocab_size; first += LogitRow::kBlock) {
    const int end = std::min(first + LogitRow::kBlock, call.vocab_size);
    int32_t any = 0;
    for (int id = first; id < end; ++id) any |= counts[id];
    for (int id = any ? first : end; id < end; ++id) {
      if (counts[id] == 0) continue;
      const float x = logits[id], times = (float)(counts[id] & (kInPrompt - 1));
      const float repeated = x > 0 ? x / by.repetition : x * by.repetition;
      logits[id] = repeated - by.frequency * times - by.presence * (times > 0);
    }
  }
}

inline void forbid_word(float* logits, uint32_t allowed, int count) {
  for (int bit = 0; bit < count; ++bit) logits[bit] = (allowed >> bit) & 1 ? logits[bit] : -kInfinity;
}

void forbid(const MaskCall& call, int i) {
  constexpr int kBits = 32;
  float* logits = call.logits + (int64_t)call.rows[i] * call.vocab_size;
  const uint32_t* words = call.words + (int64_t)i * call.num_words;
  const int whole = call.vocab_size / kBits;
  for (int word = 0; word < whole; ++word) {
    if (words[word] != ~0u) forbid_word(logits + word * kBits, words[word], kBits);
  }
  if (whole < call.num_words) forbid_word(logits + whole * kBits, words[whole], call.vocab_size % kBits);
}

template <class Call, class Body>
void each_row(const Call& call, const Body& body) {
  const int threads = (int64_t)call.num_rows * call.vocab_size < kMinParallelLogits ? 1 : call.num_threads;
  parallel_for(threads, call.num_rows, [&](int i) { body(call, i); });
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_logprobs(const carousel::LogprobsCall* call) {
  carousel::each_row(*call, carousel::score);
}

CAROUSEL_EXPORT void carousel_penalise(const carousel::PenaltyCall* call) {
  carousel::each_row(*call, carousel::penalise);
}

CAROUSEL_EXPORT void carousel_mask(const carousel::MaskCall* call) {
  carousel::each_row(*call, carousel::forbid);
}
