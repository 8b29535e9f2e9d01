// Small thread pool based on std::thread. OpenMP is not used: torch's wheel bundles its own
// libgomp, and two OpenMP runtimes in one process have produced wrong results.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace cpu_adam {

// `num_grains` independent pieces of work. `run` must not throw.
struct Task {
  void (*run)(void* context, std::int64_t grain);
  void* context;
  std::int64_t num_grains;
};

// [Note: how work is shared]
// A job's grains are split into one contiguous part per thread, always equally for equal arguments.
// A worker starts with the part of its own number if that is free, because it may have touched this
// memory first, so that the memory is on its NUMA node. A thread that has finished its part takes
// grains of other parts, so a delayed or missing worker does not block the job. Results never
// depend on which thread runs a grain. Several threads may submit jobs at once. Every caller works
// on its own job, and workers join any job that still needs helpers.
//
// [Note: fork]
// Threads do not survive fork, and a lock may be held during fork. A pool therefore belongs to the
// process that created it. A child sees another process id in the pool, ignores the pool, and
// creates a new one.
class ThreadPool {
 public:
  // Returns the pool of this process, which is never destroyed, because workers may outlive static
  // destructors.
  static ThreadPool& of_this_process();

  // Runs every grain on the calling thread and up to num_threads - 1 workers, then returns.
  void run(const Task& task, int num_threads);

 private:
  struct Job;

  explicit ThreadPool(long process_id) : process_id_(process_id) {}
  void start_workers(std::size_t count);
  void work(int number);

  const long process_id_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Job*> jobs_;             // jobs that need helpers; guarded by mutex_
  std::atomic<bool> has_jobs_{false};  // whether jobs_ is not empty; written under mutex_
  int caller_cpu_ = -1;                // CPU of the last caller; guarded by mutex_
  std::size_t num_workers_ = 0;        // guarded by mutex_
};

}  // namespace cpu_adam
