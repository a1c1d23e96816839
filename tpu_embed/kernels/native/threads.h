// Loops over independent tasks on threads of their own, for calls that no XLA program makes.
#ifndef TPU_EMBED_THREADS_H_
#define TPU_EMBED_THREADS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace tpu_embed {

// Calls run(i) for every i in [0, tasks) on up to `threads` threads, the caller's among them; returns
// when all have ended. False: there was no memory for one of them, and the results are not complete.
inline bool run_on_threads(int64_t tasks, int64_t threads,
                           const std::function<void(int64_t)>& run) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> complete{true};
  const auto work = [&] {
    for (int64_t i = next.fetch_add(1); i < tasks; i = next.fetch_add(1)) {
      try {
        run(i);
      } catch (const std::bad_alloc&) {
        complete = false;
      }
    }
  };
  std::vector<std::thread> helpers;
  try {
    for (int64_t h = 1; h < threads && h < tasks; ++h) helpers.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads: those that there are do the work
  } catch (const std::bad_alloc&) {
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  return complete;
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
