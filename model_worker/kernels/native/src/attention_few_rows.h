// Attention of few query rows, as a decode has, on AMX: keys and values are multiplied as they lie in the pool,
// in groups of 16 tokens, and nothing is packed. Tokens that do not lie side by side are copied.
//
//   scores   keys [16 tokens, 32 dims] x queries [16 pairs of dims, columns]      -> [16 tokens, columns]
//   values   weights [2 rows, 16 tokens] x values [16 tokens, 16 pairs of dims]   -> [2 rows, 16 pairs]
//
// The instruction multiplies pairs and adds both products. A pair of packed values is one dim of two tokens
// (attention_math.h), here it is two dims of one token: so a weight w comes as (w, 0) and as (0, w), whose sums
// are the even dims and the odd ones. The products and their order are those of the packed way, and so are the
// bits: a test compares decodes, chunks and prompts.
#pragma once

#include "attention_block.h"
#include "attention_tiles.h"

#if defined(CAROUSEL_HAS_TILES)

namespace carousel {

constexpr int kMaxFewRows = 8;  // twice as many are a tile's
static_assert(kBlock % (2 * kTileRows) == 0 && kSplit % kBlock == 0, "a group is whole in its block");

// What a thread keeps of one split, besides the Workspace.
struct FewRowsWorkspace {
  alignas(64) uint32_t queries[kMaxHeadDim / 2 * kMaxFewRows];  // [units of a head][columns]
  alignas(64) float scores[kMaxFewRows][kSplit];
  alignas(64) uint32_t weights[kBlock / kTileRows][2 * kMaxFewRows][kTileRows];  // rows (w, 0) and (0, w) in turns
  alignas(64) float sums[2][2 * kMaxFewRows][kLanes];
  alignas(64) bf16 copied[2][kTileRows * kMaxHeadDim];
};

// Sorts Columns interleaved columns of kLanes floats, a power of two: x holds column 0, then column 1 and so on.
template <int Columns, int... I>
void sort_columns(vfloat (&x)[Columns], std::integer_sequence<int, I...>) {
#pragma GCC unroll 3
  for (int width = 1; width < Columns; width *= 2) {
    vfloat next[Columns];
#pragma GCC unroll 4
    for (int i = 0; i < Columns / 2; ++i) {
      next[i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], (2 * I)...);
      next[Columns / 2 + i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], (2 * I + 1)...);
    }
    std::memcpy(x, next, sizeof next);
  }
}

// One split of the keys for a tile of few rows.
class FewRows {
 public:
  using Math = Bf16TileMath;
  static constexpr bool fit(int num_rows) { return num_rows <= kMaxFewRows; }

  FewRows(const AttentionCall& call, const Tile& tile, FewRowsWorkspace& work, const int64_t* slots, Partial out)
      : call_(call),
        tile_(tile),
        work_(work),
        slots_(slots),
        out_(out),
        width_(call.num_kv_heads * call.head_dim),
        group_(call.num_heads / call.num_kv_heads),
        side_by_side_(call.page_size % kTileRows == 0) {}

  // The keys at positions [begin, end), whose slots are given. lane_sums: [rows] of sums of weights, by lane.
  void attend(const uint32_t* queries, int64_t begin, int64_t end, float (*lane_sums)[kLanes]) {
    const int columns = lay_across(queries);
    TileShapes shapes;
    shapes.set_few(tile_.num_rows, columns);
    const int num_keys = (int)(end - begin);
    switch (columns) {
      case 1: compute_scores<1>(num_keys); break;
      case 2: compute_scores<2>(num_keys); break;
      case 4: compute_scores<4>(num_keys); break;
      default: compute_scores<8>(num_keys);
    }
    for (int t = 0; t < num_keys; t += kBlock) {
      const int in_block = std::min(kBlock, num_keys - t);
      weigh_block(begin + t, t, in_block, lane_sums);
      add_block(t, t + in_block);
    }
    for (int c = 0; c < tile_.num_rows * call_.head_dim; c += 2 * kLanes) interleave(out_.rows + c);
  }

 private:
  // Columns of the queries: a power of two, those beyond the rows zero.
  int lay_across(const uint32_t* queries) {
    const int rows = tile_.num_rows, units = call_.head_dim / 2;
    int columns = 1;
    while (columns < rows) columns *= 2;
    for (int u = 0; u < units; ++u) {
      for (int g = 0; g < columns; ++g) work_.queries[u * columns + g] = g < rows ? queries[g * units + u] : 0;
    }
    return columns;
  }

  // Rows of kTileRows tokens, stride bytes apart.
  struct Group {
    const bf16* rows;
    int64_t stride;
  };

  // Keys from the split's token t on. Rows behind its last token may be anything.
  Group keys_from(int t, int num_keys, bf16* copied) const {
    return side_by_side_ ? in_pool(call_.k_pool, t) : copy_of(call_.k_pool, t, num_keys, copied);
  }

  // Values likewise, with zeros behind the last one.
  Group values_from(int t, int num_keys, bf16* copied) const {
    const bool is_whole = num_keys - t >= kTileRows;
    return side_by_side_ && is_whole ? in_pool(call_.v_pool, t) : copy_of(call_.v_pool, t, num_keys, copied);
  }

  Group in_pool(const void* pool, int t) const {
    return {(const bf16*)pool + slots_[t] * width_ + tile_.kv_head * call_.head_dim, width_ * (int64_t)sizeof(bf16)};
  }

  Group copy_of(const void* pool, int t, int num_keys, bf16* copied) const {
    const int64_t row_bytes = call_.head_dim * sizeof(bf16);
    const int count = std::min(kTileRows, num_keys - t);
    for (int i = 0; i < count; ++i) std::memcpy(copied + i * call_.head_dim, in_pool(pool, t + i).rows, row_bytes);
    std::memset(copied + count * call_.head_dim, 0, (kTileRows - count) * row_bytes);
    see_memory();
    return {copied, row_bytes};
  }

  template <int Columns>
  void compute_scores(int num_keys) {
    constexpr int64_t kStride = Columns * sizeof(float);
    for (int t = 0; t < num_keys; t += 2 * kTileRows) {
      const Group key = keys_from(t, num_keys, work_.copied[0]);
      const bool has_more = t + kTileRows < num_keys;
      const Group more = has_more ? keys_from(t + kTileRows, num_keys, work_.copied[1]) : key;
      _tile_zero(5);
      _tile_zero(6);
      for (int u = 0; u < call_.head_dim / 2; u += kTileRows) {
        _tile_loadd(7, work_.queries + u * Columns, kStride);
        _tile_loadd(3, key.rows + 2 * u, key.stride);
        _tile_dpbf16ps(5, 3, 7);
        _tile_loadd(4, more.rows + 2 * u, more.stride);
        _tile_dpbf16ps(6, 4, 7);
      }
      alignas(64) float across[2][Columns * kLanes];
      _tile_stored(5, across[0], kStride);
      _tile_stored(6, across[1], kStride);
      see_memory();
      for (int half = 0; half < 2; ++half) {
        vfloat column[Columns];
        std::memcpy(column, across[half], sizeof column);
        sort_columns(column, std::make_integer_sequence<int, kLanes>());
        for (int g = 0; g < Columns; ++g) store(work_.scores[g] + t + half * kTileRows, column[g]);
      }
    }
  }

  void weigh_block(int64_t begin, int t, int num_keys, float (*lane_sums)[kLanes]) {
    for (int row = 0; row < tile_.num_rows; ++row) {
      const int first = (int)std::max<int64_t>(0, tile_.first_key(row, group_, call_.window) - begin);
      const int end = (int)std::min<int64_t>(num_keys, tile_.end_key(row, group_) - begin);
      if (first >= end) {
        for (auto& group : work_.weights) std::memset(group[2 * row], 0, 2 * sizeof group[0]);
        continue;
      }
      weigh(work_.scores[row] + t, first, end, kBlock, call_.scale, call_.softcap, call_.head_dim, out_.max + row,
            lane_sums[row], out_.rows + row * call_.head_dim, [&](int i, vfloat low, vfloat high) {
              store_apart(work_.weights[i / kTileRows][2 * row], low);
              store_apart(work_.weights[i / kTileRows + 1][2 * row], high);
            });
    }
  }

  static void store_apart(uint32_t* rows, vfloat weight) {
    const __m512i bits = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)weight));
    _mm512_store_si512(rows, bits);
    _mm512_store_si512(rows + kTileRows, _mm512_slli_epi32(bits, 16));
  }

  // Adds the split's tokens [begin, end) to rows whose dims lie even ones first in each 32.
  void add_block(int begin, int end) {
    see_memory();
    for (int t = begin; t < end; t += 2 * kTileRows) {
      const bool has_more = t + kTileRows < end;
      const Group value = values_from(t, end, work_.copied[0]);
      const Group more = has_more ? values_from(t + kTileRows, end, work_.copied[1]) : value;
      const auto* weights = work_.weights + (t - begin) / kTileRows;
      int c = 0;
      for (; c + 4 * kLanes <= call_.head_dim; c += 4 * kLanes) add_dims<2>(weights, value, more, has_more, c);
      if (c < call_.head_dim) add_dims<1>(weights, value, more, has_more, c);
    }
  }

  // Adds two groups, or one, to Chunks times 32 dims.
  template <int Chunks>
  void add_dims(const uint32_t (*weights)[2 * kMaxFewRows][kTileRows], Group value, Group more, bool has_more, int c) {
    _tile_zero(0);
    _tile_zero(1);
    multiply_values<Chunks>(weights[0], value, c);
    if (has_more) multiply_values<Chunks>(weights[1], more, c);
    _tile_stored(0, work_.sums[0], 64);
    if (Chunks == 2) _tile_stored(1, work_.sums[1], 64);
    see_memory();
    for (int chunk = 0; chunk < Chunks; ++chunk) {
      for (int r = 0; r < 2 * tile_.num_rows; ++r) {
        float* to = out_.rows + r / 2 * call_.head_dim + c + chunk * 2 * kLanes + r % 2 * kLanes;
        store(to, load(to) + load(work_.sums[chunk][r]));
      }
    }
  }

  template <int Chunks>
  static void multiply_values(const uint32_t (*weights)[kTileRows], Group value, int c) {
    _tile_loadd(2, weights, 64);
    _tile_loadd(3, value.rows + c, value.stride);
    _tile_dpbf16ps(0, 2, 3);
    if (Chunks == 1) return;
    _tile_loadd(4, value.rows + c + 2 * kLanes, value.stride);
    _tile_dpbf16ps(1, 2, 4);
  }

  static void interleave(float* dims) {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
    const vfloat even = load(dims), odd = load(dims + kLanes);
    store(dims, zip_low(even, odd, lanes));
    store(dims + kLanes, zip_high(even, odd, lanes));
  }

  const AttentionCall& call_;
  const Tile& tile_;
  FewRowsWorkspace& work_;
  const int64_t* slots_;
  const Partial out_;
  const int64_t width_;
  const int group_;
  const bool side_by_side_;
};

}  // namespace carousel

#endif
