// Arguments of one layer's attention, and the units in which it is computed. The binding mirrors AttentionCall.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "simd.h"

namespace carousel {

constexpr int kBlock = 64;   // keys whose scores stay in L1; a split is a multiple of it
constexpr int kSplit = 256;  // 128 to 512 are within 8 %; smaller splits give more work to share on many cores
constexpr int kMaxHeadDim = 256;
constexpr int kTileFloats = 8192;  // accumulators of a tile: 32 KiB, so that they stay in L1 or next to it
constexpr int kMaxTileRows = 128;
constexpr int kRowGroup = kLanes == 16 ? 8 : 4;  // rows whose sums are in registers together
constexpr int kMaxRowGroup = 16;                 // all rows of a tile
constexpr int kMaxFewRows = 8;                   // of a KV head, as in a decode: twice as many fill a tile
constexpr int kPrefetchLine = 64;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// One layer's attention of one step. The binding mirrors it field by field.
struct AttentionCall {
  const void* q;  // [num_tokens, num_heads, head_dim], tokens q_stride apart
  const void* k;  // [num_tokens, num_kv_heads, head_dim], tokens k_stride apart
  const void* v;
  void* out;     // [num_tokens, num_heads, head_dim]
  void* k_pool;  // [num_slots, num_kv_heads, head_dim]
  void* v_pool;
  const float* cos_sin;        // [num_tokens, head_dim]: rotate q and k first; null: they are rotated
  const int64_t* out_slots;    // [num_tokens]
  const int32_t* page_table;   // [rows, page_table_stride]
  const int64_t* rows;         // [num_seqs]
  const int64_t* kv_lens;      // [num_seqs]
  const int64_t* query_start;  // [num_seqs + 1]
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
  int64_t page_table_stride;
  int32_t num_tokens;
  int32_t num_seqs;
  int32_t page_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t window;  // keys a token sees, itself included; 0: all before it
  int32_t dtype;
  int32_t num_threads;
  int32_t force_float_math;  // also if the CPU multiplies bf16 itself
  float scale;
  float softcap;  // replaces a scaled score s by softcap * tanh(s / softcap); 0: no cap
  int32_t deterministic;  // each row is summed in one order, in any batch and chunk
};

// Rows [first_row, first_row + num_rows) of one sequence, for each of the KV heads [kv_head, kv_head + num_heads). In
// counts over all heads, the rows of one head are consecutive.
struct Tile {
  int32_t seq;
  int32_t kv_head;
  int32_t num_heads;
  int32_t first_row;
  int32_t num_rows;
  int64_t num_cached;
  int32_t split;    // the one split to compute, or -1: all of them
  int32_t partial;  // number of the partial result of a split
  bool by_lanes;    // see attention_lanes.h

  int rows_of_heads() const { return num_heads * num_rows; }

  struct Query {
    int64_t token;
    int head;
  };
  // Of row r, of all heads'.
  Query query(int r, int group, const int64_t* query_start) const {
    const int row = first_row + r % num_rows;
    return {query_start[seq] + row / group, (kv_head + r / num_rows) * group + row % group};
  }

  // Keys [first_key, end_key) are those a row sees.
  int64_t end_key(int row, int group) const { return num_cached + (first_row + row) / group + 1; }
  int64_t first_key(int row, int group, int window) const {
    return window ? std::max<int64_t>(0, end_key(row, group) - window) : 0;
  }
};

// Partial result of each row of a tile for some keys, before division by the sum of the weights.
struct Partial {
  float* max;   // [rows] of the scores; kNone: the row has seen no key
  float* sum;   // [rows] of exp(score - max)
  float* rows;  // [rows, head_dim] of exp(score - max) * value
};

// out = x [head_dim], rotated and rounded. cos_sin [head_dim]: cosines, then sines. It stores whole vectors, because
// a vector that was stored in small pieces cannot be loaded without a wait.
template <class T>
void rotate(const T* x, const float* cos_sin, int head_dim, T* out) {
  const int half = head_dim / 2;
  const float *cos = cos_sin, *sin = cos_sin + half;
  const auto turn = [&](const T* l, const T* r, const float* c, const float* s, T* to_l, T* to_r) {
    const vfloat left = load(l), right = load(r);
    store(to_l, left * load(c) - right * load(s));
    store(to_r, right * load(c) + left * load(s));
  };
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) turn(x + i, x + half + i, cos + i, sin + i, out + i, out + half + i);
  if (i == half) return;
  const int rest = half - i;
  T l[kLanes] = {}, r[kLanes] = {};
  float c[kLanes] = {}, s[kLanes] = {};
  std::copy_n(x + i, rest, l);
  std::copy_n(x + half + i, rest, r);
  std::copy_n(cos + i, rest, c);
  std::copy_n(sin + i, rest, s);
  turn(l, r, c, s, l, r);
  std::copy_n(l, rest, out + i);
  std::copy_n(r, rest, out + half + i);
}

// slots[t - begin] = slot of token t of a sequence, for t in [begin, end). Tokens before `first` are not visible. Their
// pages may belong to another sequence by now, and its NaN would be NaN even times 0, so they get the slot of `first`.
inline void find_slots(const AttentionCall& call, int seq, int64_t begin, int64_t first, int64_t end, int64_t* slots) {
  const int64_t size = call.page_size;
  const int32_t* page = call.page_table + call.rows[seq] * call.page_table_stride + begin / size;
  int64_t offset = begin % size;
  int64_t* to = slots;
  for (int64_t left = end - begin; left > 0; ++page) {
    const int64_t count = std::min(size - offset, left);
    const int64_t slot = *page * size + offset;
    for (int64_t i = 0; i < count; ++i) *to++ = slot + i;
    left -= count;
    offset = 0;
  }
  if (begin < first) std::fill_n(slots, first - begin, slots[first - begin]);
}

// Keys of a split that any row of a tile sees: positions [first, end). `begin` is the begin of first's block.
struct KeyRange {
  int64_t begin, first, end;

  KeyRange(const AttentionCall& call, const Tile& tile, int split) {
    const int group = call.num_heads / call.num_kv_heads;
    first = std::max<int64_t>((int64_t)split * kSplit, tile.first_key(0, group, call.window));
    begin = first / kBlock * kBlock;
    end = std::min<int64_t>((split + 1LL) * kSplit, tile.end_key(tile.num_rows - 1, group));
  }
};

inline int tile_rows(int head_dim) { return std::min(kMaxTileRows, kTileFloats / head_dim); }

}  // namespace carousel
