// The bf16 linear layer on AMX. 16 words of a packed panel (panels.h) are a tile of W as they lie in memory, and
// 32 elements of 16 rows are one of x. Each sum is taken over k in steps of 32, whatever the number of rows.
//
// Panels are taken in pairs: a panel and the next one, or, with a gate, the same one of both halves of W. More than
// 16 rows go in blocks of 32 rows by a pair, with their sums in four of the eight tiles:
//
//   first cache    a block's rows of x, kBlockSteps of k; W passes by with loads that leave them there
//   second cache   the panels of a task, while all of its rows pass; the next task's are asked for meanwhile
//
// What a block has summed leaves the tiles in the first steps of the next one, and is rounded and written during
// the others: the tile unit never waits for it.
#pragma once

#include "linear_call.h"
#include "panels.h"
#include "tiles.h"

#if defined(CAROUSEL_HAS_TILES)

namespace carousel {

constexpr int kTileDepth = 32;   // elements of k in a tile: a step
constexpr int kTileWords = 256;  // of W in a tile
constexpr int kBlockRows = 2 * kTileRows;
constexpr int kBlockSteps = 16;  // 32 KiB of x
constexpr int kMaxTilePanels = 8;
constexpr int kRowsPerTileTask = 512;
constexpr int64_t kTaskBytes = 1 << 20;  // of W: half of a second cache

struct BlockSums {
  alignas(64) float at[kBlockRows][2 * kPanel];
};

inline int num_columns(const LinearCall& call) { return call.gate ? call.n / 2 : call.n; }

class TileKernel {
 public:
  explicit TileKernel(const LinearCall& call) : call_(call) {}

  // `columns` panels of the output.
  void multiply_task(int row, int end_row, int panel, int columns) {
    const int pairs = columns / columns_of_pair_;
    for (int rows; row < end_row; row += rows) {
      rows = std::min(kBlockRows, end_row - row);
      if (rows > kTileRows) {
        multiply_pairs(row, rows, panel, pairs);
      } else {
        int p = 0;
        for (; p + 2 <= pairs; p += 2) multiply_few<2>(row, rows, panel + p * columns_of_pair_);
        if (p < pairs) multiply_few<1>(row, rows, panel + p * columns_of_pair_);
      }
      if (columns % columns_of_pair_) {
        for (int r = 0; r < rows; r += kTileRows) {
          multiply_one(row + r, std::min(kTileRows, rows - r), panel + columns - 1);
        }
      }
    }
    empty_tiles();
  }

 private:
  struct Block {
    BlockSums* sums = nullptr;
    int row = 0;
    int rows = 0;
    int panel = 0;
    bool is_complete = false;  // summed over all of k
  };

  // The rows of a block whose sums are in memory.
  class UnwrittenRows {
   public:
    UnwrittenRows(const LinearCall& call, const Block& block)
        : writer_(call, block.row, block.panel),
          sums_(block.sums ? block.sums->at[0] : nullptr),
          left_(block.is_complete ? block.rows : 0) {}

    void write(int rows) {
      for (rows = std::min(rows, left_), left_ -= rows; rows > 0; --rows, sums_ += 2 * kPanel) {
        writer_.write(load(sums_), load(sums_ + kPanel));
      }
    }

   private:
    PairWriter writer_;
    const float* sums_;
    int left_;
  };

  const bf16* x_at(int row, int step) const { return call_.x + (int64_t)row * call_.k + step * kTileDepth; }
  const uint32_t* weight_at(int panel, int step) const {
    return call_.weight + panel * panel_words_ + step * kTileWords;
  }

#define CAROUSEL_STORE_SUMS(tile, to) _tile_stored(tile, to, 2 * kPanel * sizeof(float))

  // 17 to 32 rows by all pairs of a task.
  void multiply_pairs(int row, int rows, int panel, int pairs) {
    if (rows < kBlockRows) empty_tiles();
    shapes_.set_two(rows - kTileRows);
    const int parts = (steps_ + kBlockSteps - 1) / kBlockSteps;
    ask_ahead(row, panel, pairs);
    for (int part = 0; part < parts; ++part) {
      for (int p = 0; p < pairs; ++p) {
        const Block block{&sums_[p], row, rows, panel + p * columns_of_pair_, part == parts - 1};
        multiply_block(block, steps_ * part / parts, steps_ * (part + 1) / parts);
      }
    }
  }

  // The task behind this one has the panels behind these: each row block asks for its share of them, of both
  // halves side by side.
  void ask_ahead(int row, int panel, int pairs) {
    constexpr int kTileLines = kTileWords * (int)sizeof(uint32_t) / kLineBytes;
    const int num_blocks = (call_.num_rows + kBlockRows - 1) / kBlockRows;
    const int64_t half_bytes = pairs * panel_words_ * (int64_t)sizeof(uint32_t);
    const int next = panel + pairs * columns_of_pair_;
    ahead_ = (const char*)weight_at(next, 0) + half_bytes * (row / kBlockRows) / num_blocks;
    other_ahead_ = call_.gate ? right_words_ * (int64_t)sizeof(uint32_t) : half_bytes;
    lines_ahead_ = next < num_columns(call_) / kPanel ? (kTileLines + num_blocks - 1) / num_blocks : 0;
  }

// A sum's tile goes to memory and begins the next block, where that one has arrived.
#define CAROUSEL_BEGIN_SUM(tile, first_row, column)                                            \
  if (in_tiles_.sums) CAROUSEL_STORE_SUMS(tile, in_tiles_.sums->at[first_row] + column);       \
  if (step == 0) {                                                                             \
    _tile_zero(tile);                                                                          \
  } else {                                                                                     \
    see_memory();                                                                              \
    _tile_loadd(tile, block.sums->at[first_row] + column, 2 * kPanel * sizeof(float));         \
  }

  void multiply_block(const Block& block, int step, int end) {
    const int rows_each_step = (kBlockRows + end - step - 1) / (end - step);
    const bf16 *x = x_at(block.row, step), *more_x = x_at(block.row + kTileRows, step);
    const uint32_t *w = weight_at(block.panel, step), *right_w = w + right_words_;
    CAROUSEL_BEGIN_SUM(0, 0, 0);
    _tile_stream_loadd(6, w, 64);
    _tile_loadd(4, x, x_stride_);
    _tile_dpbf16ps(0, 4, 6);
    CAROUSEL_BEGIN_SUM(1, 0, kPanel);
    _tile_stream_loadd(7, right_w, 64);
    _tile_dpbf16ps(1, 4, 7);
    CAROUSEL_BEGIN_SUM(2, kTileRows, 0);
    _tile_loadd(5, more_x, x_stride_);
    _tile_dpbf16ps(2, 5, 6);
    CAROUSEL_BEGIN_SUM(3, kTileRows, kPanel);
    _tile_dpbf16ps(3, 5, 7);
    see_memory();
    UnwrittenRows finished(call_, in_tiles_);
    while (++step < end) {
      x += kTileDepth, more_x += kTileDepth, w += kTileWords, right_w += kTileWords;
      for (int i = 0; i < lines_ahead_; ++i, ahead_ += kLineBytes) {
        _mm_prefetch(ahead_, _MM_HINT_T1);
        _mm_prefetch(ahead_ + other_ahead_, _MM_HINT_T1);
      }
      _tile_stream_loadd(6, w, 64);
      _tile_loadd(4, x, x_stride_);
      _tile_dpbf16ps(0, 4, 6);
      _tile_stream_loadd(7, right_w, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, more_x, x_stride_);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      finished.write(rows_each_step);
    }
    finished.write(kBlockRows);
    in_tiles_ = block;
  }

#undef CAROUSEL_BEGIN_SUM

  void empty_tiles() {
    if (!in_tiles_.sums) return;
    store_sums(*in_tiles_.sums);
    UnwrittenRows(call_, in_tiles_).write(kBlockRows);
    in_tiles_ = Block{};
  }

  // Sums 0 and 1, and 2 and 3, side by side.
  static void store_sums(BlockSums& sums) {
    see_memory();
    CAROUSEL_STORE_SUMS(0, sums.at[0]);
    CAROUSEL_STORE_SUMS(1, sums.at[0] + kPanel);
    CAROUSEL_STORE_SUMS(2, sums.at[kTileRows]);
    CAROUSEL_STORE_SUMS(3, sums.at[kTileRows] + kPanel);
    see_memory();
  }

  // Up to 16 rows by one or two pairs.
  template <int Pairs>
  void multiply_few(int row, int rows, int panel) {
    empty_tiles();
    shapes_.set(rows);
    const bf16* x = x_at(row, 0);
    const uint32_t *w = weight_at(panel, 0), *next_w = weight_at(panel + columns_of_pair_, 0);
    zero_sums();
    for (int step = 0; step < steps_; ++step, x += kTileDepth, w += kTileWords, next_w += kTileWords) {
      _tile_loadd(4, x, x_stride_);
      _tile_loadd(5, w, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, w + right_words_, 64);
      _tile_dpbf16ps(1, 4, 6);
      if constexpr (Pairs == 2) {
        _tile_loadd(7, next_w, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, next_w + right_words_, 64);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    store_sums(sums_[0]);
    for (int pair = 0; pair < Pairs; ++pair) {
      PairWriter writer(call_, row, panel + pair * columns_of_pair_);
      for (int r = 0; r < rows; ++r) {
        const float* sums = sums_[0].at[pair * kTileRows + r];
        writer.write(load(sums), load(sums + kPanel));
      }
    }
  }

  // The panel that is in no pair.
  void multiply_one(int row, int rows, int panel) {
    empty_tiles();
    shapes_.set(rows);
    const bf16* x = x_at(row, 0);
    const uint32_t* w = weight_at(panel, 0);
    _tile_zero(0);
    for (int step = 0; step < steps_; ++step, x += kTileDepth, w += kTileWords) {
      _tile_loadd(4, x, x_stride_);
      _tile_loadd(6, w, 64);
      _tile_dpbf16ps(0, 4, 6);
    }
    CAROUSEL_STORE_SUMS(0, sums_[0].at[0]);
    see_memory();
    for (int r = 0; r < rows; ++r) call_.write(row + r, panel, load(sums_[0].at[r]));
  }

#undef CAROUSEL_STORE_SUMS

  const LinearCall& call_;
  const int64_t x_stride_ = (int64_t)call_.k * sizeof(bf16);
  const int64_t panel_words_ = (int64_t)kPanel * (call_.k / 2);
  const int columns_of_pair_ = call_.gate ? 1 : 2;
  const int64_t right_words_ = panel_words_ * (call_.gate ? call_.n / 2 / kPanel : 1);  // from a pair's first panel
  const int steps_ = call_.k / kTileDepth;
  TileShapes shapes_;
  BlockSums sums_[kMaxTilePanels / 2];  // of each pair of panels
  Block in_tiles_;
  const char* ahead_ = nullptr;
  int64_t other_ahead_ = 0;
  int lines_ahead_ = 0;
};

inline bool fits_tiles(int k) { return k % kTileDepth == 0 && tiles_are_allowed(); }

inline void multiply_by_tiles(const LinearCall& call) {
  const int64_t bytes = (int64_t)kMaxTilePanels * kPanel * call.k * sizeof(bf16);
  const bool is_wide = call.num_rows > kTileRows && bytes <= kTaskBytes;
  const int panels = is_wide ? kMaxTilePanels : 4;
  const TaskSize most{call.gate ? panels / 2 : panels, kRowsPerTileTask};
  const auto multiply = [&](int row, int end_row, int panel, int columns) {
    TileKernel(call).multiply_task(row, end_row, panel, columns);
  };
  for_each_task(call.num_rows, num_columns(call), call.k, call.num_threads, most, multiply);
}

}  // namespace carousel

#endif
