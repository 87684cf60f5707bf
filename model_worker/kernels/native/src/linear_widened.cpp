// y = x W^T + bias with multiply-adds of float32. W stays as it was packed (panels.h): of a word of two bf16 one is a
// shift away from a float, the other a mask. Each sum is taken over k in order, one product at a time, whatever the
// number of rows.
//
// A task is some rows by some panels. k goes by in parts:
//
//   second cache   a part of the task's rows of x, as float32
//   first cache    a panel's part, while all of those rows pass, some at a time with their sums in registers. For
//                  few rows it is widened there, for more it is widened first
//
// Sums wait in memory between parts, and are finished when all of k is in them. What comes next of W is asked for
// meanwhile, to the second cache: 28 GB/s for one row on one core of an EPYC Zen 4, where 4 KiB ahead of each load
// was 17 to 22, and to the first cache 17 to 22, too (2026-11).
#include "linear_widened.h"

#include <algorithm>

namespace carousel {
namespace {

constexpr int kVectors = kPanel / kLanes;  // of a panel
// Vectors of sums in registers, of 32 or 16. Where W is widened beside them, what that takes must fit in, too: with
// 12 of 16 it computes a quarter slower (GCC 12).
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 24, kSumsInPlace = 24;
#else
constexpr int kSums = 12, kSumsInPlace = 10;
#endif
constexpr int kMaxPanels = 4;
constexpr int kMaxRows = kVectors == 1 ? kSums / 2 : kSums / kVectors;  // that pass at a time
constexpr int kMaxInPlace = kVectors == 1 ? kMaxRows : kSumsInPlace / kVectors;
constexpr int kTaskRows = 96;
constexpr int kTaskPanels = 16;
constexpr int kFewPanels = 4;  // of a task of rows that pass at once
constexpr int kPartSize = 256;
constexpr int kSumStride = kTaskPanels * kPanel;

template <class T>
constexpr int kDepth = sizeof(uint32_t) / sizeof(T);  // elements of k in a word

// Panels of T whose sums are in registers beside those of so many rows.
template <class T>
constexpr int panels_for(int rows) {
  const int most = (kDepth<T> > 1 ? kSumsInPlace : kSums) / kVectors / rows;
  return most >= 4 ? kMaxPanels : most >= 2 ? 2 : 1;
}

// Each word's element number `element`, as float32.
template <class T, int element>
inline vfloat element_of(const uint32_t* words) {
  vuint bits;
  std::memcpy(&bits, words, sizeof bits);
  if constexpr (std::is_same_v<T, bf16>) return (vfloat)(element == 0 ? bits << 16 : bits & 0xffff0000u);
  return (vfloat)bits;
}

struct Block {
  const float* x;                      // [rows, kPartSize]
  const uint32_t* weight[kMaxPanels];  // of each panel this part's words
  const char* ahead[kMaxPanels];       // what comes next of W, to be asked for meanwhile
  int ahead_step;                      // bytes of it a word
  float* sums;                         // [rows, kSumStride]
  int size;                            // of k
  bool is_first;                       // of the parts
};

template <class T, int element, int Rows, int Panels>
inline void add_products(const Block& block, int word, vfloat (&sum)[Rows][Panels][kVectors]) {
  vfloat w[Panels][kVectors];
#pragma GCC unroll 4
  for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      w[p][v] = element_of<T, element>(block.weight[p] + word * kPanel + v * kLanes);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    const float value = block.x[r * kPartSize + word * kDepth<T> + element];
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][p][v] += w[p][v] * value;
    }
  }
}

template <class T, int Rows, int Panels>
void multiply(const Block& block) {
  float* const sums = block.sums;
  vfloat sum[Rows][Panels][kVectors] = {};
  if (!block.is_first) {
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sum[r][p][v] = load(sums + r * kSumStride + p * kPanel + v * kLanes);
        }
      }
    }
  }
  for (int word = 0; word < block.size / kDepth<T>; ++word) {
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      __builtin_prefetch(block.ahead[p] + word * block.ahead_step, 0, 2);
    }
    add_products<T, 0>(block, word, sum);
    if constexpr (kDepth<T> == 2) add_products<T, 1>(block, word, sum);
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        store(sums + r * kSumStride + p * kPanel + v * kLanes, sum[r][p][v]);
      }
    }
  }
}

template <class T, int Rows>
bool multiply_panels(Block block, int panels) {
  constexpr int kWide = panels_for<T>(Rows);
  if (panels == kWide) {
    multiply<T, Rows, kWide>(block);
    return true;
  }
  for (int p = 0; p < panels; ++p, block.sums += kPanel) {
    block.weight[0] = block.weight[p], block.ahead[0] = block.ahead[p];
    multiply<T, Rows, 1>(block);
  }
  return true;
}

// Of 1 to sizeof...(Rows) rows.
template <class T, int... Rows>
void multiply_block(const Block& block, int rows, int panels, std::integer_sequence<int, Rows...>) {
  (void)((rows == Rows + 1 && multiply_panels<T, Rows + 1>(block, panels)) || ...);
}

template <class T>
class WidenedTask {
 public:
  // `columns` panels of the output.
  WidenedTask(const LinearCall& call, int row, int end_row, int panel, int columns)
      : call_(call),
        row_(row),
        num_rows_(end_row - row),
        panel_(panel),
        num_panels_(call.gate ? 2 * columns : columns),
        is_widened_(kDepth<T> > 1 && num_rows_ > kMaxInPlace) {}

  void run() {
    // Blocks of rows of about the same size, since small ones compute slowly.
    const int blocks = (num_rows_ + kMaxRows - 1) / kMaxRows;
    const int rows = (num_rows_ + blocks - 1) / blocks;
    const int wide = is_widened_ ? panels_for<float>(rows) : panels_for<T>(rows);
    for (int begin = 0; begin < call_.k; begin += kPartSize) {
      const int size = std::min(kPartSize, call_.k - begin);
      widen_rows(begin, size);
      int i = 0;
      for (; i + wide <= num_panels_; i += wide) multiply_part(begin, size, i, wide, blocks);
      for (; i < num_panels_; ++i) multiply_part(begin, size, i, 1, blocks);
    }
    write();
  }

 private:
  static constexpr int kRowsInPlace = kDepth<T> > 1 ? kMaxInPlace : kMaxRows;

  // Of the task's panels, in the order in which their sums lie: with a gate, each one beside its other half.
  int panel_at(int i) const {
    return call_.gate ? panel_ + i / 2 + (i % 2 ? call_.n / 2 / kPanel : 0) : panel_ + i;
  }

  const uint32_t* weight_at(int i, int begin) const {
    return call_.weight + ((int64_t)panel_at(i) * call_.k + begin) / kDepth<T> * kPanel;
  }

  // Panel i, or if there are fewer one of the next part or the next task.
  const uint32_t* next_of(int i, int begin) const {
    if (i < num_panels_) return weight_at(i, begin);
    return begin + kPartSize < call_.k ? weight_at(i - num_panels_, begin + kPartSize) : weight_at(i, 0);
  }

  void widen_rows(int begin, int size) {
    for (int r = 0; r < num_rows_; ++r) {
      const T* from = (const T*)call_.x + (int64_t)(row_ + r) * call_.k + begin;
      float* to = x_ + r * kPartSize;
      int c = 0;
      for (; c + kLanes <= size; c += kLanes) store(to + c, load(from + c));
      for (; c < size; ++c) to[c] = to_float(from[c]);
    }
  }

  // A part of all rows by panel i and those behind it.
  void multiply_part(int begin, int size, int i, int panels, int blocks) {
    const int step = kPanel * (int)(is_widened_ ? sizeof(T) : sizeof(uint32_t));
    Block block{nullptr, {}, {}, step, nullptr, size, begin == 0};
    for (int p = 0; p < panels; ++p) {
      block.weight[p] = weight_at(i + p, begin);
      if (is_widened_) block.weight[p] = widened_panel(block.weight[p], size, p);
      block.ahead[p] = (const char*)next_of(i + panels + p, begin);
    }
    for (int b = 0; b < blocks; ++b) {
      const int first = num_rows_ * b / blocks, last = num_rows_ * (b + 1) / blocks;
      block.x = x_ + first * kPartSize;
      block.sums = sums_ + first * kSumStride + i * kPanel;
      if (is_widened_) {
        multiply_block<float>(block, last - first, panels, std::make_integer_sequence<int, kMaxRows>());
      } else {
        multiply_block<T>(block, last - first, panels, std::make_integer_sequence<int, kRowsInPlace>());
      }
    }
  }

  // The same as a packed weight of float32.
  const uint32_t* widened_panel(const uint32_t* words, int size, int p) {
    float* const panel = panels_[p];
    for (int word = 0; word < size / kDepth<T>; ++word) {
      for (int v = 0; v < kPanel; v += kLanes) {
        float* to = panel + word * kDepth<T> * kPanel + v;
        store(to, element_of<T, 0>(words + word * kPanel + v));
        if constexpr (kDepth<T> == 2) store(to + kPanel, element_of<T, 1>(words + word * kPanel + v));
      }
    }
    return (const uint32_t*)panel;
  }

  void write() {
    int i = 0;
    for (; i + 2 <= num_panels_; i += 2) {
      PairWriter<T> writer(call_, row_, panel_at(i));
      for (int r = 0; r < num_rows_; ++r) {
        const float* sums = sums_ + r * kSumStride + i * kPanel;
        writer.write(sums, sums + kPanel);
      }
    }
    for (int r = 0; i < num_panels_ && r < num_rows_; ++r) {
      const float* sums = sums_ + r * kSumStride + i * kPanel;
      for (int lane = 0; lane < kPanel; lane += kLanes) {
        write_panel<T>(call_, row_ + r, panel_at(i), lane, load(sums + lane));
      }
    }
  }

  const LinearCall& call_;
  const int row_;
  const int num_rows_;
  const int panel_;
  const int num_panels_;
  const bool is_widened_;  // W is, before its product
  alignas(64) float x_[kTaskRows * kPartSize];
  alignas(64) float sums_[kTaskRows * kSumStride];
  alignas(64) float panels_[kDepth<T> > 1 ? kMaxPanels : 1][kPartSize * kPanel];
};

template <class T>
void multiply_widened_of(const LinearCall& call) {
  const int panels = call.num_rows <= kMaxRows ? kFewPanels : kTaskPanels;
  const TaskSize most{call.gate ? panels / 2 : panels, kTaskRows};
  const auto multiply = [&](int row, int end_row, int panel, int columns) {
    WidenedTask<T>(call, row, end_row, panel, columns).run();
  };
  for_each_task(call.num_rows, num_columns(call) * kPanel, call.k, call.num_threads, most, multiply);
}

}  // namespace

void multiply_widened(const LinearCall& call) {
#if !defined(__AVX512BF16__)
  if (call.is_bf16) return multiply_widened_of<bf16>(call);
#endif
  multiply_widened_of<float>(call);
}

}  // namespace carousel
