// y = x W^T + bias for one row. It takes as long as W is read, so a thread reads one stream of memory, panel after
// panel, which the processor itself prefetches within a page. Explicit prefetches and several panels side by side help
// with pages of 4 KiB, but not with huge ones (EPYC Zen 4, 2026-11). The products and their order are those of more
// rows (linear_task.h), and so are the bits.
#pragma once

#include <vector>

#include "linear_outputs.h"
#include "linear_products.h"

namespace carousel {

constexpr int kRowPanels = 4;             // maximum of a task
constexpr int64_t kRowTaskBytes = 1 << 16;  // of W, or one panel; larger tasks would make threads wait

template <class Product, int unit>
inline void add_word(const uint32_t* word, typename Product::Unit x, typename Product::Sum (&sum)[kVectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    sum[v] = Product::add(sum[v], Product::template units_of<unit>(word, v * kLanes), x);
  }
}

// Adds the products of a panel's next words.
template <class Product>
inline void add_words(const uint32_t* weight, int words, const typename Product::Unit* x,
                      typename Product::Sum (&sum)[kVectors]) {
  for (int word = 0; word < words; ++word, weight += kPanel, x += Product::kUnits) {
    add_word<Product, 0>(weight, x[0], sum);
    if constexpr (Product::kUnits == 2) add_word<Product, 1>(weight, x[1], sum);
  }
}

// A panel's sums over all of k.
template <class Product>
void multiply_panel(const uint32_t* weight, int words, const typename Product::Unit* x, float* sums) {
  constexpr int kMost = Product::kExactWords;
  typename Product::Sum sum[kVectors] = {};
  if constexpr (kMost == 0) {
    add_words<Product>(weight, words, x, sum);
  } else {
    for (int word = 0; word < words; word += kMost) {
      typename Product::Sum part[kVectors] = {};
      add_words<Product>(weight + word * kPanel, std::min(kMost, words - word), x + word * Product::kUnits, part);
      for (int v = 0; v < kVectors; ++v) sum[v] += part[v] >> Product::kShift;
    }
  }
  for (int v = 0; v < kVectors; ++v) store(sums + v * kLanes, (vfloat)sum[v]);
}

// The panels from first_panel on. X: an element of x; T: one of bias and output.
template <class Product, class X, class T>
void multiply_row(const LinearCall& call, int first_panel) {
  static thread_local std::vector<typename Product::Unit> units;  // of the caller, for all threads
  units.resize(call.k / Product::kDepth);
  Product::widen_x((const X*)call.x, call.k, units.data());
  const typename Product::Unit* const x = units.data();
  const int words = call.k / (Product::kUnits * Product::kDepth), halves = call.gate ? 2 : 1;
  const int64_t panel_words = (int64_t)words * kPanel;
  const int64_t panels = kRowTaskBytes / (halves * panel_words * (int64_t)sizeof(uint32_t));
  const TaskSize most{(int)std::clamp<int64_t>(panels, 1, kRowPanels), 1};
  const auto multiply = [&](int row, int, int panel, int columns) {
    alignas(64) float sums[kSumStride];
    const TaskOutputs<T> outputs{call, row, 1, first_panel + panel, halves * columns, sums};
    for (int half = 0; half < halves; ++half) {  // panels of one half are contiguous
      for (int i = half; i < outputs.num_panels; i += halves) {
        multiply_panel<Product>(call.weight + outputs.panel_at(i) * panel_words, words, x, sums + i * kPanel);
      }
    }
    if constexpr (std::is_same_v<typename Product::Sum, vint>) outputs.scale(Product::kOffset);
    outputs.write();
  };
  for_each_task(1, (num_columns(call) - first_panel) * kPanel, call.k, call.num_threads, most, multiply);
}

}  // namespace carousel
