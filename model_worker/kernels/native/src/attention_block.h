// One block of keys for the query rows of a tile: packing, scores, online softmax, weighted values.
#pragma once

#include "attention_ahead.h"
#include "attention_call.h"
#include "attention_math.h"

namespace carousel {

template <class Math>
struct Workspace {
  using Unit = typename Math::Unit;
  alignas(64) Unit keys[kBlock * kMaxHeadDim / Math::kPerUnit];  // [kBlock / kLanes][units of a head][kLanes]
  alignas(64) Unit values[kBlock * kMaxHeadDim / Math::kPerUnit];  // [kBlock / kPerUnit][head_dim]
  alignas(64) Unit queries[kTileFloats / Math::kPerUnit];          // [rows][units of a head]
  alignas(64) Unit weights[kMaxRowGroup][kBlock / Math::kPerUnit];
  alignas(64) float scores[kMaxRowGroup][kBlock];
  alignas(64) float lane_sums[kMaxTileRows][kLanes];
  alignas(64) float split_rows[kTileFloats];
  alignas(64) float total_rows[kTileFloats];
  float split_max[kMaxTileRows], split_sum[kMaxTileRows];
  float total_max[kMaxTileRows], total_sum[kMaxTileRows];
  int64_t slots[kSplit + kBlock];  // slots of the split's keys and of the block after it
  Ahead ahead;
};

template <class T>
void prefetch(const T* pool, int64_t slot, int width, int head_dim) {
  const char* row = (const char*)(pool + slot * width);
  for (int byte = 0; byte < head_dim * (int)sizeof(T); byte += kPrefetchLine) __builtin_prefetch(row + byte);
}

// Packs num_keys keys at slots, with zeros up to num_padded. Meanwhile prefetches the num_next keys after the block.
template <class Math>
void pack_keys(const typename Math::Stored* pool, int width, int head_dim, const int64_t* slots, int num_keys,
               int num_padded, int num_next, typename Math::Unit* keys, Ahead& ahead) {
  const int head_units = head_dim / Math::kPerUnit;
  for (int t0 = 0; t0 < num_padded; t0 += kLanes) {
    if (t0 < num_keys) ahead.advance(std::min(kLanes, num_keys - t0));
    for (int t = t0; t < std::min(t0 + kLanes, num_next); ++t)
      prefetch(pool, slots[kBlock + t], width, head_dim);
    for (int u = 0; u < head_units; u += kLanes) {
      vfloat row[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        row[i] =
            t0 + i < num_keys ? Math::units_of(pool + slots[t0 + i] * width + u * Math::kPerUnit) : vfloat{};
      }
      transpose(row);
      for (int i = 0; i < kLanes; ++i)
        std::memcpy(keys + t0 * head_units + (u + i) * kLanes, &row[i], sizeof row[i]);
    }
  }
}

// Number of units of packed values for a block's first num_keys keys.
template <class Math>
int units_of_keys(int num_keys) {
  constexpr int kApart = Math::kKeysApart;
  if (kApart == 0) return num_keys;
  return num_keys / (2 * kApart) * kApart + std::min(kApart, num_keys % (2 * kApart));
}

template <class Math>
void pack_values(const typename Math::Stored* pool, int width, int head_dim, const int64_t* slots,
                 int num_keys, int num_next, typename Math::Unit* values, Ahead& ahead) {
  const int num_units = units_of_keys<Math>(num_keys);
  constexpr int kApart = Math::kKeysApart;
  for (int u = 0; u < num_units; ++u) {
    const int t = kApart ? u / kApart * 2 * kApart + u % kApart : u;
    ahead.advance(Math::kPerUnit);
    for (int i = u * Math::kPerUnit; i < std::min((u + 1) * Math::kPerUnit, num_next); ++i)
      prefetch(pool, slots[kBlock + i], width, head_dim);
    // A missing key has weight 0, so any finite row can stand for it.
    const int next = t + kApart < num_keys ? t + kApart : t;
    Math::pack_values(values + u * head_dim, pool + slots[t] * width, pool + slots[next] * width, head_dim);
  }
  const int num_padded = (num_units + Math::kUnitStep - 1) / Math::kUnitStep * Math::kUnitStep;
  std::memset(values + num_units * head_dim, 0, (num_padded - num_units) * head_dim * sizeof *values);
}

// scores[g][t] = query g . key t, for Rows rows and num_padded keys.
template <class Math, int Rows, int Vectors>
void compute_scores(const typename Math::Unit* queries, const typename Math::Unit* keys, int head_units,
                    int num_padded, float (*scores)[kBlock]) {
  for (int t0 = 0; t0 < num_padded; t0 += Vectors * kLanes) {
    vfloat sum[Vectors][Rows] = {};
    const typename Math::Unit* block = keys + t0 * head_units;
    for (int u = 0; u < head_units; ++u) {
      typename Math::Vector key[Vectors];
      for (int i = 0; i < Vectors; ++i) key[i] = Math::load_units(block + (i * head_units + u) * kLanes);
#pragma GCC unroll 8
      for (int g = 0; g < Rows; ++g) {
        const typename Math::Vector query = Math::broadcast(queries[g * head_units + u]);
#pragma GCC unroll 4
        for (int i = 0; i < Vectors; ++i) sum[i][g] = Math::multiply_add(sum[i][g], query, key[i]);
      }
    }
    for (int g = 0; g < Rows; ++g) {
      for (int i = 0; i < Vectors; ++i) store(scores[g] + t0 + i * kLanes, sum[i][g]);
    }
  }
}

// rows[g][c ..] += weights[g] . values[.. , c ..], for Vectors vectors of columns.
template <class Math, int Rows, int Vectors>
void add_columns(const typename Math::Unit (*weights)[kBlock / Math::kPerUnit],
                 const typename Math::Unit* values, int num_units, int head_dim, int c, float* rows) {
  vfloat sum[Vectors][Rows];
  for (int g = 0; g < Rows; ++g) {
    for (int i = 0; i < Vectors; ++i) sum[i][g] = load(rows + g * head_dim + c + i * kLanes);
  }
  for (int u = 0; u < num_units; ++u) {
    typename Math::Vector value[Vectors];
    for (int i = 0; i < Vectors; ++i) value[i] = Math::load_units(values + u * head_dim + c + i * kLanes);
#pragma GCC unroll 8
    for (int g = 0; g < Rows; ++g) {
      const typename Math::Vector weight = Math::broadcast(weights[g][u]);
#pragma GCC unroll 4
      for (int i = 0; i < Vectors; ++i) sum[i][g] = Math::multiply_add(sum[i][g], weight, value[i]);
    }
  }
  for (int g = 0; g < Rows; ++g) {
    for (int i = 0; i < Vectors; ++i) store(rows + g * head_dim + c + i * kLanes, sum[i][g]);
  }
}

// Turns a row's raw scores of keys [first, end) of the block into weights. store_weights(t, low, high) gets those of
// keys [t, t + 2 * kLanes). Returns the factor for the sums of earlier keys' weighted values.
template <class Store>
float weigh(const float* scores, int first, int end, int num_padded, float scale, float softcap, float* max_so_far,
            float* lane_sums, const Store& store_weights) {
  vfloat x[kBlock / kLanes];
  vfloat highest = splat(kNone);
  vint lane = {};
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  for (int t = 0; t < num_padded; t += kLanes) {
    const vint key = lane + t;
    vfloat score = load(scores + t) * scale;
    if (softcap > 0) score = tanh(score / softcap) * softcap;
    x[t / kLanes] = (key >= first) & (key < end) ? score : splat(kNone);
    highest = max(highest, x[t / kLanes]);
  }
  const float new_max = std::max(*max_so_far, max_of(highest));
  const float shrink = *max_so_far == new_max ? 1.0f : exp(splat(*max_so_far - new_max))[0];
  *max_so_far = new_max;
  vfloat sum = load(lane_sums) * shrink;
  for (int t = 0; t < num_padded; t += 2 * kLanes) {
    const vfloat low = exp(x[t / kLanes] - new_max);
    const vfloat high = exp(x[t / kLanes + 1] - new_max);
    sum += low;
    sum += high;
    store_weights(t, low, high);
  }
  store(lane_sums, sum);
  return shrink;
}

template <class Math>
struct BlockStep {
  const AttentionCall& call;
  const Tile& tile;
  Workspace<Math>& work;
  typename Math::Shapes& shapes;
  const typename Math::Unit* queries;
  float (*lane_sums)[kLanes];
  Partial out;
  int64_t begin;  // position of the block's first key
  int num_keys;
  int num_padded;

  int group() const { return call.num_heads / call.num_kv_heads; }
  int head_units() const { return call.head_dim / Math::kPerUnit; }
  int num_units() const { return units_of_keys<Math>(num_keys); }

  // Whether any of rows [r, r + rows) sees any of the block's keys.
  bool is_seen(int r, int rows) const {
    return tile.end_key(r + rows - 1, group()) > begin &&
           tile.first_key(r, group(), call.window) < begin + num_keys;
  }

  static void multiply(float* row, int head_dim, float factor) {
    for (int c = 0; c < head_dim; c += kLanes) store(row + c, load(row + c) * factor);
  }

  // Computes the weights of rows [r, r + rows) from their scores.
  void weigh_rows(int r, int rows) {
    for (int g = 0; g < rows; ++g) {
      const int row = r + g;
      const int first = (int)std::max<int64_t>(0, tile.first_key(row, group(), call.window) - begin);
      const int end = (int)std::min<int64_t>(num_keys, tile.end_key(row, group()) - begin);
      if (first < end) {
        const float shrink = weigh(work.scores[g], first, end, num_padded, call.scale, call.softcap, out.max + row,
                                   lane_sums[row], [&](int t, vfloat low, vfloat high) {
                                     Math::store_weights(work.weights[g] + t / Math::kPerUnit, low, high);
                                   });
        if (shrink != 1.0f) multiply(out.rows + row * call.head_dim, call.head_dim, shrink);
      } else {
        std::memset(work.weights[g], 0, sizeof work.weights[g]);
      }
    }
  }

  // Adds the block's keys to rows [r, r + Rows) of the tile.
  template <int Rows>
  void add_to_rows(int r) {
    constexpr int kVectors = Rows <= 2 ? 4 : 2;
    const int head_dim = call.head_dim;
    if (!is_seen(r, Rows)) return;
    compute_scores<Math, Rows, kVectors>(queries + r * head_units(), work.keys, head_units(), num_padded,
                                         work.scores);
    weigh_rows(r, Rows);
    float* rows = out.rows + r * head_dim;
    int c = 0;
    for (; c + kVectors * kLanes <= head_dim; c += kVectors * kLanes) {
      add_columns<Math, Rows, kVectors>(work.weights, work.values, num_units(), head_dim, c, rows);
    }
    for (; c < head_dim; c += kLanes) {
      add_columns<Math, Rows, 1>(work.weights, work.values, num_units(), head_dim, c, rows);
    }
  }

  // The same for up to kMaxRowGroup rows.
  void add_to_rows_by_tiles(int r, int rows) {
    if (!is_seen(r, rows)) return;
    shapes.set(rows);
    Math::compute_scores(queries + r * head_units(), work.keys, head_units(), work.scores);
    weigh_rows(r, rows);
    for (int c = 0; c < call.head_dim; c += 2 * kLanes) {
      Math::add_columns(work.weights, work.values, num_units(), call.head_dim, c, out.rows + r * call.head_dim);
    }
  }

  template <int... Rows>
  void add_to_last_rows(int r, int num_rows, std::integer_sequence<int, Rows...>) {
    (void)((num_rows == Rows + 1 && (add_to_rows<Rows + 1>(r), true)) || ...);
  }

  void add_to_tile() {
    int r = 0;
    if constexpr (Math::kHasTiles) {
      for (; r < tile.num_rows; r += kMaxRowGroup) {
        add_to_rows_by_tiles(r, std::min(kMaxRowGroup, tile.num_rows - r));
      }
    } else {
      for (; r + kRowGroup <= tile.num_rows; r += kRowGroup) add_to_rows<kRowGroup>(r);
      add_to_last_rows(r, tile.num_rows - r, std::make_integer_sequence<int, kRowGroup - 1>());
    }
  }
};

}  // namespace carousel
