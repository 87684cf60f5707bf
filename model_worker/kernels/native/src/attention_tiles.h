// Attention's two products on AMX, over packed blocks of pairs of bf16: 16 words of the packed keys or values are a
// tile. A row's sums are taken over dimensions, and over keys, in steps of 32.
#pragma once

#include "attention_call.h"
#include "attention_math.h"
#include "tiles.h"

#if defined(CAROUSEL_HAS_TILES)

namespace carousel {

struct Bf16TileMath : Bf16PairMath {
  using Shapes = TileShapes;
  static constexpr bool kHasTiles = true;
  static constexpr int kUnitStep = 16;  // of values: a tile's

  // scores[g][t] = query g . key t for the rows that the shapes are set to and kBlock keys.
  static void compute_scores(const Unit* queries, const Unit* keys, int head_units, float (*scores)[kBlock]) {
    const int64_t stride = head_units * sizeof(Unit);
    const Unit* block[4];
    for (int i = 0; i < 4; ++i) block[i] = keys + i * kTileRows * head_units;
    see_memory();
    zero_sums();
    for (int u = 0; u < head_units; u += kTileRows) {
      _tile_loadd(4, queries + u, stride);
      _tile_loadd(5, block[0] + u * kTileRows, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, block[1] + u * kTileRows, 64);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, block[2] + u * kTileRows, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, block[3] + u * kTileRows, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, scores[0], sizeof scores[0]);
    _tile_stored(1, scores[0] + 16, sizeof scores[0]);
    _tile_stored(2, scores[0] + 32, sizeof scores[0]);
    _tile_stored(3, scores[0] + 48, sizeof scores[0]);
  }

  // rows[g][c ..] += weights[g] . values[.., c ..] for two vectors of columns.
  static void add_columns(const Unit (*weights)[kBlock / kPerUnit], const Unit* values, int num_units, int head_dim,
                          int c, float* rows) {
    const int64_t stride = head_dim * sizeof(float);
    see_memory();
    _tile_loadd(0, rows + c, stride);
    _tile_loadd(1, rows + c + 16, stride);
    for (int u = 0; u < num_units; u += kTileRows) {
      _tile_loadd(4, weights[0] + u, sizeof weights[0]);
      _tile_loadd(5, values + u * head_dim + c, stride);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, values + u * head_dim + c + 16, stride);
      _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, rows + c, stride);
    _tile_stored(1, rows + c + 16, stride);
  }
};

}  // namespace carousel

#endif
