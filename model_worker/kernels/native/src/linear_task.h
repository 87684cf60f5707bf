// y = x W^T + bias by vectors, for any Product (linear_products.h). Each sum is taken over k in order, one unit at a
// time, whatever the number of rows.
//
// A task is some rows by some panels. k is processed in parts:
//
//   second cache   a part of the task's rows of x, in units
//   first cache    a panel's part, while all of those rows pass, some at a time with their sums in registers. For
//                  few rows it is widened there, for more it is widened first
//
// Sums are kept in memory between parts, and finished after the last part of k. The next data of W are prefetched into
// the second-level cache meanwhile: 28 GB/s for one row on one core of an EPYC Zen 4. Prefetching 4 KiB ahead of each
// load, or into the first-level cache, gave 17 to 22 (2026-11).
#pragma once

#include <algorithm>

#include "linear_call.h"
#include "linear_products.h"
#include "linear_row.h"

namespace carousel {

// Product for weights of type T.
template <class T>
struct ProductOf : Widened<T> {};
template <>
struct ProductOf<float> : Floats {};
#if defined(__AVX512BF16__)
template <>
struct ProductOf<bf16> : Bf16Pairs {};
#endif

constexpr int kFewPanels = 4;    // of a task of rows that pass at once
constexpr int kPartSize = 256;   // units of k that stay in a cache while rows pass
constexpr int kLongPart = 2048;  // of rows that pass at once
constexpr int kRowStride = kLongPart + 16;  // of x, so that rows do not compete for the same cache lines

// Number of rows that pass at a time, with at least one vector of two panels.
template <class Product>
constexpr int kMaxRows = kVectors == 1 ? Product::kSums / 2 : Product::kSums / kVectors;

// Number of panels whose sums of `rows` rows are in registers.
template <class Product>
constexpr int panels_for(int rows) {
  const int most = Product::kSums / kVectors / rows;
  return std::min(Product::kPanels, most >= 4 ? kMaxPanels : most >= 2 ? 2 : 1);
}

template <class Product>
struct Block {
  const typename Product::Unit* x;     // [rows, kRowStride]
  const uint32_t* weight[kMaxPanels];  // this part's words of each panel
  const char* ahead[kMaxPanels];       // next data of W, to be prefetched meanwhile
  int ahead_step;                      // bytes of it for each word
  float* sums;                         // [rows, kSumStride] of 32 bits
  int words;                           // of the part
  bool is_first;                       // of the parts
};

// body(row, panel, vector of the panel), unrolled, so that sums stay in registers.
template <int Rows, int Panels, class Body>
inline void for_each_sum(const Body& body) {
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) body(r, p, v);
    }
  }
}

template <class Product, int unit, int Rows, int Panels>
inline void add_products(const Block<Product>& block, int word, typename Product::Sum (&sum)[Rows][Panels][kVectors]) {
  typename Product::Sum w[Panels][kVectors];
  for_each_sum<1, Panels>([&](int, int p, int v) {
    w[p][v] = Product::template units_of<unit>(block.weight[p] + word * kPanel, v * kLanes);
  });
  const typename Product::Unit* const x = block.x + word * Product::kUnits + unit;
  for_each_sum<Rows, Panels>([&](int r, int p, int v) {
    sum[r][p][v] = Product::add(sum[r][p][v], w[p][v], x[r * kRowStride]);
  });
}

template <class Product, int Rows, int Panels>
void multiply(const Block<Product>& block) {
  using Sum = typename Product::Sum;
  const auto at = [&](int r, int p, int v) { return block.sums + r * kSumStride + p * kPanel + v * kLanes; };
  Sum sum[Rows][Panels][kVectors] = {};
  if (!block.is_first) {
    for_each_sum<Rows, Panels>([&](int r, int p, int v) { sum[r][p][v] = (Sum)load(at(r, p, v)); });
  }
  for (int word = 0; word < block.words; ++word) {
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      __builtin_prefetch(block.ahead[p] + word * block.ahead_step, 0, 2);
    }
    add_products<Product, 0>(block, word, sum);
    if constexpr (Product::kUnits == 2) add_products<Product, 1>(block, word, sum);
  }
  for_each_sum<Rows, Panels>([&](int r, int p, int v) { store(at(r, p, v), (vfloat)sum[r][p][v]); });
}

template <class Product, int Rows>
bool multiply_panels(Block<Product> block, int panels) {
  constexpr int kWide = panels_for<Product>(Rows);
  if (panels == kWide) {
    multiply<Product, Rows, kWide>(block);
    return true;
  }
  for (int p = 0; p < panels; ++p, block.sums += kPanel) {
    block.weight[0] = block.weight[p], block.ahead[0] = block.ahead[p];
    multiply<Product, Rows, 1>(block);
  }
  return true;
}

// For 1 to sizeof...(Rows) rows.
template <class Product, int... Rows>
void multiply_block(const Block<Product>& block, int rows, int panels, std::integer_sequence<int, Rows...>) {
  (void)((rows == Rows + 1 && multiply_panels<Product, Rows + 1>(block, panels)) || ...);
}

// X: an element of x; T: one of bias and output.
template <class Product, class X, class T>
class Task {
 public:
  // `columns` panels of the output.
  Task(const LinearCall& call, int row, int end_row, int panel, int columns)
      : call_(call),
        row_(row),
        num_rows_(end_row - row),
        num_panels_(call.gate ? 2 * columns : columns),
        outputs_{call, row, num_rows_, panel, num_panels_, sums_},
        is_widened_(kUnits > 1 && num_rows_ > kMaxRows<Product>),
        part_depth_((num_rows_ > kMaxRows<Product> ? kPartSize : kLongPart) * Product::kDepth) {}

  void run() {
    // Blocks of rows of about equal size, since small ones are slow.
    const int blocks = (num_rows_ + kMaxRows<Plain> - 1) / kMaxRows<Plain>;
    const int rows = (num_rows_ + blocks - 1) / blocks;
    const int wide = is_widened_ ? panels_for<Plain>(rows) : panels_for<Product>(rows);
    for (int begin = 0; begin < call_.k; begin += part_depth_) {
      const int size = std::min(part_depth_, call_.k - begin);
      for (int r = 0; r < num_rows_; ++r) {
        Product::widen_x((const X*)call_.x + (int64_t)(row_ + r) * call_.k + begin, size, x_ + r * kRowStride);
      }
      int i = 0;
      for (; i + wide <= num_panels_; i += wide) multiply_part(begin, size, i, wide, blocks);
      for (; i < num_panels_; ++i) multiply_part(begin, size, i, 1, blocks);
    }
    if constexpr (std::is_same_v<typename Product::Sum, vint>) outputs_.scale(Product::kOffset);
    outputs_.write();
  }

 private:
  using Plain = typename Product::Plain;
  static constexpr int kUnits = Product::kUnits;
  static constexpr int kWordDepth = kUnits * Product::kDepth;
  static constexpr int kRowsInPlace = kMaxRows<Product>;

  const uint32_t* weight_at(int i, int begin) const {
    return call_.weight + ((int64_t)outputs_.panel_at(i) * call_.k + begin) / kWordDepth * kPanel;
  }

  // Panel i, or beyond the last one a panel of the next part or the next task.
  const uint32_t* next_of(int i, int begin) const {
    if (i < num_panels_) return weight_at(i, begin);
    return begin + part_depth_ < call_.k ? weight_at(i - num_panels_, begin + part_depth_) : weight_at(i, 0);
  }

  // Multiplies a part of all rows by panel i and those after it.
  void multiply_part(int begin, int size, int i, int panels, int blocks) {
    const uint32_t* weight[kMaxPanels];
    const char* ahead[kMaxPanels];
    for (int p = 0; p < panels; ++p) {
      weight[p] = weight_at(i + p, begin);
      ahead[p] = (const char*)next_of(i + panels + p, begin);
    }
    const int words = size / kWordDepth;
    if constexpr (kUnits > 1) {
      if (is_widened_) {
        for (int p = 0; p < panels; ++p) weight[p] = widened_panel(weight[p], words, p);
        return multiply_blocks<Plain, kMaxRows<Plain>>(begin, words * kUnits, i, panels, blocks, weight, ahead);
      }
    }
    multiply_blocks<Product, kRowsInPlace>(begin, words, i, panels, blocks, weight, ahead);
  }

  template <class P, int most_rows>
  void multiply_blocks(int begin, int words, int i, int panels, int blocks, const uint32_t* const* weight,
                       const char* const* ahead) {
    Block<P> block{};
    block.ahead_step = kPanel * (int)sizeof(uint32_t) * P::kUnits / kUnits;
    block.words = words;
    block.is_first = begin == 0;
    std::copy_n(weight, panels, block.weight);
    std::copy_n(ahead, panels, block.ahead);
    for (int b = 0; b < blocks; ++b) {
      const int first = num_rows_ * b / blocks, last = num_rows_ * (b + 1) / blocks;
      block.x = x_ + first * kRowStride;
      block.sums = sums_ + first * kSumStride + i * kPanel;
      multiply_block<P>(block, last - first, panels, std::make_integer_sequence<int, most_rows>());
    }
  }

  // Input of Plain.
  const uint32_t* widened_panel(const uint32_t* words, int num_words, int p) {
    float* const panel = panels_[p];
    for (int word = 0; word < num_words; ++word) {
      for (int v = 0; v < kPanel; v += kLanes) {
        float* to = panel + word * kUnits * kPanel + v;
        store(to, (vfloat)Product::template units_of<0>(words + word * kPanel, v));
        store(to + kPanel, (vfloat)Product::template units_of<1>(words + word * kPanel, v));
      }
    }
    return (const uint32_t*)panel;
  }

  const LinearCall& call_;
  const int row_;
  const int num_rows_;
  const int num_panels_;
  const TaskOutputs<T> outputs_;
  const bool is_widened_;  // W is, before its product
  const int part_depth_;   // of k
  alignas(64) typename Product::Unit x_[kTaskRows * kRowStride];
  alignas(64) float sums_[kTaskRows * kSumStride];
  alignas(64) float panels_[kUnits > 1 ? kMaxPanels : 1][kPartSize * kPanel];
};

// The panels from first_panel on.
template <class Product, class X, class T = X>
void multiply_all(const LinearCall& call, int first_panel = 0) {
  if (call.num_rows == 1 && call.in_huge_pages) return multiply_row<Product, X, T>(call, first_panel);
  const int panels = call.num_rows <= kMaxRows<typename Product::Plain> ? kFewPanels : kTaskPanels;
  const TaskSize most{call.gate ? panels / 2 : panels, kTaskRows};
  const auto multiply = [&](int row, int end_row, int panel, int columns) {
    Task<Product, X, T>(call, row, end_row, first_panel + panel, columns).run();
  };
  const int columns = num_columns(call) - first_panel;
  for_each_task(call.num_rows, columns * kPanel, call.k, call.num_threads, most, multiply);
}

}  // namespace carousel
