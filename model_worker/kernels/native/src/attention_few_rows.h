// Attention of few query rows, as in a decode, on AMX: keys and values are multiplied where they are in the pool,
// in groups of 16 tokens, without packing. Tokens that are not contiguous are copied.
//
//   scores   keys [16 tokens, 32 dims] x queries [16 pairs of dims, columns]      -> [16 tokens, columns]
//   values   weights [2 rows, 16 tokens] x values [16 tokens, 16 pairs of dims]   -> [2 rows, 16 pairs]
//
// The instruction multiplies pairs and adds both products. A pair of packed values is one dim of two tokens
// (attention_math.h); here it is two dims of one token. So a weight w is used as (w, 0) and as (0, w), whose sums
// are those of the even dims and of the odd ones. The products and their order are those of packed values, and so
// are the bits: a test compares decodes, chunks and prompts.
#pragma once

#include "attention_block.h"
#include "tiles.h"

#if defined(CAROUSEL_HAS_TILES)

namespace carousel {

constexpr int kWeighWork = 2;  // of a row in a block, in loads of tiles: 1 to 4 are equally fast
constexpr int kGroups = kSplit / kTileRows;
static_assert(kBlock % (2 * kTileRows) == 0 && kSplit % kBlock == 0, "a group is whole in its block");

// A thread's memory for one split, besides the Workspace. Results that the tile unit stores are visible to other units
// only after a while. So each step is done for the whole split before the next one reads its results.
struct FewRowsWorkspace {
  alignas(64) uint32_t queries[kMaxHeadDim / 2 * kMaxFewRows];  // [units of a head][columns]
  alignas(64) float scores[kSplit * kMaxFewRows];               // [tokens][columns]
  alignas(64) uint32_t weights[kGroups][2 * kMaxFewRows][kTileRows];  // rows (w, 0) and (0, w) in turns
  // For two groups and 32 dims: a row's even dims, then its odd ones.
  alignas(64) float products[kGroups / 2][kMaxHeadDim / 32][2 * kMaxFewRows][kLanes];
  float shrink[kSplit / kBlock][kMaxFewRows];  // factors of a block for the earlier sums
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
  static constexpr bool fit(int num_rows) { return num_rows <= kMaxFewRows; }

  // The amount of work that `attend` reports: tiles that it loads, and the equivalent for weights.
  static int work(const AttentionCall& call, const Tile& tile, const KeyRange& keys) {
    const int num_keys = (int)(keys.end - keys.begin);
    const int pairs = (num_keys + 2 * kTileRows - 1) / (2 * kTileRows), blocks = (num_keys + kBlock - 1) / kBlock;
    return 4 * pairs * (call.head_dim / kTileDepth) + kWeighWork * blocks * tile.num_rows;
  }

  FewRows(const AttentionCall& call, const Tile& tile, FewRowsWorkspace& work, const int64_t* slots, Partial out,
          Ahead& ahead)
      : call_(call),
        tile_(tile),
        work_(work),
        slots_(slots),
        out_(out),
        ahead_(ahead),
        width_(call.num_kv_heads * call.head_dim),
        group_(call.num_heads / call.num_kv_heads),
        side_by_side_(call.page_size % kTileRows == 0) {}

  // The keys at positions [begin, end), whose slots are given. lane_sums: [rows] of sums of weights, by lane.
  void attend(const uint32_t* queries, int64_t begin, int64_t end, float (*lane_sums)[kLanes]) {
    const int columns = lay_across(queries);
    TileShapes shapes;
    shapes.set_few(tile_.num_rows, columns);
    const int num_keys = (int)(end - begin);
    first_seen_ = (int)std::max<int64_t>(0, tile_.first_key(0, group_, call_.window) - begin);
    switch (columns) {
      case 1: weigh_keys<1>(begin, num_keys, lane_sums); break;
      case 2: weigh_keys<2>(begin, num_keys, lane_sums); break;
      case 4: weigh_keys<4>(begin, num_keys, lane_sums); break;
      default: weigh_keys<8>(begin, num_keys, lane_sums);
    }
    multiply_values(num_keys);
    for (int row = 0; row < tile_.num_rows; ++row) add_products(row, num_keys);
  }

 private:
  // Number of columns of the queries: a power of two. Columns beyond the rows are zero.
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

  // Keys from the split's token t on. Rows after its last token are undefined.
  Group keys_from(int t, int num_keys, bf16* copied) const {
    return lie_side_by_side(t) ? in_pool(call_.k_pool, t) : copy_of(call_.k_pool, t, num_keys, copied);
  }

  // Values likewise, with zeros after the last one.
  Group values_from(int t, int num_keys, bf16* copied) const {
    const bool is_whole = num_keys - t >= kTileRows;
    return lie_side_by_side(t) && is_whole ? in_pool(call_.v_pool, t) : copy_of(call_.v_pool, t, num_keys, copied);
  }

  // Whether the 16 tokens from t on have consecutive slots.
  bool lie_side_by_side(int t) const { return side_by_side_ && t >= first_seen_; }

  Group in_pool(const void* pool, int t) const {
    return {(const bf16*)pool + slots_[t] * width_ + tile_.kv_head * call_.head_dim, width_ * (int64_t)sizeof(bf16)};
  }

  void ask_for(const void* pool, int t) const { prefetch(in_pool(pool, t).rows, 0, 0, call_.head_dim); }

  Group copy_of(const void* pool, int t, int num_keys, bf16* copied) const {
    const int64_t row_bytes = call_.head_dim * sizeof(bf16);
    const int count = std::min(kTileRows, num_keys - t);
    for (int i = 0; i < count; ++i) {
      std::memcpy(copied + i * call_.head_dim, in_pool(pool, t + i).rows, row_bytes);
      if (t + i + kBlock < num_keys) ask_for(pool, t + i + kBlock);
    }
    std::memset(copied + count * call_.head_dim, 0, (kTileRows - count) * row_bytes);
    see_memory();
    return {copied, row_bytes};
  }

  template <int Columns>
  void weigh_keys(int64_t begin, int num_keys, float (*lane_sums)[kLanes]) {
    for (int t = 0; t < num_keys; t += 2 * kTileRows) compute_scores<Columns>(t, num_keys);
    see_memory();
    // The processor itself prefetches the rest of a page.
    for (int t = 0; !side_by_side_ && t < std::min(kBlock, num_keys); ++t) ask_for(call_.v_pool, t);
    for (int t = 0; t < num_keys; t += kBlock) {
      float scores[Columns][kBlock];
      for (int i = 0; i < kBlock; i += kLanes) {
        vfloat column[Columns];
        std::memcpy(column, work_.scores + (t + i) * Columns, sizeof column);
        sort_columns(column, std::make_integer_sequence<int, kLanes>());
        for (int g = 0; g < Columns; ++g) store(scores[g] + i, column[g]);
      }
      const int num_in_block = std::min(kBlock, num_keys - t);
      for (int row = 0; row < tile_.num_rows; ++row) {
        ahead_.advance(kWeighWork);
        weigh_block(row, scores[row], begin, t, num_in_block, lane_sums[row]);
      }
    }
  }

  // For the split's tokens [t, t + 32), or for the last 16.
  template <int Columns>
  void compute_scores(int t, int num_keys) {
    constexpr int64_t kStride = Columns * sizeof(float);
    const Group key = keys_from(t, num_keys, work_.copied[0]);
    const Group more = t + kTileRows < num_keys ? keys_from(t + kTileRows, num_keys, work_.copied[1]) : key;
    _tile_zero(5);
    _tile_zero(6);
    for (int u = 0; u < call_.head_dim / 2; u += kTileRows) {
      ahead_.advance(1);
      _tile_loadd(7, work_.queries + u * Columns, kStride);
      _tile_loadd(3, key.rows + 2 * u, key.stride);
      _tile_dpbf16ps(5, 3, 7);
      ahead_.advance(1);
      _tile_loadd(4, more.rows + 2 * u, more.stride);
      _tile_dpbf16ps(6, 4, 7);
    }
    _tile_stored(5, work_.scores + t * Columns, kStride);
    _tile_stored(6, work_.scores + (t + kTileRows) * Columns, kStride);
  }

  // Computes a row's weights for keys [t, t + num_keys) of the split, one block.
  void weigh_block(int row, const float* scores, int64_t begin, int t, int num_keys, float* lane_sums) {
    const int first = (int)std::max<int64_t>(0, tile_.first_key(row, group_, call_.window) - begin - t);
    const int end = (int)std::min<int64_t>(num_keys, tile_.end_key(row, group_) - begin - t);
    auto* weights = work_.weights + t / kTileRows;
    float& shrink = work_.shrink[t / kBlock][row];
    if (first >= end) {
      shrink = 1.0f;
      for (int i = 0; i < kBlock / kTileRows; ++i) std::memset(weights[i][2 * row], 0, 2 * sizeof weights[i][0]);
      return;
    }
    shrink = weigh(scores, first, end, kBlock, call_.scale, call_.softcap, out_.max + row, lane_sums,
                   [&](int i, vfloat low, vfloat high) {
                     store_apart(weights[i / kTileRows][2 * row], low);
                     store_apart(weights[i / kTileRows + 1][2 * row], high);
                   });
  }

  static void store_apart(uint32_t* rows, vfloat weight) {
    const __m512i bits = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)weight));
    _mm512_store_si512(rows, bits);
    _mm512_store_si512(rows + kTileRows, _mm512_slli_epi32(bits, 16));
  }

  void multiply_values(int num_keys) {
    see_memory();
    for (int t = 0; t < num_keys; t += 2 * kTileRows) {
      const bool has_more = t + kTileRows < num_keys;
      const Group value = values_from(t, num_keys, work_.copied[0]);
      const Group more = has_more ? values_from(t + kTileRows, num_keys, work_.copied[1]) : value;
      int c = 0;
      for (; c + 4 * kLanes <= call_.head_dim; c += 4 * kLanes) multiply_dims<2>(t, value, more, has_more, c);
      if (c < call_.head_dim) multiply_dims<1>(t, value, more, has_more, c);
    }
    see_memory();
  }

  // Products of one or two groups and Chunks times 32 dims.
  template <int Chunks>
  void multiply_dims(int t, Group value, Group more, bool has_more, int c) {
    const int group = t / kTileRows, chunk = c / (2 * kLanes);
    _tile_zero(0);
    _tile_zero(1);
    multiply_group<Chunks>(group, value.rows + c, value.stride);
    if (has_more) multiply_group<Chunks>(group + 1, more.rows + c, more.stride);
    _tile_stored(0, work_.products[group / 2][chunk], 64);
    if (Chunks == 2) _tile_stored(1, work_.products[group / 2][chunk + 1], 64);
  }

  template <int Chunks>
  void multiply_group(int group, const bf16* values, int64_t stride) {
    _tile_loadd(2, work_.weights[group], 64);
    ahead_.advance(1);
    _tile_loadd(3, values, stride);
    _tile_dpbf16ps(0, 2, 3);
    if (Chunks == 1) return;
    ahead_.advance(1);
    _tile_loadd(4, values + 2 * kLanes, stride);
    _tile_dpbf16ps(1, 2, 4);
  }

  // Sums a row's products, two groups at a time, and puts its dims in order.
  void add_products(int row, int num_keys) {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
    for (int c = 0; c < call_.head_dim; c += 2 * kLanes) {
      vfloat even = {}, odd = {};
      for (int t = 0; t < num_keys; t += 2 * kTileRows) {
        if (t % kBlock == 0) {
          even *= work_.shrink[t / kBlock][row];
          odd *= work_.shrink[t / kBlock][row];
        }
        const auto* product = work_.products[t / (2 * kTileRows)][c / (2 * kLanes)] + 2 * row;
        even += load(product[0]);
        odd += load(product[1]);
      }
      float* to = out_.rows + row * call_.head_dim + c;
      store(to, zip_low(even, odd, lanes));
      store(to + kLanes, zip_high(even, odd, lanes));
    }
  }

  const AttentionCall& call_;
  const Tile& tile_;
  FewRowsWorkspace& work_;
  const int64_t* slots_;
  const Partial out_;
  Ahead& ahead_;
  const int64_t width_;
  const int group_;
  const bool side_by_side_;
  int first_seen_ = 0;  // of the split's tokens
};

}  // namespace carousel

#endif
