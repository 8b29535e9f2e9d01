// A small pool of std::threads. Not OpenMP: torch's wheel brings its own libgomp, and two OpenMP
// runtimes in one process have given wrong results.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace cpu_adam {

// Work of `num_grains` independent grains. `run` must not throw.
struct Task {
  void (*run)(void* context, std::int64_t grain);
  void* context;
  std::int64_t num_grains;
};

// [Note: how work is shared]
// A job's grains are split into one contiguous part per thread, always the same for the same
// arguments, and a worker starts with the part of its own number if it can, so that memory first
// touched by a thread is near it again. A thread that is done with
// its part takes grains from the others', so a worker that the operating system delays (or that
// never got started) costs nothing but its help. Which thread runs a grain never changes a result.
// Several threads may submit jobs at once; every caller works on its own, and workers join any job
// that still wants help.
//
// [Note: fork]
// Threads do not survive fork, and a lock may be held at that moment. So a pool belongs to the
// process that made it: a child finds a foreign process id, leaves that pool alone and makes its
// own.
class ThreadPool {
 public:
  // The pool of this process; never destroyed, since workers may outlive static destructors.
  static ThreadPool& of_this_process();

  // Runs every grain, on the calling thread and up to num_threads - 1 workers; returns when done.
  void run(const Task& task, int num_threads);

 private:
  struct Job;

  explicit ThreadPool(long process_id) : process_id_(process_id) {}
  void start_workers(std::size_t count);
  void work(int number);

  const long process_id_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Job*> jobs_;             // those that want help; guarded by mutex_
  std::atomic<bool> has_jobs_{false};  // whether there are any; written under mutex_
  int caller_cpu_ = -1;                // where the last caller ran; guarded by mutex_
  std::size_t num_workers_ = 0;        // guarded by mutex_
};

}  // namespace cpu_adam
