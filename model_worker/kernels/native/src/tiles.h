// AMX: eight tiles of 16 rows of 64 bytes, two of which are multiplied in 16 cycles.
#pragma once

#if defined(__AMX_BF16__) && defined(__linux__)
#define CAROUSEL_HAS_TILES 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace carousel {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;  // elements of bf16 in a row, over which a product of two tiles sums
constexpr int kLineWords = 16;  // of 32 bits in a line of a cache

// Whether this process may use tiles. Linux gives their 8 KiB of state only on request.
inline bool tiles_are_allowed() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;
  static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
}

// Compiler barrier: earlier writes are in memory, since the intrinsics do not declare their reads.
inline void see_memory() { asm volatile("" : : : "memory"); }

// Sizes of a thread's tiles, from the first `set` until destruction: sums of rows by 16 floats in 0 to 3, operands in
// 4 to 7. Without it a thread has no tile state, and context switches need not save any.
class TileShapes {
 public:
  // Sums and tile 4 have `rows` rows, 5 to 7 sixteen.
  void set(int rows) { set(rows, rows, kTileRows); }

  // Sums 0 and 1 and tile 4 have 16 rows; sums 2 and 3 and tile 5 have more_rows; 6 and 7 sixteen.
  void set_two(int more_rows) { set(kTileRows, more_rows, more_rows); }

  // 0, 1 and 2 have twice `rows` rows; 3 and 4 sixteen; 5 to 7 sixteen of `columns` floats.
  void set_few(int rows, int columns) {
    const int two = 2 * rows, narrow = 4 * columns;
    load(rows << 8 | columns, {two, two, two, 16, 16, 16, 16, 16}, {64, 64, 64, 64, 64, narrow, narrow, narrow});
  }

  TileShapes() = default;
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;
  ~TileShapes() {
    if (current_) _tile_release();
  }

 private:
  struct alignas(64) Config {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  };

  struct Sizes {
    int of[8];
  };

  void set(int rows, int more_rows, int rows_of_5) {
    load(rows << 24 | more_rows << 16 | rows_of_5,
         {rows, rows, more_rows, more_rows, rows, rows_of_5, kTileRows, kTileRows}, {64, 64, 64, 64, 64, 64, 64, 64});
  }

  // wanted: a key of these sizes.
  void load(int wanted, const Sizes& rows, const Sizes& row_bytes) {
    if (wanted == current_) return;
    current_ = wanted;
    Config config;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = (uint8_t)rows.of[i];
      config.row_bytes[i] = (uint16_t)row_bytes.of[i];
    }
    see_memory();
    _tile_loadconfig(&config);
  }

  int current_ = 0;
};

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

}  // namespace carousel

#endif
