// Division of x W^T among threads and registers, for kernels whose W is packed in panels of 16 rows:
//
//   W [n][words]  ->  [n / 16][words][n % 16]     a word of 32 bits is a row's next few elements along k;
//                                                 of float16, which is widened as it lies, 16 bits are one
//
// So weights are read as one stream, and a product needs no sum over lanes. Each output is summed over k in one order
// whatever the number of rows and threads, so a row of x gives the same bits in any batch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "team.h"

namespace carousel {

constexpr int kPanel = 16;  // rows of W
constexpr int64_t kMinParallelWork = 1 << 17;  // products; below, waking a team costs more than it saves

struct TaskSize {
  int panels;
  int rows;
};

// Calls body(row, end_row, panel, panels) for each task of x [num_rows, k] by W [n, k]. No task is larger than `most`.
// Consecutive tasks have the same panels, then the next ones.
template <class Body>
void for_each_task(int num_rows, int n, int k, int num_threads, TaskSize most, const Body& body) {
  constexpr int kTasksPerThread = 4;  // at least, so that other threads can take tasks of a thread that is preempted
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

}  // namespace carousel
