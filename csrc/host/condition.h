// A condition variable for std::mutex, from POSIX.
//
// Not std::condition_variable: since GCC 12 its wait() needs GLIBCXX_3.4.30, and a library that
// needs that does not load with an older libstdc++. This class needs only glibc 2.3.2.

#pragma once

#include <pthread.h>

#include <mutex>

namespace mirror {

class Condition {
 public:
  Condition() = default;
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;

  // Waits until the predicate is true; it is called with the lock held.
  template <class Predicate>
  void wait(std::unique_lock<std::mutex>& lock, Predicate holds) {
    while (!holds()) pthread_cond_wait(&condition_, lock.mutex()->native_handle());
  }

  void notify_all() { pthread_cond_broadcast(&condition_); }

 private:
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

}  // namespace mirror
