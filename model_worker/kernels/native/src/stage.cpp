// A plan's sequences laid end to end: what its tokens are, where they stand, where their keys and values go.
// The reference is input_buffers.py with ReqToTokenPool.slots and FutureMap.resolve.
#include <cstdint>

#include "simd.h"

namespace carousel {

// The binding mirrors it field by field. Of a sequence beyond num_decodes, `lens` and `samples` say how many
// tokens it has and whether one is sampled after them; one that decodes has one, and one is.
struct StageCall {
  const int32_t* rows;        // [num_seqs]
  const int32_t* starts;      // [num_seqs] position of the first token
  const int32_t* token_ids;   // [num_tokens]; negative: last_token[row]
  const int32_t* lens;        // [num_seqs - num_decodes]
  const int32_t* samples;     // [num_seqs - num_decodes]
  const int64_t* last_token;  // [max_rows]
  const int32_t* page_table;  // [max_rows, max_pages]
  int64_t* ids;               // [num_tokens]
  int64_t* positions;         // [num_tokens]
  int64_t* out_slots;         // [num_tokens]
  int64_t* seq_rows;          // [num_seqs]
  int64_t* kv_lens;           // [num_seqs] after the step
  int64_t* query_start;       // [num_seqs + 1]
  int64_t* sample_indices;    // [num_sampled] the last token of each sequence that samples
  int64_t* sample_rows;       // [num_sampled]
  int64_t* sample_positions;  // [num_sampled] of the token to be sampled
  int32_t num_seqs;
  int32_t num_decodes;
  int32_t num_tokens;
  int32_t max_rows;
  int32_t max_pages;
  int32_t page_size;
  int32_t num_sampled;  // out; -1: the plan contradicts itself or the table's size, and nothing may be used
};

int32_t stage(const StageCall& call) {
  int64_t token = 0;
  int32_t sampled = 0;
  call.query_start[0] = 0;
  for (int32_t seq = 0; seq < call.num_seqs; ++seq) {
    const bool decodes = seq < call.num_decodes;
    const int64_t row = call.rows[seq], start = call.starts[seq];
    const int64_t size = decodes ? 1 : call.lens[seq - call.num_decodes], end = start + size;
    if (row < 0 || row >= call.max_rows || start < 0 || size < 1 || size > call.num_tokens - token ||
        end > (int64_t)call.max_pages * call.page_size) {
      return -1;
    }
    const int32_t* pages = call.page_table + row * call.max_pages;
    for (int64_t position = start; position < end; ++position, ++token) {
      const int32_t id = call.token_ids[token];
      call.ids[token] = id < 0 ? call.last_token[row] : id;
      call.positions[token] = position;
      call.out_slots[token] = (int64_t)pages[position / call.page_size] * call.page_size + position % call.page_size;
    }
    call.seq_rows[seq] = row;
    call.kv_lens[seq] = end;
    call.query_start[seq + 1] = token;
    if (decodes || call.samples[seq - call.num_decodes]) {
      call.sample_indices[sampled] = token - 1;
      call.sample_rows[sampled] = row;
      call.sample_positions[sampled] = end;
      ++sampled;
    }
  }
  return token == call.num_tokens ? sampled : -1;
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_stage(carousel::StageCall* call) { call->num_sampled = carousel::stage(*call); }
