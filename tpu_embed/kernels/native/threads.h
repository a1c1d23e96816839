// Loops over independent tasks on threads of their own, for calls that no XLA program makes.
#ifndef TPU_EMBED_THREADS_H_
#define TPU_EMBED_THREADS_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace tpu_embed {

// The tasks of one call, shared by its threads; one that comes late finds nothing left to do.
class Tasks {
 public:
  Tasks(int64_t count, const std::function<void(int64_t)>& run) : count_(count), run_(run) {}

  // Does tasks while there are some. `run` lives as long as one is not done.
  void work() {
    for (int64_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) {
      try {
        run_(i);
      } catch (const std::bad_alloc&) {
        complete_ = false;
      }
      if (done_.fetch_add(1) + 1 == count_) {
        const std::lock_guard<std::mutex> lock(mutex_);
        all_done_.notify_one();
      }
    }
  }

  // Waits until all tasks are done; false: there was no memory for one of them.
  bool wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [this] { return done_ == count_; });
    return complete_;
  }

 private:
  const int64_t count_;
  const std::function<void(int64_t)>& run_;
  std::atomic<int64_t> next_{0}, done_{0};
  std::atomic<bool> complete_{true};
  std::mutex mutex_;
  std::condition_variable all_done_;
};

// Calls run(i) for every i in [0, tasks) on up to `threads` threads, the caller's among them; returns
// when all have ended. False: there was no memory for one of them, and the results are not complete.
//
// Nobody waits for a thread that has not begun a task: on a busy machine it may begin late.
inline bool run_on_threads(int64_t tasks, int64_t threads,
                           const std::function<void(int64_t)>& run) {
  if (tasks <= 0) return true;
  std::shared_ptr<Tasks> shared;
  try {
    if (threads > 1 && tasks > 1) shared = std::make_shared<Tasks>(tasks, run);
    for (int64_t h = 1; shared && h < threads && h < tasks; ++h) {
      std::thread([shared] { shared->work(); }).detach();
    }
  } catch (const std::system_error&) {  // no more threads: those that there are do the work
  } catch (const std::bad_alloc&) {
  }
  if (shared) {
    shared->work();
    return shared->wait();
  }
  Tasks alone(tasks, run);
  alone.work();
  return alone.wait();
}

// Calls a loop in its own thread's order: the pool of a sort that is itself a task.
class Serial {
 public:
  int64_t threads() const { return 1; }

  template <typename Run>
  void for_each(int64_t tasks, const Run& run) {
    for (int64_t i = 0; i < tasks; ++i) run(i);
  }
};

}  // namespace tpu_embed

#endif  // TPU_EMBED_THREADS_H_
