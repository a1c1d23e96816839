// Loops over independent tasks on the thread pool that XLA lends to a custom call.
#ifndef TPU_EMBED_PARALLEL_H_
#define TPU_EMBED_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace tpu_embed {

// Runs tasks on the caller's thread and on the pool's. The caller takes tasks itself until none is
// left and then waits only for those that a helper has begun: a pool whose threads are all busy, as
// when eight emulated devices call at once, delays nobody and cannot deadlock.
class Parallel {
 public:
  explicit Parallel(xla::ffi::ThreadPool pool)
      : pool_(pool), threads_(std::max<int64_t>(1, pool.num_threads())) {}

  int64_t threads() const { return threads_; }

  // Tasks for `work` units of which at least `least` are worth a task: a few a thread, so that
  // uneven ones even out. The results of a kernel must not depend on this number.
  int64_t tasks(int64_t work, int64_t least) const {
    const int64_t most = threads_ == 1 ? 1 : 8 * threads_;
    return std::clamp<int64_t>(work / least, 1, most);
  }

  // Calls run(i) for every i in [0, tasks); throws what one of them threw, when all have ended.
  void for_each(int64_t tasks, const std::function<void(int64_t)>& run) {
    const int64_t helpers = std::min(tasks, threads_) - 1;
    if (helpers <= 0) {
      for (int64_t i = 0; i < tasks; ++i) run(i);
      return;
    }
    auto state = std::make_shared<State>(tasks, &run);
    for (int64_t h = 0; h < helpers; ++h) {
      pool_.Schedule([state] { state->work(); });
    }
    state->work();
    state->wait();
  }

 private:
  struct State {
    State(int64_t tasks, const std::function<void(int64_t)>* run) : tasks(tasks), run(run) {}

    // `run` is gone when the caller has returned; a helper that starts later finds no task.
    void work() {
      for (int64_t i = next.fetch_add(1); i < tasks; i = next.fetch_add(1)) {
        try {
          (*run)(i);
        } catch (...) {  // memory that cannot be had: the caller's to report, on its own thread
          std::lock_guard<std::mutex> lock(mutex);
          error = std::current_exception();
        }
        if (done.fetch_add(1) + 1 == tasks) {
          std::lock_guard<std::mutex> lock(mutex);
          finished.notify_one();
        }
      }
    }

    void wait() {
      for (int spin = 0; spin < 4096 && done.load() < tasks; ++spin) {
      }
      std::unique_lock<std::mutex> lock(mutex);
      finished.wait(lock, [this] { return done.load() == tasks; });
      if (error) std::rethrow_exception(error);
    }

    const int64_t tasks;
    const std::function<void(int64_t)>* const run;
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable finished;
    std::exception_ptr error;
  };

  xla::ffi::ThreadPool pool_;
  const int64_t threads_;
};

}  // namespace tpu_embed

#endif  // TPU_EMBED_PARALLEL_H_
