// The threads that kernels share. A region is a number of tasks; whoever runs takes the next one, so that a
// thread whose core another process has taken is not waited for, but for the task it has begun.
#pragma once

#include <type_traits>

namespace carousel {

// next: the task that the thread comes to after this one, unless another one is faster; -1: it knows of none.
using TaskFunction = void (*)(const void* body, int task, int next);

// Runs function(body, task, next) for each task of [0, tasks) and returns when all are finished. At most `threads`
// threads work, the caller among them: it alone if the others do not come. A caller that finds the team at
// work for another one does all of it by itself.
void run_tasks(int threads, int tasks, TaskFunction function, const void* body);

// From now on at most so many threads work on a region, however many it asks for; 0: as many as it asks for.
void limit_threads(int most);

// body(task), or body(task, next), for each task, as run_tasks does.
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

// Ranges [begin, end) of about equal size instead of single items: for items too small to be taken one by
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
