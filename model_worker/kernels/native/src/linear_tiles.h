// The bf16 linear layer on AMX. 16 consecutive words of a packed panel (panels.h) are a tile of W, and 32 elements of
// 16 rows are a tile of x. Each sum is taken over k in steps of 32, whatever the number of rows.
//
// Panels are taken in pairs: a panel and the next one, or, with a gate, the same one of both halves of W. More than
// 16 rows are computed in blocks of 32 rows by a pair, with their sums in four of the eight tiles:
//
//   first cache    a block's rows of x, kPartSteps of k; W passes by with loads that leave them there
//   second cache   the panels of a task, while all of its rows pass; if they are too large a part of k at a time,
//                  and then that part of x, too. The next weights are asked for meanwhile
//
// The sums of a block leave the tiles in the first steps of the next one, and are rounded and written during the
// other steps, so the tile unit never waits for that.
#pragma once

#include "linear_call.h"
#include "panels.h"
#include "tiles.h"

#if defined(CAROUSEL_HAS_TILES)

namespace carousel {

constexpr int kTileWords = 256;  // of W in a tile, a step of k
constexpr int kBlockRows = 2 * kTileRows;
constexpr int kPartSteps = 16;  // 32 KiB of x
constexpr int kKeptPanels = 8;
constexpr int64_t kKeptBytes = 1 << 20;  // of W: half of a second cache
constexpr int kSweptPanels = 16;         // of larger ones
constexpr int kSweptBlocks = 8;          // of rows

struct BlockSums {
  alignas(64) float at[kBlockRows][2 * kPanel];
};

// Whether a task's panels with all of k fit the second-level cache.
inline bool keeps_panels(int k) { return (int64_t)kKeptPanels * kPanel * k * sizeof(bf16) <= kKeptBytes; }

class TileKernel {
 public:
  explicit TileKernel(const LinearCall& call) : call_(call) {}

  // `columns` panels of the output.
  void multiply_task(int row, int end_row, int panel, int columns) {
    const int pairs = columns / columns_of_pair_;
    const int full = row + (end_row - row) / kBlockRows * kBlockRows;
    const int end_blocks = end_row - full > kTileRows ? end_row : full;
    const int sweep = keeps_panels_ ? kBlockRows : kSweptBlocks * kBlockRows;
    for (int first = row; first < end_blocks; first += sweep) {
      const int end = std::min(first + sweep, end_blocks);
      for (int part = 0; part < parts_; ++part) multiply_part(part, first, end, panel, columns);
    }
    empty_tiles();
    if (end_blocks < end_row) {
      int p = 0;
      for (; p + 2 <= pairs; p += 2) multiply_few<2>(full, end_row - full, panel + p * columns_of_pair_);
      if (p < pairs) multiply_few<1>(full, end_row - full, panel + p * columns_of_pair_);
    }
    if (columns % columns_of_pair_) {
      for (; row < end_row; row += kTileRows) {
        multiply_one(row, std::min(kTileRows, end_row - row), panel + columns - 1);
      }
    }
  }

 private:
  struct Block {
    BlockSums* sums = nullptr;
    int row = 0;
    int rows = 0;
    int panel = 0;
    bool is_complete = false;  // summed over all of k
  };

  // Rows of a block whose sums are in memory.
  class UnwrittenRows {
   public:
    UnwrittenRows(const LinearCall& call, const Block& block)
        : writer_(call, block.row, block.panel),
          sums_(block.sums ? block.sums->at[0] : nullptr),
          left_(block.is_complete ? block.rows : 0) {}

    void write(int rows) {
      for (rows = std::min(rows, left_), left_ -= rows; rows > 0; --rows, sums_ += 2 * kPanel) {
        writer_.write(sums_, sums_ + kPanel);
      }
    }

   private:
    PairWriter<bf16> writer_;
    const float* sums_;
    int left_;
  };

  const bf16* x_at(int row, int step) const { return (const bf16*)call_.x + (int64_t)row * call_.k + step * kTileDepth; }
  const uint32_t* weight_at(int panel, int step) const {
    return call_.weight + panel * panel_words_ + step * kTileWords;
  }

#define CAROUSEL_STORE_SUMS(tile, to) _tile_stored(tile, to, 2 * kPanel * sizeof(float))

  // Multiplies a part of k of blocks of rows, the last one of 17 to 32, by all pairs of a task.
  void multiply_part(int part, int row, int end_row, int panel, int columns) {
    const int begin = steps_ * part / parts_, end = steps_ * (part + 1) / parts_;
    const bool is_last = part == parts_ - 1;
    const int num_blocks = (end_row - row + kBlockRows - 1) / kBlockRows;
    for (int block = 0; block < num_blocks; ++block, row += kBlockRows) {
      const int rows = std::min(kBlockRows, end_row - row);
      if (rows != in_tiles_.rows) empty_tiles();  // other shapes clear them
      shapes_.set_two(rows - kTileRows);
      if (keeps_panels_ || is_last) {  // this part, or the first one, of the next task's panels
        const int all_blocks = (call_.num_rows + kBlockRows - 1) / kBlockRows;
        const int64_t first = keeps_panels_ ? 0 : -begin * kTileWords;
        ask_for_share(columns * panel_words_ + first, end - begin, row / kBlockRows, all_blocks);
        if (panel + columns >= num_columns(call_)) lines_ahead_ = 0;
      } else {  // the next part of these
        ask_for_share((end - begin) * kTileWords, end - begin, block, num_blocks);
      }
      for (int p = 0; p < columns / columns_of_pair_; ++p) {
        multiply_block({&sums_[block][p], row, rows, panel + p * columns_of_pair_, is_last}, begin, end);
      }
    }
  }

  // Each block of rows prefetches its share of these steps of each panel, at this distance in words.
  void ask_for_share(int64_t words_ahead, int steps, int block, int num_blocks) {
    constexpr int kTileLines = kTileWords / kLineWords;
    ahead_words_ = words_ahead + steps * kTileLines * block / num_blocks * kLineWords;
    lines_ahead_ = (kTileLines + num_blocks - 1) / num_blocks;
  }

// Stores this tile of the previous block's sums, if there is one, and begins the block with it.
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
    const uint32_t *w = weight_at(block.panel, step), *right_w = w + right_words_, *ahead = w + ahead_words_;
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
      for (int i = 0; i < lines_ahead_; ++i, ahead += kLineWords) {
        _mm_prefetch(ahead, _MM_HINT_T1);
        _mm_prefetch(ahead + right_words_, _MM_HINT_T1);
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
    store_sums(sums_[0][0]);
    for (int pair = 0; pair < Pairs; ++pair) {
      PairWriter<bf16> writer(call_, row, panel + pair * columns_of_pair_);
      for (int r = 0; r < rows; ++r) {
        const float* sums = sums_[0][0].at[pair * kTileRows + r];
        writer.write(sums, sums + kPanel);
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
    CAROUSEL_STORE_SUMS(0, sums_[0][0].at[0]);
    see_memory();
    for (int r = 0; r < rows; ++r) write_panel<bf16>(call_, row + r, panel, 0, load(sums_[0][0].at[r]));
  }

#undef CAROUSEL_STORE_SUMS

  const LinearCall& call_;
  const int64_t x_stride_ = (int64_t)call_.k * sizeof(bf16);
  const int64_t panel_words_ = (int64_t)kPanel * (call_.k / 2);
  const int columns_of_pair_ = call_.gate ? 1 : 2;
  const int64_t right_words_ = panel_words_ * (call_.gate ? call_.n / 2 / kPanel : 1);  // from a pair's first panel
  const int steps_ = call_.k / kTileDepth;
  const int parts_ = (steps_ + kPartSteps - 1) / kPartSteps;
  const bool keeps_panels_ = keeps_panels(call_.k);
  TileShapes shapes_;
  BlockSums sums_[kSweptBlocks][kSweptPanels / 2];  // of each block of rows and pair of panels of a sweep
  Block in_tiles_;
  int64_t ahead_words_ = 0;
  int lines_ahead_ = 0;  // a step
};

inline bool fits_tiles(int k) { return k % kTileDepth == 0 && tiles_are_allowed(); }

// Panels that n does not fill are not computed.
inline void multiply_by_tiles(const LinearCall& call) {
  const bool keeps = keeps_panels(call.k);
  const int panels = call.num_rows <= kTileRows ? 4 : keeps ? kKeptPanels : kSweptPanels;
  const TaskSize most{call.gate ? panels / 2 : panels, keeps ? 512 : kSweptBlocks * kBlockRows};
  const auto multiply = [&](int row, int end_row, int panel, int columns) {
    TileKernel(call).multiply_task(row, end_row, panel, columns);
  };
  const int n = call.gate ? call.n / 2 : call.n;
  for_each_task(call.num_rows, n / kPanel * kPanel, call.k, call.num_threads, most, multiply);
}

}  // namespace carousel

#endif
