// Causal attention of new tokens over a paged KV pool: decodes, whole prompts and chunks after a cached
// prefix.
//
// The bits of a query row do not depend on the rest of the batch, the chunks of its sequence or the number of
// threads. Keys are taken in blocks of kBlock and splits of kSplit, both counted from position 0 of the sequence;
// a split is reduced block by block, and the splits of a row are merged in order. Only the assignment of splits to
// threads, and their times, depend on the batch. Rows that are computed by lanes (attention_lanes.h) have another
// order of summation, in which chunks do matter, unless the call is deterministic.
//
//   keys of a row   |0 ........ split 0 ........ 255|256 ...... split 1 ...... 511|512 . split 2 .|
//                    block block block block         block block block block       block cut
//
// Query rows of one sequence and one KV head are (token, head of the group) pairs, tokens first; a tile of
// them shares the packed keys and values.
#include <memory>
#include <vector>

#include "attention_block.h"
#include "attention_call.h"
#include "attention_few_rows.h"
#include "attention_in_place.h"
#include "attention_lanes.h"
#include "attention_tiles.h"
#include "team.h"

namespace carousel {

// With few tiles, as in a small decode batch, threads would be idle, or one would work alone on the longest
// sequence at the end. So threads share the splits of a tile. They do not share a tile with many rows, whose
// partial results would take more memory than its keys, or one that is computed by lanes, all splits at once.
constexpr int kMaxSharedRows = 32;

// Bounds of the bytes of a token's keys in the KV heads of one tile. At the maximum two splits, the current and the
// next one, are half a megabyte with their values. Below the minimum, prefetching costs more than it saves.
constexpr int kMaxTokenBytes = 512, kMinAheadBytes = 256;

template <class T>
void store_kv(const AttentionCall& call, int token) {
  const int width = call.num_kv_heads * call.head_dim;
  const T* k = (const T*)call.k + token * call.k_stride;
  const T* v = (const T*)call.v + token * call.v_stride;
  T* k_slot = (T*)call.k_pool + call.out_slots[token] * width;
  T* v_slot = (T*)call.v_pool + call.out_slots[token] * width;
  std::memcpy(v_slot, v, width * sizeof(T));
  if (!call.cos_sin) {
    std::memcpy(k_slot, k, width * sizeof(T));
    return;
  }
  for (int start = 0; start < width; start += call.head_dim) {
    rotate(k + start, call.cos_sin + (int64_t)token * call.head_dim, call.head_dim, k_slot + start);
  }
}

template <class Math>
void load_queries(const AttentionCall& call, const Tile& tile, Workspace<Math>& work) {
  typename Math::Unit* units = work.queries;
  using T = typename Math::Stored;
  const int group = call.num_heads / call.num_kv_heads;
  const int head_units = call.head_dim / Math::kPerUnit;
  T turned[kMaxHeadDim];
  for (int r = 0; r < tile.rows_of_heads(); ++r) {
    const auto [token, head] = tile.query(r, group, call.query_start);
    const T* q = (const T*)call.q + token * call.q_stride + head * call.head_dim;
    typename Math::Unit* to = units + r * head_units;
    if (call.cos_sin) {
      rotate(q, call.cos_sin + token * call.head_dim, call.head_dim, turned);
      q = turned;
    }
    for (int c = 0; c < call.head_dim; c += kLanes) Math::store_units(to + c / Math::kPerUnit, load(q + c));
  }
}

// The amount of work that attend_head reports to Ahead.
template <class Math>
int work_of_head([[maybe_unused]] const AttentionCall& call, [[maybe_unused]] const Tile& tile,
                 const KeyRange& keys) {
#if defined(CAROUSEL_HAS_TILES)
  if (Math::kHasTiles && FewRows::fit(tile.num_rows)) return FewRows::work(call, tile, keys);
#endif
  return 2 * (int)(keys.end - keys.begin);
}

// Attends a tile's rows of one head to the keys. The slots of keys before end_known are known.
template <class Math>
void attend_head(const AttentionCall& call, const Tile& tile, const KeyRange& keys, int64_t end_known,
                 Workspace<Math>& work, const typename Math::Unit* queries, float (*lane_sums)[kLanes], Partial out) {
  using T = typename Math::Stored;
#if defined(CAROUSEL_HAS_TILES)
  if constexpr (Math::kHasTiles) {
    if (FewRows::fit(tile.num_rows)) {
      static thread_local std::unique_ptr<FewRowsWorkspace> few(new FewRowsWorkspace);
      FewRows(call, tile, *few, work.slots, out, work.ahead).attend(queries, keys.begin, keys.end, lane_sums);
      return;
    }
  }
#endif
  constexpr int kStep = 4 * kLanes;  // scores are computed for up to four vectors of keys at once
  const int head_dim = call.head_dim;
  const int width = call.num_kv_heads * head_dim;
  const T* k_pool = (const T*)call.k_pool + tile.kv_head * head_dim;
  const T* v_pool = (const T*)call.v_pool + tile.kv_head * head_dim;
  typename Math::Shapes shapes;
  for (int64_t block = keys.begin; block < keys.end; block += kBlock) {
    const int num_keys = (int)std::min<int64_t>(kBlock, keys.end - block);
    const int num_padded = std::min(kBlock, (num_keys + kStep - 1) / kStep * kStep);
    const int num_next = (int)std::min<int64_t>(kBlock, std::max<int64_t>(0, end_known - block - kBlock));
    const int64_t* slots = work.slots + (block - keys.begin);
    BlockStep<Math> step{call, tile, work, shapes, queries, lane_sums, out, block, num_keys, num_padded};
    if constexpr (Math::kPerUnit == 1) {
      if (tile.num_rows <= kMaxRowsInPlace) {
        add_in_place(step, slots, num_next, std::make_integer_sequence<int, kMaxRowsInPlace>());
        continue;
      }
    }
    pack_keys<Math>(k_pool, width, head_dim, slots, num_keys, num_padded, num_next, work.keys, work.ahead);
    pack_values<Math>(v_pool, width, head_dim, slots, num_keys, num_next, work.values, work.ahead);
    step.add_to_tile();
  }
}

// Attends each row of the tile to split `split` of the keys. The queries must have been loaded.
template <class Math>
void attend_split(const AttentionCall& call, const Tile& tile, int split, Workspace<Math>& work, Partial out) {
  const int num_rows = tile.rows_of_heads();
  std::fill_n(out.max, num_rows, kNone);
  std::fill_n(out.rows, num_rows * call.head_dim, 0.0f);
  std::memset(work.lane_sums, 0, num_rows * sizeof work.lane_sums[0]);
  const KeyRange keys(call, tile, split);
  // Packing prefetches the next block, also beyond the end of the split if the next split follows.
  const int64_t end_of_tile = tile.end_key(tile.num_rows - 1, call.num_heads / call.num_kv_heads);
  const bool goes_on = tile.split < 0 && tile.num_heads == 1;
  const int64_t end_known = goes_on ? std::min(keys.end + kBlock, end_of_tile) : keys.end;
  find_slots(call, tile.seq, keys.begin, keys.first, end_known, work.slots);
  Tile head = tile;
  for (int r = 0; r < num_rows; r += tile.num_rows, ++head.kv_head) {
    attend_head<Math>(call, head, keys, end_known, work, work.queries + r * call.head_dim / Math::kPerUnit,
                      work.lane_sums + r, {out.max + r, out.sum + r, out.rows + r * call.head_dim});
  }
  for (int r = 0; r < num_rows; ++r) out.sum[r] = sum_of(load(work.lane_sums[r]));
}

// Merges part into total. Calls must be in the order of splits.
inline void fold(const Partial& part, int num_rows, int head_dim, Partial total) {
  for (int r = 0; r < num_rows; ++r) {
    if (part.max[r] == kNone) continue;
    const float new_max = std::max(total.max[r], part.max[r]);
    const float keep = std::exp(total.max[r] - new_max);
    const float add = std::exp(part.max[r] - new_max);
    total.max[r] = new_max;
    total.sum[r] = total.sum[r] * keep + part.sum[r] * add;
    for (int c = r * head_dim; c < (r + 1) * head_dim; c += kLanes) {
      store(total.rows + c, load(total.rows + c) * keep + load(part.rows + c) * add);
    }
  }
}

inline void clear(Partial total, int num_rows, int head_dim) {
  std::fill_n(total.max, num_rows, kNone);
  std::fill_n(total.sum, num_rows, 0.0f);
  std::fill_n(total.rows, num_rows * head_dim, 0.0f);
}

template <class T>
void write_out(const AttentionCall& call, const Tile& tile, const Partial& total) {
  const int group = call.num_heads / call.num_kv_heads;
  for (int r = 0; r < tile.rows_of_heads(); ++r) {
    const auto [token, head] = tile.query(r, group, call.query_start);
    T* to = (T*)call.out + (token * call.num_heads + head) * call.head_dim;
    const float inverse = 1.0f / total.sum[r];
    for (int c = 0; c < call.head_dim; c += kLanes) {
      store(to + c, load(total.rows + r * call.head_dim + c) * inverse);
    }
  }
}

inline int first_split(const AttentionCall& call, const Tile& tile) {
  return (int)(tile.first_key(0, call.num_heads / call.num_kv_heads, call.window) / kSplit);
}

inline int end_split(const AttentionCall& call, const Tile& tile) {
  const int64_t end = tile.end_key(tile.num_rows - 1, call.num_heads / call.num_kv_heads);
  return (int)((end + kSplit - 1) / kSplit);
}

// Whether num_rows rows of a sequence and KV head are computed by lanes, which is faster but sums in another order.
template <class Math>
bool goes_by_lanes(const AttentionCall& call, int num_rows) {
  return Math::kHasTiles && num_rows >= kMinLaneRows && !call.deterministic;
}

// Maximum number of KV heads whose rows, if they are few, share one tile.
template <class Math>
int most_heads(const AttentionCall& call) {
  constexpr int kHeads = kMaxTileRows / kMaxFewRows;
  const int head_bytes = call.head_dim * (int)sizeof(typename Math::Stored);
  return std::min({call.num_kv_heads, kHeads, std::max(1, kMaxTokenBytes / head_bytes)});
}

// Tiles of all sequences, with several heads each if these have few rows. The longest work comes first, roughly:
// chunks are last in a batch, and their last rows see most keys.
template <class Math>
std::vector<Tile> make_tiles(const AttentionCall& call, int heads_of_few) {
  std::vector<Tile> tiles;
  const int group = call.num_heads / call.num_kv_heads;
  for (int seq = call.num_seqs - 1; seq >= 0; --seq) {
    const int num_new = (int)(call.query_start[seq + 1] - call.query_start[seq]);
    const int num_rows = num_new * group;
    const bool by_lanes = goes_by_lanes<Math>(call, num_rows);
    const int size = by_lanes ? kLaneRows : tile_rows(call.head_dim);
    const int heads = num_rows <= kMaxFewRows ? heads_of_few : 1;
    for (int first = (num_rows - 1) / size * size; first >= 0; first -= size) {
      for (int head = 0; head < call.num_kv_heads; head += heads) {
        tiles.push_back({seq, head, std::min(heads, call.num_kv_heads - head), first, std::min(size, num_rows - first),
                         call.kv_lens[seq] - num_new, -1, -1, by_lanes});
      }
    }
  }
  return tiles;
}

// One tile per split, with numbered partial results. Those of one tile are consecutive and in order.
std::vector<Tile> by_split(const AttentionCall& call, const std::vector<Tile>& tiles) {
  std::vector<Tile> items;
  for (const Tile& tile : tiles) {
    if (tile.by_lanes || tile.num_rows > kMaxSharedRows) {
      items.push_back(tile);
      continue;
    }
    for (int split = first_split(call, tile); split < end_split(call, tile); ++split) {
      items.push_back(tile);
      items.back().split = split;
      items.back().partial = (int)items.size() - 1;
    }
  }
  return items;
}

// Partial results of splits that several threads compute.
class Partials {
 public:
  Partials(const std::vector<Tile>& tiles, int head_dim) : head_dim_(head_dim) {
    for (const Tile& tile : tiles) {
      if (tile.partial >= 0) rows_ = std::max(rows_, tile.rows_of_heads());
    }
    if (any()) memory_.reset(new float[tiles.size() * rows_ * (head_dim + 2)]);
  }

  bool any() const { return rows_ > 0; }

  Partial at(int i) const {
    float* start = memory_.get() + (size_t)i * rows_ * (head_dim_ + 2);
    return {start, start + rows_, start + 2 * rows_};
  }

 private:
  int rows_ = 0;
  int head_dim_;
  std::unique_ptr<float[]> memory_;
};

template <class Math>
class Attention {
 public:
  explicit Attention(const AttentionCall& call) : call_(call) {}

  void run() {
    const int threads = num_threads();
    const std::vector<Tile> tiles = share(threads);
    const Partials partials(tiles, call_.head_dim);
    parallel_ranges(threads, call_.num_tokens, [&](int token, int end) {
      for (; token < end; ++token) store_kv<typename Math::Stored>(call_, token);
    });
    parallel_for(threads, (int)tiles.size(), [&](int i, int next) {
      const Tile* next_tile = next < 0 ? nullptr : &tiles[next];
      if (tiles[i].partial >= 0) {
        attend_one(tiles[i], next_tile, partials.at(i));
      } else {
        attend_all(tiles[i], next_tile);
      }
    });
    if (!partials.any()) return;
    parallel_for(threads, (int)tiles.size(), [&](int i) {
      if (tiles[i].partial >= 0 && tiles[i].split == first_split(call_, tiles[i])) finish(tiles[i], partials);
    });
  }

 private:
  // The tasks. A tile of several heads reads the pool in order. There are many tasks for each thread, so that no thread
  // waits long for another one at the end.
  std::vector<Tile> share(int threads) const {
    std::vector<Tile> tiles = make_tiles<Math>(call_, 1);
    const bool shares_splits = threads > 1 && (int)tiles.size() < 4 * threads;
    if (shares_splits) tiles = by_split(call_, tiles);
    int heads = most_heads<Math>(call_);
    while (heads > 1 && (int)tiles.size() < 16 * threads * heads) heads /= 2;
    if (heads == 1) return tiles;
    tiles = make_tiles<Math>(call_, heads);
    return shares_splits ? by_split(call_, tiles) : tiles;
  }

  // Waking and joining a team takes microseconds, more than the smallest steps save.
  int num_threads() const {
    int64_t work = 0;
    for (int seq = 0; seq < call_.num_seqs; ++seq) {
      const int64_t keys =
          call_.window ? std::min<int64_t>(call_.window, call_.kv_lens[seq]) : call_.kv_lens[seq];
      work += keys * (call_.query_start[seq + 1] - call_.query_start[seq]);
    }
    return work * call_.num_heads * call_.head_dim < (1 << 16) ? 1 : call_.num_threads;
  }

  static Workspace<Math>& workspace() {
    static thread_local std::unique_ptr<Workspace<Math>> work(new Workspace<Math>);
    return *work;
  }

  // Sets Ahead to the next split of the tile, or else to the next tile.
  void look_ahead(const Tile& tile, int split, const Tile* next, Ahead& ahead) {
    const int token_bytes = tile.num_heads * call_.head_dim * (int)sizeof(typename Math::Stored);
    const int work = tile.num_heads * work_of_head<Math>(call_, tile, KeyRange(call_, tile, split));
    if (token_bytes < kMinAheadBytes) {
      ahead.aim_at_nothing();
    } else if (tile.split < 0 && split + 1 < end_split(call_, tile)) {
      ahead.aim<typename Math::Stored>(call_, tile, split + 1, work);
    } else if (next) {
      ahead.aim<typename Math::Stored>(call_, *next, next->split < 0 ? first_split(call_, *next) : next->split, work);
    } else {
      ahead.aim_at_nothing();
    }
  }

  void attend_one(const Tile& tile, const Tile* next, Partial out) {
    Workspace<Math>& work = workspace();
    load_queries<Math>(call_, tile, work);
    look_ahead(tile, tile.split, next, work.ahead);
    attend_split<Math>(call_, tile, tile.split, work, out);
  }

  void attend_all(const Tile& tile, const Tile* next) {
    if constexpr (Math::kHasTiles) {
      if (tile.by_lanes) return attend_by_lanes(call_, tile);
    }
    Workspace<Math>& work = workspace();
    const Partial part{work.split_max, work.split_sum, work.split_rows};
    const Partial total{work.total_max, work.total_sum, work.total_rows};
    load_queries<Math>(call_, tile, work);
    clear(total, tile.rows_of_heads(), call_.head_dim);
    for (int split = first_split(call_, tile); split < end_split(call_, tile); ++split) {
      look_ahead(tile, split, next, work.ahead);
      attend_split<Math>(call_, tile, split, work, part);
      fold(part, tile.rows_of_heads(), call_.head_dim, total);
    }
    write_out<typename Math::Stored>(call_, tile, total);
  }

  void finish(const Tile& first, const Partials& partials) {
    Workspace<Math>& work = workspace();
    const Partial total{work.total_max, work.total_sum, work.total_rows};
    clear(total, first.rows_of_heads(), call_.head_dim);
    const int count = end_split(call_, first) - first.split;
    for (int i = 0; i < count; ++i)
      fold(partials.at(first.partial + i), first.rows_of_heads(), call_.head_dim, total);
    write_out<typename Math::Stored>(call_, first, total);
  }

  const AttentionCall& call_;
};

}  // namespace carousel

// Only the model's dtype, if it is known: attention takes the longest to compile.
CAROUSEL_EXPORT void carousel_attention(const carousel::AttentionCall* call) {
  using namespace carousel;
  if (call->num_tokens == 0) return;
#if !defined(CAROUSEL_DTYPE) || CAROUSEL_DTYPE == 0
  if (call->dtype == kFloat32) {
    Attention<FloatMath<float>>(*call).run();
    return;
  }
#endif
#if !defined(CAROUSEL_DTYPE) || CAROUSEL_DTYPE == 2
  if (call->dtype == kFloat16) {
    Attention<FloatMath<fp16>>(*call).run();
    return;
  }
#endif
#if !defined(CAROUSEL_DTYPE) || CAROUSEL_DTYPE == 1
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  if (call->head_dim % 32 == 0 && !call->force_float_math) {
#if defined(CAROUSEL_HAS_TILES)
    if (tiles_are_allowed()) {
      Attention<Bf16TileMath>(*call).run();
      return;
    }
#endif
    Attention<Bf16PairMath>(*call).run();
    return;
  }
#endif
  Attention<FloatMath<bf16>>(*call).run();
#endif
}
