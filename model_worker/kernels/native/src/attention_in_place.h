// One block of keys for the few query rows of a decode, if vectors of floats multiply. Keys and values are widened in
// registers, because packing them takes longer than the products of so few rows. The products and their order are
// those of packed values, and so are the bits.
//
//   scores   keys [kLanes tokens, kLanes dims], transposed, x a query's dims one by one   -> a vector of scores
//   values   a row's weights, token by token, x values [kLanes dims]                      -> a vector of dims
#pragma once

#include "attention_block.h"

namespace carousel {

constexpr int kMaxRowsInPlace = 4;
constexpr int kKeyGroups = 2;  // of kLanes keys at a time: a single sum of each row would wait for its own last product

#if defined(__AVX2__) && !defined(__AVX512F__)

typedef uint16_t vquarters __attribute__((vector_size(32)));

// Interleaves the first (or last) four elements of each half of two vectors: shuffles that cross no half.
inline vquarters zip_first(vquarters a, vquarters b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
}

inline vquarters zip_last(vquarters a, vquarters b) {
  return __builtin_shufflevector(a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Both results in one vector.
inline vquarters joined(vhalf first, vhalf last) {
#if defined(__clang__)
  return __builtin_shufflevector(first, last, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  // One instruction, for which the compiler makes two.
  typedef long long vwide __attribute__((vector_size(32)));
  typedef long long vnarrow __attribute__((vector_size(16)));
  const vquarters low = __builtin_shufflevector(first, first, 0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1, -1, -1, -1, -1, -1);
  return (vquarters)__builtin_ia32_insert128i256((vwide)low, (vnarrow)last, 1);
#endif
}

// key[group][i] = dim i of kLanes rows. Elements of 16 bits are transposed, in half as many vectors.
inline void load_across(const bf16* const* rows, int dim, vfloat (&key)[kKeyGroups][kLanes]) {
  vquarters row[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    // Widening also takes the first four of both halves, so this leaves the rows in order.
    const int low = i < 4 ? i : i + 4;
    vhalf first, last;
    std::memcpy(&first, rows[low] + dim, sizeof first);
    std::memcpy(&last, rows[low + 4] + dim, sizeof last);
    row[i] = joined(first, last);
  }
#pragma GCC unroll 3
  for (int width = 1; width < kLanes; width *= 2) {
    vquarters next[kLanes];
#pragma GCC unroll 4
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = zip_first(row[i], row[i + kLanes / 2]);
      next[2 * i + 1] = zip_last(row[i], row[i + kLanes / 2]);
    }
    std::memcpy(row, next, sizeof next);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; ++i) {
    key[0][i] = (vfloat)zip_first(vquarters{}, row[i]);
    key[1][i] = (vfloat)zip_last(vquarters{}, row[i]);
  }
}

#endif

// key[group][i] = dim i of kLanes rows.
template <class T>
inline void load_across(const T* const* rows, int dim, vfloat (&key)[kKeyGroups][kLanes]) {
  for (int group = 0; group < kKeyGroups; ++group) {
    for (int i = 0; i < kLanes; ++i) key[group][i] = load(rows[group * kLanes + i] + dim);
    transpose(key[group]);
  }
}

// Addresses of a block's keys or values of one KV head.
template <class T>
struct Places {
  const T* pool;
  int width;
  int head_dim;
  const int64_t* slots;

  const T* row(int t) const { return pool + slots[t] * width; }
  void ask_for(int t) const { prefetch(pool, slots[t], width, head_dim); }
};

// scores[g][t] = query g . key t, for Rows rows. ask(t) is called for each token meanwhile.
template <int Rows, class T, class Ask>
void scores_in_place(const float* queries, const Places<T>& keys, int num_keys, int num_padded,
                     float (*scores)[kBlock], const Ask& ask) {
  static_assert(kBlock % (kKeyGroups * kLanes) == 0, "the last ones are whole, too");
  for (int t0 = 0; t0 < num_padded; t0 += kKeyGroups * kLanes) {
    const T* rows[kKeyGroups * kLanes];
    for (int i = 0; i < kKeyGroups * kLanes; ++i) {
      // Entries after the last key have no weight, so they get the dims of the last one.
      rows[i] = keys.row(std::min(t0 + i, num_keys - 1));
      if (t0 + i < num_keys) ask(t0 + i);
    }
    vfloat sum[kKeyGroups][Rows] = {};
    for (int dim = 0; dim < keys.head_dim; dim += kLanes) {
      vfloat key[kKeyGroups][kLanes];
      load_across(rows, dim, key);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
#pragma GCC unroll 4
        for (int g = 0; g < Rows; ++g) {
          const float query = queries[g * keys.head_dim + dim + i];
#pragma GCC unroll 2
          for (int group = 0; group < kKeyGroups; ++group) sum[group][g] += query * key[group][i];
        }
      }
    }
    for (int g = 0; g < Rows; ++g) {
      for (int group = 0; group < kKeyGroups; ++group) store(scores[g] + t0 + group * kLanes, sum[group][g]);
    }
  }
}

// rows[g][c ..] += weights[g] . values[.. , c ..], for Vectors vectors of columns.
template <int Rows, int Vectors, class T, class Ask>
void columns_in_place(const float (*weights)[kBlock], const Places<T>& values, int num_keys, int c, float* rows,
                      const Ask& ask) {
  vfloat sum[Vectors][Rows];
  for (int g = 0; g < Rows; ++g) {
    for (int i = 0; i < Vectors; ++i) sum[i][g] = load(rows + g * values.head_dim + c + i * kLanes);
  }
  for (int t = 0; t < num_keys; ++t) {
    ask(t);
    const T* const row = values.row(t) + c;
#pragma GCC unroll 4
    for (int i = 0; i < Vectors; ++i) {
      const vfloat value = load(row + i * kLanes);
#pragma GCC unroll 4
      for (int g = 0; g < Rows; ++g) sum[i][g] += weights[g][t] * value;
    }
  }
  for (int g = 0; g < Rows; ++g) {
    for (int i = 0; i < Vectors; ++i) store(rows + g * values.head_dim + c + i * kLanes, sum[i][g]);
  }
}

// Adds a block's keys to all rows of a tile, Rows. Slots are known of num_next keys behind the block.
template <int Rows, class Math>
void add_in_place(BlockStep<Math> step, const int64_t* slots, int num_next) {
  using T = typename Math::Stored;
  constexpr int kVectors = Rows <= 2 ? 4 : 2;
  const int head_dim = step.call.head_dim, width = step.call.num_kv_heads * head_dim;
  const int64_t head = (int64_t)step.tile.kv_head * head_dim;
  const Places<T> keys{(const T*)step.call.k_pool + head, width, head_dim, slots};
  const Places<T> values{(const T*)step.call.v_pool + head, width, head_dim, slots};
  const Places<T> next{keys.pool, width, head_dim, slots + kBlock};
  const auto nothing = [](int) {};
  scores_in_place<Rows>(step.queries, keys, step.num_keys, step.num_padded, step.work.scores,
                        [&](int t) {
                          step.work.ahead.advance(1);
                          values.ask_for(t);
                        });
  step.weigh_rows(0, Rows);
  int c = 0;
  for (; c + kVectors * kLanes <= head_dim; c += kVectors * kLanes) {
    if (c == 0) {
      columns_in_place<Rows, kVectors>(step.work.weights, values, step.num_keys, c, step.out.rows, [&](int t) {
        step.work.ahead.advance(1);
        if (t < num_next) next.ask_for(t);
      });
    } else {
      columns_in_place<Rows, kVectors>(step.work.weights, values, step.num_keys, c, step.out.rows, nothing);
    }
  }
  for (; c < head_dim; c += kLanes) {
    columns_in_place<Rows, 1>(step.work.weights, values, step.num_keys, c, step.out.rows, nothing);
  }
}

template <class Math, int... Rows>
void add_in_place(const BlockStep<Math>& step, const int64_t* slots, int num_next,
                  std::integer_sequence<int, Rows...>) {
  (void)((step.tile.num_rows == Rows + 1 && (add_in_place<Rows + 1>(step, slots, num_next), true)) || ...);
}

}  // namespace carousel
