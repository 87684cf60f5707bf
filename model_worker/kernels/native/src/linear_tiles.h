// The bf16 linear layer on AMX. 16 words of a packed panel (panels.h) are a tile of W as they lie in memory, and
// 32 elements of 16 rows are one of x. Each sum is taken over k in steps of 32, whatever the number of rows.
#pragma once

#include "linear_call.h"
#include "panels.h"
#include "tiles.h"

#if defined(CAROUSEL_HAS_TILES)

namespace carousel {

constexpr int kTileDepth = 32;       // elements of k in a tile
constexpr int kTileWords = 256;      // of W in a tile
constexpr int kTilePanels = 4;       // of a task

struct TileKernel {
  const LinearCall& call;
  TileShapes& shapes;

  const bf16* x_at(int row) const { return call.x + (int64_t)row * call.k; }
  const uint32_t* weight_at(int panel) const { return call.weight + (int64_t)panel * kPanel * (call.k / 2); }

  void write(const float* sums, int rows, int row, int panel) const {
    for (int r = 0; r < rows; ++r) call.write(row + r, panel, load(sums + r * kPanel));
  }

#define CAROUSEL_WRITE_TILE(tile, rows, row, panel)       \
  {                                                       \
    alignas(64) float sums[kTileRows * kPanel];           \
    _tile_stored(tile, sums, kPanel * sizeof(float));     \
    write(sums, rows, row, panel);                        \
  }

  // Up to 16 rows by four panels.
  void multiply_few(int row, int rows, int panel) const {
    shapes.set(rows);
    const int64_t stride = (int64_t)call.k * sizeof(bf16), next = (int64_t)kPanel * (call.k / 2);
    const bf16* x = x_at(row);
    const uint32_t* w = weight_at(panel);
    zero_sums();
    for (int u = 0; u < call.k / kTileDepth; ++u, x += kTileDepth, w += kTileWords) {
      _tile_loadd(4, x, stride);
      _tile_loadd(5, w, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, w + next, 64);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, w + 2 * next, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, w + 3 * next, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    CAROUSEL_WRITE_TILE(0, rows, row, panel);
    CAROUSEL_WRITE_TILE(1, rows, row, panel + 1);
    CAROUSEL_WRITE_TILE(2, rows, row, panel + 2);
    CAROUSEL_WRITE_TILE(3, rows, row, panel + 3);
  }

  // 16 rows and up to 16 more, by two panels.
  void multiply_many(int row, int more_rows, int panel) const {
    shapes.set_two(more_rows);
    const int64_t stride = (int64_t)call.k * sizeof(bf16), next = (int64_t)kPanel * (call.k / 2);
    const bf16 *x = x_at(row), *more_x = x_at(row + kTileRows);
    const uint32_t* w = weight_at(panel);
    zero_sums();
    for (int u = 0; u < call.k / kTileDepth; ++u, x += kTileDepth, more_x += kTileDepth, w += kTileWords) {
      _tile_loadd(6, w, 64);
      _tile_loadd(4, x, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + next, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, more_x, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    CAROUSEL_WRITE_TILE(0, kTileRows, row, panel);
    CAROUSEL_WRITE_TILE(1, kTileRows, row, panel + 1);
    CAROUSEL_WRITE_TILE(2, more_rows, row + kTileRows, panel);
    CAROUSEL_WRITE_TILE(3, more_rows, row + kTileRows, panel + 1);
  }

  // What the panels of a task that are no group leave.
  void multiply_one(int row, int rows, int panel) const {
    shapes.set(rows);
    const int64_t stride = (int64_t)call.k * sizeof(bf16);
    const bf16* x = x_at(row);
    const uint32_t* w = weight_at(panel);
    _tile_zero(0);
    for (int u = 0; u < call.k / kTileDepth; ++u, x += kTileDepth, w += kTileWords) {
      _tile_loadd(4, x, stride);
      _tile_loadd(6, w, 64);
      _tile_dpbf16ps(0, 4, 6);
    }
    CAROUSEL_WRITE_TILE(0, rows, row, panel);
  }

#undef CAROUSEL_WRITE_TILE

  void multiply_task(int row, int end_row, int panel, int panels) const {
    for (int rows; row < end_row; row += rows) {
      rows = std::min(2 * kTileRows, end_row - row);
      int p = 0;
      if (rows > kTileRows) {
        for (; p + 2 <= panels; p += 2) multiply_many(row, rows - kTileRows, panel + p);
      } else if (panels == kTilePanels) {
        multiply_few(row, rows, panel), p = kTilePanels;
      }
      for (; p < panels; ++p) {
        for (int r = 0; r < rows; r += kTileRows) multiply_one(row + r, std::min(kTileRows, rows - r), panel + p);
      }
    }
  }
};

inline bool fits_tiles(const LinearCall& call) { return call.k % kTileDepth == 0 && tiles_are_allowed(); }

inline void multiply_by_tiles(const LinearCall& call) {
  for_each_task(call.num_rows, call.n, call.k, call.num_threads, [&](int row, int end_row, int panel, int panels) {
    TileShapes shapes;
    TileKernel{call, shapes}.multiply_task(row, end_row, panel, panels);
  });
}

}  // namespace carousel

#endif
