// Each member of a team has a share of a region's tasks. It takes them one by one, then those of others.
//
//   share   generation | next | end     one word, so that taking a task is one compare-and-swap, and a member
//                                       that slept through a region cannot take a task of another
//
// Members that find no task spin for a moment, then sleep. No result depends on whether they come.
#include "team.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

#include "relax.h"
#include "simd.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace carousel {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kTaskBits = 16;
constexpr int kMaxTasks = (1 << kTaskBits) - 1;  // of one region; more are several regions
// 10 to 20 us: longer than the gaps between the kernels of a step, short compared with the pause between steps.
constexpr int kSpins = 600;

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  if (word.load() == value) std::this_thread::yield();
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

// Spins, then sleeps, until word is not value. sleepers: number of threads that sleep on it.
void wait_for_change(std::atomic<uint32_t>& word, uint32_t value, std::atomic<int>& sleepers) {
  for (int i = 0; i < kSpins; ++i) {
    if (word.load(std::memory_order_acquire) != value) return;
    relax();
  }
  sleepers.fetch_add(1);
  while (word.load() == value) sleep_while(word, value);
  sleepers.fetch_sub(1);
}

struct alignas(64) Share {
  std::atomic<uint64_t> word{0};
};

uint64_t share_of(uint32_t generation, int next, int end) {
  return (uint64_t)generation << (2 * kTaskBits) | (uint64_t)next << kTaskBits | (uint64_t)end;
}

class Team {
 public:
  // Returns false, without doing anything, if the team works for another caller.
  bool try_run(int threads, int tasks, TaskFunction function, const void* body) {
    const std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    threads = std::min(threads, kMaxThreads);
    for (; num_members_ < threads; ++num_members_) start(num_members_);
    for (int first = 0; first < tasks; first += kMaxTasks) {
      run_region(threads, first, std::min(kMaxTasks, tasks - first), function, body);
    }
    return true;
  }

 private:
  void run_region(int threads, int first, int tasks, TaskFunction function, const void* body) {
    function_.store(function, std::memory_order_relaxed);
    body_.store(body, std::memory_order_relaxed);
    first_.store(first, std::memory_order_relaxed);
    unfinished_.store(tasks, std::memory_order_relaxed);
    const uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
    for (int i = 0; i < threads; ++i) {
      const int begin = (int)((int64_t)tasks * i / threads), end = (int)((int64_t)tasks * (i + 1) / threads);
      shares_[i].word.store(share_of(generation, begin, end), std::memory_order_release);
    }
    num_shares_.store(threads, std::memory_order_release);
    generation_.store(generation);
    if (idle_.load() > 0) wake_all(generation_);
    work(0, threads);
    for (uint32_t left; (left = unfinished_.load(std::memory_order_acquire)) != 0;) {
      wait_for_change(unfinished_, left, waiting_);
    }
  }

  // Takes tasks, of share `own` first, until all shares are empty.
  void work(int own, int num_shares) {
    uint32_t finished = 0;
    for (int i = 0; i < num_shares; ++i) finished += take_all(shares_[(own + i) % num_shares]);
    if (finished && unfinished_.fetch_sub(finished) == finished && waiting_.load() > 0) wake_all(unfinished_);
  }

  // A task can be taken only while its region lasts, and the region's description stays until then. So data that
  // is read between the two reads of the word belong to the same region.
  uint32_t take_all(Share& share) {
    uint32_t taken = 0;
    uint64_t word = share.word.load(std::memory_order_acquire);
    for (;;) {
      const int next = (int)(word >> kTaskBits & kMaxTasks);
      if (next >= (int)(word & kMaxTasks)) return taken;
      const TaskFunction function = function_.load(std::memory_order_relaxed);
      const void* body = body_.load(std::memory_order_relaxed);
      const int first = first_.load(std::memory_order_relaxed);
      if (share.word.compare_exchange_weak(word, word + (1ULL << kTaskBits), std::memory_order_acq_rel,
                                           std::memory_order_acquire)) {
        function(body, first + next, next + 1 < (int)(word & kMaxTasks) ? first + next + 1 : -1);
        ++taken;
        word = share.word.load(std::memory_order_acquire);
      }
    }
  }

  // A member lives as long as the process. The caller is number 0.
  void start(int own) {
    if (own > 0) std::thread([this, own] { serve(own); }).detach();
  }

  void serve(int own) {
    uint32_t seen = 0;
    for (;;) {
      wait_for_change(generation_, seen, idle_);
      seen = generation_.load(std::memory_order_acquire);
      const int num_shares = num_shares_.load(std::memory_order_acquire);
      if (own < num_shares) work(own, num_shares);
    }
  }

  std::mutex busy_;
  int num_members_ = 0;
  Share shares_[kMaxThreads];
  std::atomic<int> num_shares_{0};
  std::atomic<TaskFunction> function_{nullptr};
  std::atomic<const void*> body_{nullptr};
  std::atomic<int> first_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> idle_{0};
  alignas(64) std::atomic<uint32_t> unfinished_{0};
  std::atomic<int> waiting_{0};
};

std::atomic<int> most_threads{0};

}  // namespace

void limit_threads(int most) { most_threads.store(most, std::memory_order_relaxed); }

void run_tasks(int threads, int tasks, TaskFunction function, const void* body) {
  static Team* const team = new Team;  // never destroyed: its members outlive main
  const int most = most_threads.load(std::memory_order_relaxed);
  if (most) threads = std::min(threads, most);
  if (threads > 1 && team->try_run(threads, tasks, function, body)) return;
  for (int task = 0; task < tasks; ++task) function(body, task, task + 1 < tasks ? task + 1 : -1);
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_run_tasks(int threads, int tasks, carousel::TaskFunction function, const void* body) {
  carousel::run_tasks(threads, tasks, function, body);
}
