// Threads of another library, for a library that is compiled later. The two never compute at the same time, and a
// second set of threads would take the cores from the first one's, which wait for work.
#include "simd.h"
#include "team.h"

namespace carousel {

namespace {

using RunTasks = void (*)(int threads, int tasks, TaskFunction function, const void* body);

RunTasks lent = nullptr;

}  // namespace

void run_tasks(int threads, int tasks, TaskFunction function, const void* body) {
  lent(threads, tasks, function, body);
}

}  // namespace carousel

// run: carousel_run_tasks of the library that has the threads. Must be called first.
CAROUSEL_EXPORT void carousel_borrow_team(void* run) { carousel::lent = (carousel::RunTasks)run; }
