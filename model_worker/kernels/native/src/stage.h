// A plan's sequences, concatenated: ids and positions of the tokens, and the slots of their keys and values.
#pragma once

#include <cstdint>

namespace carousel {

constexpr int64_t NO_GUESS = -1;

// The binding mirrors it field by field. For a sequence beyond num_decodes, `lens` is its number of tokens, and
// `samples` whether one is sampled after them. A sequence that decodes has one token, and one is sampled.
struct StageCall {
  const int32_t* spans;       // [num_spans, 3] of the page table: row, first, number
  const int32_t* pages;       // [num_pages] pages of the spans, concatenated
  const int32_t* rows;        // [num_seqs]
  const int32_t* starts;      // [num_seqs] position of the first token
  const int32_t* token_ids;   // [num_tokens]; negative: last_token[row]
  const int32_t* lens;        // [num_seqs - num_decodes]
  const int32_t* samples;     // [num_seqs - num_decodes]
  const int32_t* drafts;      // [num_seqs - num_decodes] number of last tokens that are guesses; null: none
  const int64_t* last_token;  // [max_rows]
  int32_t* page_table;        // [max_rows, max_pages]
  int64_t* ids;               // [num_tokens]
  int64_t* positions;         // [num_tokens]
  int64_t* out_slots;         // [num_tokens]
  int64_t* seq_rows;          // [num_seqs]
  int64_t* kv_lens;           // [num_seqs] after the step
  int64_t* query_start;       // [num_seqs + 1]
  int64_t* sample_indices;    // [num_sampled] the token before each guess of a sequence that samples, and its last one
  int64_t* sample_rows;       // [num_sampled]
  int64_t* sample_positions;  // [num_sampled] of the token to be sampled
  int64_t* guesses;           // [num_sampled] the guess after it; NO_GUESS after a sequence's last token
  int32_t num_spans;
  int32_t num_pages;
  int32_t num_seqs;
  int32_t num_decodes;
  int32_t num_tokens;
  int32_t max_rows;
  int32_t max_pages;
  int32_t page_size;
  int32_t num_sampled;  // out; -1: the plan contradicts itself or the table's size, and nothing may be used
};

// Returns num_sampled.
int32_t stage(const StageCall& call);

}  // namespace carousel
