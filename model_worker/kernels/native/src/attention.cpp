// Causal attention of new tokens over a paged KV pool: decodes, whole prompts and chunks after a cached
// prefix.
//
// The result of a query row is the same bits whatever else is in the batch, however its sequence was chunked
// and however many threads work: keys are taken in blocks of kBlock and splits of kSplit, both counted from
// position 0 of the sequence; a split is reduced block by block, and the splits of a row are folded in their
// order. Only who computes which split, and when, depends on the batch. Rows that go by lanes (attention_lanes.h)
// have another order, so that how a sequence is chunked shows, unless the call is to be deterministic.
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
#include "attention_lanes.h"
#include "attention_tiles.h"
#include "team.h"

namespace carousel {

// Few tiles, as in a small decode batch, leave threads idle, or the longest sequence alone at the end: then
// threads share the splits of a tile. Not of one with many rows, whose partial results would take more memory
// than the keys they are of.
constexpr int kMaxSharedRows = 32;
static_assert(kMinLaneRows > kMaxSharedRows, "lanes take all splits of a tile at once");

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
  for (int r = 0; r < tile.num_rows; ++r) {
    const int64_t token = call.query_start[tile.seq] + (tile.first_row + r) / group;
    const int head = tile.kv_head * group + (tile.first_row + r) % group;
    const T* q = (const T*)call.q + token * call.q_stride + head * call.head_dim;
    typename Math::Unit* to = units + r * head_units;
    if (call.cos_sin) {
      rotate(q, call.cos_sin + token * call.head_dim, call.head_dim, turned);
      q = turned;
    }
    for (int c = 0; c < call.head_dim; c += kLanes) Math::store_units(to + c / Math::kPerUnit, load(q + c));
  }
}

// What split `split` of the keys gives each row of the tile. Queries must have been loaded.
template <class Math>
void attend_split(const AttentionCall& call, const Tile& tile, int split, Workspace<Math>& work,
                  Partial out) {
  using T = typename Math::Stored;
  constexpr int kStep = 4 * kLanes;  // scores are computed for up to four vectors of keys at once
  const int head_dim = call.head_dim;
  const int width = call.num_kv_heads * head_dim;
  const int group = call.num_heads / call.num_kv_heads;
  const T* k_pool = (const T*)call.k_pool + tile.kv_head * head_dim;
  const T* v_pool = (const T*)call.v_pool + tile.kv_head * head_dim;
  std::fill_n(out.max, tile.num_rows, kNone);
  std::fill_n(out.rows, tile.num_rows * head_dim, 0.0f);
  std::memset(work.lane_sums, 0, tile.num_rows * sizeof work.lane_sums[0]);

  const int64_t first = std::max<int64_t>((int64_t)split * kSplit, tile.first_key(0, group, call.window));
  const int64_t begin = first / kBlock * kBlock;
  const int64_t end = std::min<int64_t>((split + 1LL) * kSplit, tile.end_key(tile.num_rows - 1, group));
  // Memory answers slowly: each block asks for the next one, also over the end of the split if that comes
  // next.
  const int64_t end_known =
      tile.split < 0 ? std::min(end + kBlock, tile.end_key(tile.num_rows - 1, group)) : end;
  find_slots(call, tile.seq, begin, first, end_known, work.slots);
#if defined(CAROUSEL_HAS_TILES)
  if constexpr (Math::kHasTiles) {
    if (FewRows::fit(tile.num_rows)) {
      static thread_local std::unique_ptr<FewRowsWorkspace> few(new FewRowsWorkspace);
      FewRows(call, tile, *few, work.slots, out).attend(work.queries, begin, end, work.lane_sums);
      for (int r = 0; r < tile.num_rows; ++r) out.sum[r] = sum_of(load(work.lane_sums[r]));
      return;
    }
  }
#endif
  typename Math::Shapes shapes;
  for (int64_t block = begin; block < end; block += kBlock) {
    const int num_keys = (int)std::min<int64_t>(kBlock, end - block);
    const int num_padded = std::min(kBlock, (num_keys + kStep - 1) / kStep * kStep);
    const int num_next = (int)std::min<int64_t>(kBlock, std::max<int64_t>(0, end_known - block - kBlock));
    const int64_t* slots = work.slots + (block - begin);
    pack_keys<Math>(k_pool, width, head_dim, slots, num_keys, num_padded, num_next, work.keys);
    pack_values<Math>(v_pool, width, head_dim, slots, num_keys, num_next, work.values);
    BlockStep<Math>{call, tile, work, shapes, out, block, num_keys, num_padded}.add_to_tile();
  }
  for (int r = 0; r < tile.num_rows; ++r) out.sum[r] = sum_of(load(work.lane_sums[r]));
}

// total = total and then part. The order of calls is the order of splits.
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
  for (int r = 0; r < tile.num_rows; ++r) {
    const int64_t token = call.query_start[tile.seq] + (tile.first_row + r) / group;
    const int head = tile.kv_head * group + (tile.first_row + r) % group;
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

// Whether so many rows of a sequence and KV head are computed in another order, by which they are faster.
template <class Math>
bool goes_by_lanes(const AttentionCall& call, int num_rows) {
  return Math::kHasTiles && num_rows >= kMinLaneRows && !call.deterministic;
}

// Tiles of all sequences. Longest work first, roughly: chunks stand last in a batch, and their last rows see
// most.
template <class Math>
std::vector<Tile> make_tiles(const AttentionCall& call) {
  std::vector<Tile> tiles;
  const int group = call.num_heads / call.num_kv_heads;
  for (int seq = call.num_seqs - 1; seq >= 0; --seq) {
    const int num_new = (int)(call.query_start[seq + 1] - call.query_start[seq]);
    const int num_rows = num_new * group;
    const bool by_lanes = goes_by_lanes<Math>(call, num_rows);
    const int size = by_lanes ? kLaneRows : tile_rows(call.head_dim);
    for (int first = (num_rows - 1) / size * size; first >= 0; first -= size) {
      for (int head = 0; head < call.num_kv_heads; ++head) {
        tiles.push_back(
            {seq, head, first, std::min(size, num_rows - first), call.kv_lens[seq] - num_new, -1, -1, by_lanes});
      }
    }
  }
  return tiles;
}

// One tile per split, their partial results numbered; partials of a tile are neighbours, in order.
std::vector<Tile> by_split(const AttentionCall& call, const std::vector<Tile>& tiles) {
  std::vector<Tile> items;
  for (const Tile& tile : tiles) {
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
  Partials(int count, int rows, int head_dim)
      : rows_(rows), head_dim_(head_dim), memory_(new float[(size_t)count * rows * (head_dim + 2)]) {}

  Partial at(int i) const {
    float* start = memory_.get() + (size_t)i * rows_ * (head_dim_ + 2);
    return {start, start + rows_, start + 2 * rows_};
  }

 private:
  int rows_;
  int head_dim_;
  std::unique_ptr<float[]> memory_;
};

template <class Math>
class Attention {
 public:
  explicit Attention(const AttentionCall& call) : call_(call), tiles_(make_tiles<Math>(call)) {}

  void run() {
    const int threads = num_threads();
    const bool share_splits = threads > 1 && (int)tiles_.size() < 4 * threads && max_rows() <= kMaxSharedRows;
    const std::vector<Tile> items = share_splits ? by_split(call_, tiles_) : tiles_;
    const Partials partials(share_splits ? (int)items.size() : 0, max_rows(), call_.head_dim);
    parallel_ranges(threads, call_.num_tokens, [&](int token, int end) {
      for (; token < end; ++token) store_kv<typename Math::Stored>(call_, token);
    });
    parallel_for(threads, (int)items.size(), [&](int i) {
      if (share_splits) {
        attend_one(items[i], partials.at(i));
      } else {
        attend_all(items[i]);
      }
    });
    if (!share_splits) return;
    parallel_for(threads, (int)items.size(), [&](int i) {
      if (items[i].split == first_split(call_, items[i])) finish(items[i], partials);
    });
  }

 private:
  // A team costs microseconds to wake and to join, which the smallest steps do not earn back.
  int num_threads() const {
    int64_t work = 0;
    for (int seq = 0; seq < call_.num_seqs; ++seq) {
      const int64_t keys =
          call_.window ? std::min<int64_t>(call_.window, call_.kv_lens[seq]) : call_.kv_lens[seq];
      work += keys * (call_.query_start[seq + 1] - call_.query_start[seq]);
    }
    return work * call_.num_heads * call_.head_dim < (1 << 16) ? 1 : call_.num_threads;
  }

  int max_rows() const {
    int rows = 0;
    for (const Tile& tile : tiles_) rows = std::max(rows, tile.num_rows);
    return rows;
  }

  static Workspace<Math>& workspace() {
    static thread_local std::unique_ptr<Workspace<Math>> work(new Workspace<Math>);
    return *work;
  }

  void attend_one(const Tile& tile, Partial out) {
    Workspace<Math>& work = workspace();
    load_queries<Math>(call_, tile, work);
    attend_split<Math>(call_, tile, tile.split, work, out);
  }

  void attend_all(const Tile& tile) {
    if constexpr (Math::kHasTiles) {
      if (tile.by_lanes) return attend_by_lanes(call_, tile);
    }
    Workspace<Math>& work = workspace();
    const Partial part{work.split_max, work.split_sum, work.split_rows};
    const Partial total{work.total_max, work.total_sum, work.total_rows};
    load_queries<Math>(call_, tile, work);
    clear(total, tile.num_rows, call_.head_dim);
    for (int split = first_split(call_, tile); split < end_split(call_, tile); ++split) {
      attend_split<Math>(call_, tile, split, work, part);
      fold(part, tile.num_rows, call_.head_dim, total);
    }
    write_out<typename Math::Stored>(call_, tile, total);
  }

  void finish(const Tile& first, const Partials& partials) {
    Workspace<Math>& work = workspace();
    const Partial total{work.total_max, work.total_sum, work.total_rows};
    clear(total, first.num_rows, call_.head_dim);
    const int count = end_split(call_, first) - first.split;
    for (int i = 0; i < count; ++i)
      fold(partials.at(first.partial + i), first.num_rows, call_.head_dim, total);
    write_out<typename Math::Stored>(call_, first, total);
  }

  const AttentionCall& call_;
  const std::vector<Tile> tiles_;
};

}  // namespace carousel

CAROUSEL_EXPORT void carousel_attention(const carousel::AttentionCall* call) {
  using namespace carousel;
  if (call->num_tokens == 0) return;
  if (call->dtype == kFloat32) {
    Attention<FloatMath<float>>(*call).run();
    return;
  }
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
}
