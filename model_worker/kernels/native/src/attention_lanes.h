// Attention of many query rows of one sequence and KV head on AMX, 16 of them at a time, each in a lane:
//
//   scores  [keys][16]      = keys [keys][head_dim] by queries [head_dim][16]
//   sums    [head_dim][16] += values [head_dim][keys] by weights [keys][16]
//
// Maxima, sums and rescaling then need no operation across lanes, and weights are multiplied where they are made.
// A row's result depends only on its sequence, but its bits differ from those of attention_block.h.
#pragma once

#include <memory>

#include "attention_call.h"
#include "attention_math.h"
#include "tiles.h"

namespace carousel {

constexpr int kLaneRows = 256;    // that share packed keys and values
constexpr int kMinLaneRows = 33;  // with fewer, a head may be one tile, whose splits threads share

// Attends the tile's rows to all keys that they see, and writes their output. Only on CPUs with tiles.
void attend_by_lanes(const AttentionCall& call, const Tile& tile);

#if defined(CAROUSEL_HAS_TILES)

constexpr int kLaneKeys = 128;  // of a block: packed keys and values of 64 dimensions are 32 KiB
constexpr int kSumsOfTile = kTileRows * kLanes;  // floats
constexpr float kLowestScore = -1e30f;  // initial maximum of a row; finite

struct LaneWorkspace {
  alignas(64) bf16 keys[kLaneKeys * kMaxHeadDim];             // [kLaneKeys][head_dim]
  alignas(64) bf16 values[kLaneKeys * kMaxHeadDim];           // [kLaneKeys / kTileDepth][head_dim][kTileDepth]
  alignas(64) uint32_t queries[kLaneRows * kMaxHeadDim / 2];  // [groups][head_dim / 2][kLanes], pairs
  alignas(64) float sums[kLaneRows * kMaxHeadDim];            // [groups][head_dim][kLanes]
  alignas(64) float scores[kLaneKeys][kLanes];
  alignas(64) uint32_t weights[kLaneKeys / 2][kLanes];  // pairs
  alignas(64) float max[kLaneRows];                     // maximum of the scores so far
  alignas(64) float total[kLaneRows];                   // sum of the weights so far
  alignas(64) int32_t first_key[kLaneRows], end_key[kLaneRows];
  int64_t slots[kLaneKeys];
};

// 2^x with a relative error of 9e-5, a fortieth of the rounding of a weight; 1 for 0 and 0 for -infinity.
inline vfloat exp2(vfloat x) {
  const vfloat f = (vfloat)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
  vfloat p = f * 7.70670593e-2f + 2.27644972e-1f;
  p = p * f + 6.95116791e-1f;
  p = p * f + 1.0f;
  return (vfloat)_mm512_scalef_ps((__m512)p, (__m512)x);
}

class LaneTile {
 public:
  LaneTile(const AttentionCall& call, const Tile& tile, LaneWorkspace& work)
      : call_(call),
        tile_(tile),
        work_(work),
        head_dim_(call.head_dim),
        group_(call.num_heads / call.num_kv_heads),
        num_groups_((tile.num_rows + kLanes - 1) / kLanes),
        scale_(1.44269504f * (call.softcap > 0 ? 1.0f : call.scale)) {}

  void attend() {
    for (int g = 0; g < num_groups_; ++g) load_queries(g);
    std::memset(work_.sums, 0, (size_t)num_groups_ * kLanes * head_dim_ * sizeof(float));
    std::fill_n(work_.max, num_groups_ * kLanes, kLowestScore);
    std::fill_n(work_.total, num_groups_ * kLanes, 0.0f);
    shapes_.set(kTileRows);
    const int first = work_.first_key[0] / kLaneKeys * kLaneKeys, end = work_.end_key[tile_.num_rows - 1];
    int num_keys = take_block(first, end);
    for (int begin = first, num_next; begin < end; begin += num_keys, num_keys = num_next) {
      pack_keys(num_keys);
      pack_values(num_keys);
      num_next = take_block(begin + num_keys, end);
      for (int g = 0; g < num_groups_; ++g) {
        prefetch(num_next * g / num_groups_, num_next * (g + 1) / num_groups_);
        add_block(g, begin, num_keys);
      }
    }
    for (int g = 0; g < num_groups_; ++g) write_out(g);
  }

 private:
  int64_t token_of(int row) const { return call_.query_start[tile_.seq] + (tile_.first_row + row) / group_; }
  int head_of(int row) const { return tile_.kv_head * group_ + (tile_.first_row + row) % group_; }
  float* sums_of(int g) const { return work_.sums + (int64_t)g * kLanes * head_dim_; }
  uint32_t* queries_of(int g) const { return work_.queries + (int64_t)g * kLanes * head_dim_ / 2; }

  // Rows after the last one are copies of it, and are not written.
  void load_queries(int g) {
    alignas(64) bf16 rows[kLanes][kMaxHeadDim];
    for (int i = 0; i < kLanes; ++i) {
      const int row = std::min(g * kLanes + i, tile_.num_rows - 1);
      const int64_t token = token_of(row);
      const bf16* q = (const bf16*)call_.q + token * call_.q_stride + head_of(row) * head_dim_;
      if (call_.cos_sin) {
        rotate(q, call_.cos_sin + token * head_dim_, head_dim_, rows[i]);
      } else {
        std::memcpy(rows[i], q, head_dim_ * sizeof(bf16));
      }
      work_.first_key[g * kLanes + i] = (int32_t)tile_.first_key(row, group_, call_.window);
      work_.end_key[g * kLanes + i] = (int32_t)tile_.end_key(row, group_);
    }
    for (int c = 0; c < head_dim_; c += kTileDepth) {
      vfloat pairs[kLanes];
      for (int i = 0; i < kLanes; ++i) std::memcpy(&pairs[i], rows[i] + c, sizeof pairs[i]);
      transpose(pairs);
      std::memcpy(queries_of(g) + c / 2 * kLanes, pairs, sizeof pairs);
    }
  }

  const bf16* pool_row(const void* pool, int key) const {
    return (const bf16*)pool + (work_.slots[key] * call_.num_kv_heads + tile_.kv_head) * head_dim_;
  }

  // Finds the slots of the block of keys that begins at `begin`, and returns their number.
  int take_block(int begin, int end) {
    const int num_keys = std::min(kLaneKeys, end - begin);
    find_slots(call_, tile_.seq, begin, work_.first_key[0], begin + num_keys, work_.slots);
    return num_keys;
  }

  // The next block is prefetched while this one is multiplied.
  void prefetch(int key, int end_key) const {
    for (; key < end_key; ++key) {
      for (int c = 0; c < head_dim_; c += kTileDepth) {
        __builtin_prefetch(pool_row(call_.k_pool, key) + c);
        __builtin_prefetch(pool_row(call_.v_pool, key) + c);
      }
    }
  }

  // Rows after the last one are left unchanged: their scores are not used.
  void pack_keys(int num_keys) {
    for (int t = 0; t < num_keys; ++t) {
      const bf16* key = pool_row(call_.k_pool, t);
      for (int c = 0; c < head_dim_; c += kTileDepth) std::memcpy(work_.keys + t * head_dim_ + c, key + c, 64);
    }
  }

  // Zeros after the last one, whose weights are 0.
  void pack_values(int num_keys) {
    for (int t0 = 0; t0 < num_keys; t0 += kTileDepth) {
      const bf16* rows[kTileDepth];
      for (int i = 0; i < kTileDepth; ++i) rows[i] = t0 + i < num_keys ? pool_row(call_.v_pool, t0 + i) : kZeros;
      for (int c = 0; c < head_dim_; c += kTileDepth) {
        pack_values(rows, c, interleaving(0, 32), work_.values + t0 * head_dim_ + c * kTileDepth);
        pack_values(rows, c, interleaving(kLanes, 32), work_.values + t0 * head_dim_ + (c + kLanes) * kTileDepth);
      }
    }
  }

  // A tile of values: 16 of the dimensions c to c + 31, chosen by `order`, for kTileDepth keys.
  static void pack_values(const bf16* const* rows, int c, __m512i order, bf16* to) {
    vfloat pairs[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const __m512i even = _mm512_loadu_si512(rows[2 * i] + c), odd = _mm512_loadu_si512(rows[2 * i + 1] + c);
      pairs[i] = (vfloat)_mm512_permutex2var_epi16(even, order, odd);
    }
    transpose(pairs);
    std::memcpy(to, pairs, sizeof pairs);
  }

  // Attends 16 rows to keys [begin, begin + num_keys): as many as any row sees, in steps of kTileDepth.
  void add_block(int g, int begin, int num_keys) {
    const int32_t *first_key = work_.first_key + g * kLanes, *end_key = work_.end_key + g * kLanes;
    const int first = std::max(0, first_key[0] - begin), end = std::min(num_keys, end_key[kLanes - 1] - begin);
    if (first >= end) return;
    const int from = first / kTileDepth * kTileDepth, to = (end + kTileDepth - 1) / kTileDepth * kTileDepth;
    const bool all_see_all = first_key[kLanes - 1] <= begin + from && end_key[0] >= begin + to;
    see_memory();
    compute_scores(g, from, to);
    see_memory();
    all_see_all ? weigh<false>(g, begin, from, to) : weigh<true>(g, begin, from, to);
    see_memory();
    add_values(g, from, to);
    see_memory();
  }

  void compute_scores(int g, int from, int to) {
    int t = from;
    for (; t + 2 * kTileDepth <= to; t += 2 * kTileDepth) compute_scores<4>(g, t);
    if (t < to) compute_scores<2>(g, t);
  }

  // For `Tiles` times 16 keys.
  template <int Tiles>
  void compute_scores(int g, int t) {
    const int64_t stride = head_dim_ * sizeof(bf16), next = kTileRows * head_dim_;
    const uint32_t* queries = queries_of(g);
    const bf16* keys = work_.keys + t * head_dim_;
    zero_sums();
    for (int c = 0; c < head_dim_; c += kTileDepth, keys += kTileDepth, queries += kTileRows * kLanes) {
      _tile_loadd(4, queries, 64);
      _tile_loadd(5, keys, stride);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(6, keys + next, stride);
      _tile_dpbf16ps(1, 6, 4);
      if constexpr (Tiles == 4) {
        _tile_loadd(7, keys + 2 * next, stride);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(5, keys + 3 * next, stride);
        _tile_dpbf16ps(3, 5, 4);
      }
    }
    float* scores = work_.scores[t];
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + kSumsOfTile, 64);
    if constexpr (Tiles == 4) {
      _tile_stored(2, scores + 2 * kSumsOfTile, 64);
      _tile_stored(3, scores + 3 * kSumsOfTile, 64);
    }
  }

  // Turns scores of keys [from, to) into weights, and rescales the earlier sums.
  template <bool kMasked>
  void weigh(int g, int begin, int from, int to) {
    const vfloat old_max = load(work_.max + g * kLanes);
    vfloat highest = old_max;
    if (kMasked || call_.softcap > 0) {
      vint first, end;
      std::memcpy(&first, work_.first_key + g * kLanes, sizeof first);
      std::memcpy(&end, work_.end_key + g * kLanes, sizeof end);
      for (int t = from; t < to; ++t) {
        vfloat score = load(work_.scores[t]);
        if (call_.softcap > 0) score = tanh(score * (call_.scale / call_.softcap)) * call_.softcap;
        if (kMasked) score = (first <= begin + t) & (end > begin + t) ? score : splat(kNone);
        store(work_.scores[t], score);
        highest = max(highest, score);
      }
    } else {
      vfloat of[4] = {highest, highest, highest, highest};  // independent: each waits for the one before
      for (int t = from; t < to; t += 4) {
        for (int i = 0; i < 4; ++i) of[i] = max(of[i], load(work_.scores[t + i]));
      }
      highest = max(max(of[0], of[1]), max(of[2], of[3]));
    }
    vfloat total = load(work_.total + g * kLanes);
    if (_mm512_cmp_ps_mask((__m512)old_max, (__m512)highest, _CMP_NEQ_OQ)) {
      const vfloat shrink = exp2((old_max - highest) * scale_);
      float* sums = sums_of(g);
      for (int c = 0; c < head_dim_; ++c) store(sums + c * kLanes, load(sums + c * kLanes) * shrink);
      total *= shrink;
      store(work_.max + g * kLanes, highest);
    }
    const __m512i order = interleaving(0, 16);
    const vfloat shift = highest * scale_;
    vfloat odd_total = {};
    for (int t = from; t < to; t += 2) {
      const vfloat even = exp2(load(work_.scores[t]) * scale_ - shift);
      const vfloat odd = exp2(load(work_.scores[t + 1]) * scale_ - shift);
      total += even;
      odd_total += odd;
      // The low half comes from the second argument. A pair belongs to one lane and two keys.
      const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
      _mm512_store_si512(work_.weights[t / 2], _mm512_permutexvar_epi16(order, halves));
    }
    store(work_.total + g * kLanes, total + odd_total);
  }

  // sums += values by weights of keys [from, to).
  void add_values(int g, int from, int to) {
    int c = 0;
    for (; c + 64 <= head_dim_; c += 64) add_values<4>(g, c, from, to);
    if (c < head_dim_) add_values<2>(g, c, from, to);
  }

  // For `Tiles` times 16 dimensions.
  template <int Tiles>
  void add_values(int g, int c, int from, int to) {
    constexpr int kNext = kTileRows * kTileDepth;
    float* sums = sums_of(g) + c * kLanes;
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + kSumsOfTile, 64);
    if constexpr (Tiles == 4) {
      _tile_loadd(2, sums + 2 * kSumsOfTile, 64);
      _tile_loadd(3, sums + 3 * kSumsOfTile, 64);
    }
    for (int t = from; t < to; t += kTileDepth) {
      const bf16* values = work_.values + t * head_dim_ + c * kTileDepth;
      _tile_loadd(4, work_.weights[t / 2], 64);
      _tile_loadd(5, values, 64);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(6, values + kNext, 64);
      _tile_dpbf16ps(1, 6, 4);
      if constexpr (Tiles == 4) {
        _tile_loadd(7, values + 2 * kNext, 64);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(5, values + 3 * kNext, 64);
        _tile_dpbf16ps(3, 5, 4);
      }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kSumsOfTile, 64);
    if constexpr (Tiles == 4) {
      _tile_stored(2, sums + 2 * kSumsOfTile, 64);
      _tile_stored(3, sums + 3 * kSumsOfTile, 64);
    }
  }

  void write_out(int g) {
    const vfloat inverse = 1.0f / load(work_.total + g * kLanes);
    const int num_rows = std::min(kLanes, tile_.num_rows - g * kLanes);
    for (int c = 0; c < head_dim_; c += kLanes) {
      vfloat rows[kLanes];
      for (int i = 0; i < kLanes; ++i) rows[i] = load(sums_of(g) + (c + i) * kLanes) * inverse;
      transpose(rows);
      for (int i = 0; i < num_rows; ++i) {
        const int row = g * kLanes + i;
        store((bf16*)call_.out + (token_of(row) * call_.num_heads + head_of(row)) * head_dim_ + c, rows[i]);
      }
    }
  }

  static constexpr bf16 kZeros[kMaxHeadDim] = {};

  const AttentionCall& call_;
  const Tile& tile_;
  LaneWorkspace& work_;
  const int head_dim_;
  const int group_;
  const int num_groups_;
  const float scale_;  // factor of the stored scores, for powers of 2
  TileShapes shapes_;
};

inline void attend_by_lanes(const AttentionCall& call, const Tile& tile) {
  static thread_local std::unique_ptr<LaneWorkspace> work(new LaneWorkspace);
  LaneTile(call, tile, *work).attend();
}

#endif

}  // namespace carousel
