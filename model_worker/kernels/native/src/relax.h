// Pause between two reads of memory that another thread will change.
#pragma once

#include <thread>

namespace carousel {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace carousel
