// Collectives of tensor-parallel ranks, processes of one machine: each writes its data to shared memory, waits
// until all have, and reads what it needs. Sums are taken in the order of the ranks, so that all ranks get the
// same bits, whichever came first.
//
//   region:  counter of rank 0 | … of rank n-1 | even rounds: data of rank 0 … n-1 | odd rounds: the same
//
// Two halves are enough: a rank that writes round r + 2 has seen all ranks in round r + 1, so none reads round r.
#include <atomic>
#include <climits>
#include <ctime>

#include "relax.h"
#include "simd.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace carousel {

constexpr int64_t kCounterBytes = 64;  // a cache line each

struct Counter {
  std::atomic<uint32_t> round;     // the newest round whose data is complete; a futex
  std::atomic<uint32_t> sleepers;  // ranks that may have to be woken
};
static_assert(sizeof(Counter) <= kCounterBytes && std::atomic<uint32_t>::is_always_lock_free);

// The binding mirrors both field by field.
struct ExchangeCall {
  char* region;
  const void* data;
  int64_t num_bytes;   // of data, at most slot_bytes
  int64_t slot_bytes;  // room for one rank's data of one round
  int64_t spin_ns;     // time to spin before sleeping
  int64_t wait_ns;     // maximum time to sleep for one rank
  uint32_t round;
  int32_t rank;
  int32_t num_ranks;
  int32_t is_posted;  // in and out: the data is written already; for a call that continues waiting
  int32_t missing;    // out: the rank for which the call stopped waiting, or -1
};

struct SumCall {
  const char* slots;  // of one round
  void* out;          // [size]
  int64_t size;
  int64_t slot_bytes;
  int32_t num_ranks;
  int32_t dtype;
};

inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

// Rounds wrap around.
inline bool reached(const Counter& counter, uint32_t round) {
  return (int32_t)(counter.round.load(std::memory_order_acquire) - round) >= 0;
}

// Not private, since several processes use it. Other systems than Linux form no group.
inline void sleep_on_shared(std::atomic<uint32_t>& word, uint32_t value, const timespec& timeout) {
#if defined(__linux__)
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT, value, &timeout, nullptr, 0);
#endif
}

inline void wake_processes(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Returns false after the timeout.
inline bool wait_for(Counter& counter, uint32_t round, int64_t spin_until, int64_t wait_ns) {
  if (reached(counter, round)) return true;
  while (now_ns() < spin_until) {
    for (int k = 0; k < 16; ++k) {
      if (reached(counter, round)) return true;
      relax();
    }
  }
  // In this order: a rank that posts after the following check sees the sleeper.
  counter.sleepers.fetch_add(1);
  const uint32_t seen = counter.round.load();
  if ((int32_t)(seen - round) < 0) {
    const timespec timeout{wait_ns / 1'000'000'000LL, wait_ns % 1'000'000'000LL};
    sleep_on_shared(counter.round, seen, timeout);
  }
  counter.sleepers.fetch_sub(1);
  return reached(counter, round);
}

inline void exchange(ExchangeCall& call) {
  auto counter = [&](int rank) -> Counter& { return *(Counter*)(call.region + rank * kCounterBytes); };
  if (!call.is_posted) {
    const int64_t half = (call.round & 1) * call.num_ranks;
    char* slots = call.region + call.num_ranks * kCounterBytes;
    std::memcpy(slots + (half + call.rank) * call.slot_bytes, call.data, call.num_bytes);
    Counter& own = counter(call.rank);
    own.round.store(call.round);
    if (own.sleepers.load() != 0) wake_processes(own.round);
    call.is_posted = 1;
  }
  call.missing = -1;
  const int64_t spin_until = call.spin_ns ? now_ns() + call.spin_ns : 0;
  for (int rank = 0; rank < call.num_ranks; ++rank) {
    if (!wait_for(counter(rank), call.round, spin_until, call.wait_ns)) {
      call.missing = rank;
      return;
    }
  }
}

template <class T>
void sum(const SumCall& call) {
  auto slot = [&](int rank) { return (const T*)(call.slots + rank * call.slot_bytes); };
  T* out = (T*)call.out;
  int64_t c = 0;
  for (; c + kLanes <= call.size; c += kLanes) {
    vfloat total = load(slot(0) + c);
    for (int rank = 1; rank < call.num_ranks; ++rank) total += load(slot(rank) + c);
    store(out + c, total);
  }
  if (c == call.size) return;
  T tail[kLanes] = {};
  vfloat total = {};
  for (int rank = 0; rank < call.num_ranks; ++rank) {
    std::memcpy(tail, slot(rank) + c, (call.size - c) * sizeof(T));
    total += load(tail);
  }
  store(tail, total);
  std::memcpy(out + c, tail, (call.size - c) * sizeof(T));
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_exchange(carousel::ExchangeCall* call) { carousel::exchange(*call); }

CAROUSEL_EXPORT void carousel_sum(const carousel::SumCall* call) {
  using namespace carousel;
  with_dtype(call->dtype, [&](auto element) { sum<decltype(element)>(*call); });
}
