// Threads that kernels share. A region is a number of tasks, and each running thread takes the next one. So if another
// process takes a thread's core, others wait only for the task that the thread has begun.
#pragma once

#include <type_traits>

namespace carousel {

// next: the task that the thread takes after this one, unless another thread is faster; -1: none is known.
using TaskFunction = void (*)(const void* body, int task, int next);

// Runs function(body, task, next) for each task of [0, tasks) and returns when all are finished. At most `threads`
// threads work, including the caller, which works alone if the others do not come. If the team works for another
// caller, the caller runs all tasks itself.
void run_tasks(int threads, int tasks, TaskFunction function, const void* body);

// Limits the number of threads of later regions; 0: no limit.
void limit_threads(int most);

// Calls body(task), or body(task, next), for each task, as run_tasks does.
template <class Body>
void parallel_for(int threads, int tasks, const Body& body) {
  const auto run = [](const void* b, int task, int next) {
    if constexpr (std::is_invocable_v<const Body&, int, int>) {
      (*(const Body*)b)(task, next);
    } else {
      (*(const Body*)b)(task);
    }
  };
  if (threads <= 1 || tasks <= 1) {
    for (int task = 0; task < tasks; ++task) run(&body, task, task + 1 < tasks ? task + 1 : -1);
    return;
  }
  run_tasks(threads, tasks, run, &body);
}

// Calls body(begin, end) for ranges of about equal size, for items that are too small to be taken one by
// one.
template <class Body>
void parallel_ranges(int threads, int items, const Body& body) {
  constexpr int kRangesPerThread = 4;
  const int ranges = threads <= 1 ? 1 : threads * kRangesPerThread < items ? threads * kRangesPerThread : items;
  parallel_for(threads, ranges, [&](int i) {
    const int begin = (int)((long long)items * i / ranges);
    const int end = (int)((long long)items * (i + 1) / ranges);
    body(begin, end);
  });
}

}  // namespace carousel
