// The threads of another library, for one that is compiled later: the two never compute at the same time, and threads
// of its own would take the cores from those that wait for work.
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

// run: carousel_run_tasks of the library that has the threads. Before any other call.
CAROUSEL_EXPORT void carousel_borrow_team(void* run) { carousel::lent = (carousel::RunTasks)run; }
