// How x W^T is divided among threads and registers, for any kernel whose W is packed in panels of 16 rows:
//
//   W [n][words]  ->  [n / 16][words][n % 16]     a word of 32 bits is a row's next few elements along k
//
// so that weights are read as one stream and a product needs no sum over lanes. Each output is summed over k
// in one order whatever the number of rows and threads, so that a row of x gives the same bits in any batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "team.h"

namespace carousel {

constexpr int kPanel = 16;  // rows of W
constexpr int64_t kMinParallelWork = 1 << 17;  // products; below, waking a team costs more than it saves

// Rows of x [row, row + Rows) by `panels` panels. A Kernel has multiply<Rows, Panels>(row, panel), kMaxRows,
// and panels_for(Rows): how many panels' sums are in registers beside that many rows.
template <class Kernel, int Rows>
void multiply_rows(const Kernel& kernel, int row, int panel, int panels) {
  constexpr int kWide = Kernel::panels_for(Rows);
  int p = 0;
  for (; p + kWide <= panels; p += kWide) kernel.template multiply<Rows, kWide>(row, panel + p);
  for (; p < panels; ++p) kernel.template multiply<Rows, 1>(row, panel + p);
}

template <class Kernel, int... Rows>
void multiply_last_rows(const Kernel& kernel, int row, int num_rows, int panel, int panels,
                        std::integer_sequence<int, Rows...>) {
  (void)((num_rows == Rows + 1 && (multiply_rows<Kernel, Rows + 1>(kernel, row, panel, panels), true)) || ...);
}

// A task's panels stay in the cache while all its rows pass.
template <class Kernel>
void multiply_task(const Kernel& kernel, int row, int end_row, int panel, int panels) {
  constexpr int kMaxRows = Kernel::kMaxRows;
  for (; row + kMaxRows <= end_row; row += kMaxRows) {
    multiply_rows<Kernel, kMaxRows>(kernel, row, panel, panels);
  }
  multiply_last_rows(kernel, row, end_row - row, panel, panels,
                     std::make_integer_sequence<int, kMaxRows - 1>());
}

struct TaskSize {
  int panels;
  int rows;
};

// body(row, end_row, panel, panels) for each task of x [num_rows, k] by W [n, k], none of which is larger than
// `most`. Tasks that follow each other have the same panels, then the next ones.
template <class Body>
void for_each_task(int num_rows, int n, int k, int num_threads, TaskSize most, const Body& body) {
  constexpr int kTasksPerThread = 4;  // at least, so that threads which are held up leave some to others
  const int num_panels = n / kPanel;
  const int64_t work = (int64_t)num_rows * n * k;
  const int threads = work < kMinParallelWork ? 1 : num_threads;
  const int row_tasks = (num_rows + most.rows - 1) / most.rows;
  int wide = most.panels;
  while (threads > 1 && wide > 1 && num_panels * row_tasks < kTasksPerThread * threads * wide) wide /= 2;
  const int columns = (num_panels + wide - 1) / wide;
  parallel_for(threads, columns * row_tasks, [&](int task) {
    const int panel = task / row_tasks * wide;
    const int row = task % row_tasks * most.rows;
    body(row, std::min(row + most.rows, num_rows), panel, std::min(wide, num_panels - panel));
  });
}

// All of x by W with a kernel of registers.
template <class Kernel>
void multiply_all(const Kernel& kernel, int num_rows, int n, int k, int num_threads) {
  constexpr TaskSize kMost{4, 96};
  for_each_task(num_rows, n, k, num_threads, kMost, [&](int row, int end_row, int panel, int panels) {
    multiply_task(kernel, row, end_row, panel, panels);
  });
}

}  // namespace carousel
