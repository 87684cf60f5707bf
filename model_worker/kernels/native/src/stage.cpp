// The reference is input_buffers.py with ReqToTokenPool.write and slots, and FutureMap.resolve.
#include "stage.h"

#include <algorithm>

namespace carousel {
namespace {

bool write_pages(const StageCall& call) {
  int64_t page = 0;
  for (const int32_t* span = call.spans; span != call.spans + 3 * call.num_spans; span += 3) {
    const int64_t row = span[0], first = span[1], count = span[2];
    if (row < 0 || row >= call.max_rows || first < 0 || count < 0 || first + count > call.max_pages ||
        count > call.num_pages - page) {
      return false;
    }
    std::copy_n(call.pages + page, count, call.page_table + row * call.max_pages + first);
    page += count;
  }
  return page == call.num_pages;
}

}  // namespace

int32_t stage(const StageCall& call) {
  if (!write_pages(call)) return -1;
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
    const bool samples = decodes || call.samples[seq - call.num_decodes];
    const int64_t drafts = decodes || !call.drafts ? 0 : call.drafts[seq - call.num_decodes];
    if (drafts < 0 || drafts >= size || (drafts && !samples)) return -1;
    for (int64_t behind = drafts; samples && behind >= 0; --behind, ++sampled) {
      const int64_t guess = behind ? call.token_ids[token - behind] : NO_GUESS;
      if (behind && guess < 0) return -1;
      call.sample_indices[sampled] = token - 1 - behind;
      call.sample_rows[sampled] = row;
      call.sample_positions[sampled] = end - behind;
      call.guesses[sampled] = guess;
    }
  }
  return token == call.num_tokens ? sampled : -1;
}

}  // namespace carousel
