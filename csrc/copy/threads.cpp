#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace rvdcomm {
namespace {

struct Loop {
  void (*task)(const void*, int);
  const void* context;
  int num_tasks;
};

class Pool {
 public:
  void run(const Loop& loop) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      grow(loop.num_tasks - 1);
      loop_ = loop;
      next_ = 1;
      num_left_ = loop.num_tasks - 1;
    }
    wake_.notify_all();
    loop.task(loop.context, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    // The caller runs tasks that no worker has taken yet.
    while (next_ < loop_.num_tasks) take(lock);
    done_.wait(lock, [&] { return num_left_ == 0; });
  }

  std::mutex& one_loop_at_a_time() { return callers_; }

 private:
  /// Start workers until there are `num_workers`, or as many as the system allows. The caller runs
  /// the tasks that are left over.
  void grow(int num_workers) {
    try {
      for (; num_workers_ < num_workers; ++num_workers_) std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  /// @pre the lock is held and next_ < loop_.num_tasks
  void take(std::unique_lock<std::mutex>& lock) {
    const Loop loop = loop_;
    const int i = next_++;
    lock.unlock();
    loop.task(loop.context, i);
    lock.lock();
    if (--num_left_ == 0) done_.notify_one();
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return next_ < loop_.num_tasks; });
      take(lock);
    }
  }

  std::mutex callers_, mutex_;
  std::condition_variable wake_, done_;
  Loop loop_{nullptr, nullptr, 0};
  int next_ = 0, num_left_ = 0, num_workers_ = 0;
};

std::atomic<Pool*> shared_pool{nullptr};

/// The pool of this process. It is never freed: its threads may outlive every static object.
Pool& pool() {
  Pool* found = shared_pool.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  // A forked child has no threads of its parent, and its copy of the pool may have a locked mutex.
  // So the child starts without a pool.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { shared_pool = nullptr; });
  (void)registered;
  Pool* made = new Pool;
  if (shared_pool.compare_exchange_strong(found, made)) return *made;
  delete made;
  return *found;
}

}  // namespace

void parallel_for(int num_tasks, void (*task)(const void* context, int i), const void* context) {
  if (num_tasks > 1) {
    Pool& shared = pool();
    std::unique_lock<std::mutex> mine(shared.one_loop_at_a_time(), std::try_to_lock);
    if (mine) return shared.run({task, context, num_tasks});
  }
  for (int i = 0; i < num_tasks; ++i) task(context, i);
}

}  // namespace rvdcomm
