#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <system_error>
#include <thread>

#if defined(_WIN32)
#include <process.h>
#else
#include <sched.h>
#include <signal.h>
#include <unistd.h>
#endif

#if defined(CPU_ADAM_HAVE_X86)
#include <immintrin.h>
#else
#include <cfenv>
#endif

namespace cpu_adam {
namespace {

long current_process() {
#if defined(_WIN32)
  return static_cast<long>(_getpid());
#else
  return static_cast<long>(getpid());
#endif
}

// Rounding and flush-to-zero modes are per thread. Workers use the caller's modes (for example
// those of torch.set_flush_denormal), so that results do not depend on the thread.
#if defined(CPU_ADAM_HAVE_X86)
struct FloatMode {
  unsigned value;
  static FloatMode get() { return {_mm_getcsr()}; }
  void set() const { _mm_setcsr(value); }
};
#else
struct FloatMode {
  std::fenv_t value;
  static FloatMode get() {
    FloatMode mode;
    std::fegetenv(&mode.value);
    return mode;
  }
  void set() const { std::fesetenv(&value); }
};
#endif

// Blocks signals while workers are created, because a thread inherits its creator's mask and only
// the interpreter's threads should handle signals.
class BlockSignals {
 public:
#if defined(_WIN32)
  BlockSignals() {}
#else
  BlockSignals() {
    sigset_t blocked;
    sigfillset(&blocked);
    // Faults stay unblocked, so that faulthandler and sanitizers see them in the faulting thread.
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &previous_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }

 private:
  sigset_t previous_;
#endif
};

// [Note: spinning]
// Waking a sleeping thread takes as long as updating some hundred thousand elements. A waiting
// thread therefore polls for a short time before it sleeps: a worker for the caller's next job, and
// a caller for the last grain of its workers.
constexpr std::chrono::microseconds kSpinTime{100};
constexpr int kLooksPerClock = 64;

// Returns the CPU that this thread runs on, or -1 if unknown.
int current_cpu() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves this thread from `cpu` to any other CPU that the thread may use.
void leave_cpu(int cpu) {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
  cpu_set_t others = allowed;
  CPU_CLR(cpu, &others);
  if (sched_setaffinity(0, sizeof others, &others) == 0) {
    sched_setaffinity(0, sizeof allowed, &allowed);
  }
#else
  (void)cpu;
#endif
}

inline void pause_a_moment() {
#if defined(CPU_ADAM_HAVE_X86)
  _mm_pause();
#elif defined(__aarch64__) && !defined(_MSC_VER)
  __asm__ volatile("yield");
#endif
}

template <class Condition>
void spin_until(const Condition& is_true) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int k = 0; k < kLooksPerClock; ++k) {
      if (is_true()) return;
      pause_a_moment();
    }
  } while (std::chrono::steady_clock::now() < end);
}

// One thread's part of the grains, aligned to a cache line to avoid false sharing.
struct alignas(64) Part {
  std::atomic<std::int64_t> next;
  std::int64_t end;
  bool is_taken;  // whether a thread has started with this part; guarded by the pool's mutex
};

std::atomic<ThreadPool*> g_pool{nullptr};

}  // namespace

struct ThreadPool::Job {
  Job(const Task& work, Part* all_parts, int count)
      : task(&work),
        parts(all_parts),
        num_parts(count),
        mode(FloatMode::get()),
        num_wanted(count - 1) {}

  const Task* task;
  Part* parts;
  int num_parts;
  FloatMode mode;
  int num_wanted;                  // helpers that may still join; guarded by the pool's mutex
  std::atomic<int> num_active{0};  // helpers at work; written under the pool's mutex
  std::condition_variable done;    // signals that num_active is 0

  // Returns the part to start with: the preferred one if it is free, otherwise the next free one.
  int take_part(int preferred) {
    int part = preferred < num_parts ? preferred : 0;
    while (parts[part].is_taken) part = (part + 1) % num_parts;
    parts[part].is_taken = true;
    return part;
  }

  void participate(int first_part) {
    for (int k = 0; k < num_parts; ++k) {
      Part& part = parts[(first_part + k) % num_parts];
      while (part.next.load(std::memory_order_relaxed) < part.end) {
        const std::int64_t grain = part.next.fetch_add(1, std::memory_order_relaxed);
        if (grain >= part.end) break;
        task->run(task->context, grain);
      }
    }
  }
};

ThreadPool& ThreadPool::of_this_process() {
  const long process_id = current_process();
  ThreadPool* pool = g_pool.load(std::memory_order_acquire);
  while (pool == nullptr || pool->process_id_ != process_id) {
    auto fresh = std::unique_ptr<ThreadPool>(new ThreadPool(process_id));
    if (g_pool.compare_exchange_strong(pool, fresh.get(), std::memory_order_acq_rel)) {
      pool = fresh.release();
    }
  }
  return *pool;
}

void ThreadPool::start_workers(std::size_t count) {
  if (num_workers_ >= count) return;
  const BlockSignals blocked;
  while (num_workers_ < count) {
    try {
      const int number = static_cast<int>(num_workers_) + 1;
      std::thread([this, number] { work(number); }).detach();
    } catch (const std::system_error&) {
      return;  // no more threads: existing workers and the caller do the work
    }
    ++num_workers_;
  }
}

void ThreadPool::work(int number) {
  std::unique_lock<std::mutex> lock(mutex_);
  bool has_worked = false;
  for (;;) {
    if (jobs_.empty()) {
      const int shared_cpu = caller_cpu_;
      lock.unlock();
      // Linux may wake a worker on the CPU where it last ran. If a caller runs there now, worker
      // and caller would alternate instead of running in parallel.
      if (shared_cpu >= 0 && shared_cpu == current_cpu()) leave_cpu(shared_cpu);
      if (has_worked) spin_until([this] { return has_jobs_.load(std::memory_order_relaxed); });
      has_worked = false;
      lock.lock();
      if (jobs_.empty()) wake_.wait(lock);
      continue;
    }
    Job* job = jobs_.front();
    has_worked = true;
    ++job->num_active;
    const int part = job->take_part(number);
    if (--job->num_wanted == 0) jobs_.erase(jobs_.begin());
    has_jobs_.store(!jobs_.empty(), std::memory_order_relaxed);
    lock.unlock();
    job->mode.set();
    job->participate(part);
    lock.lock();
    // Notify under the lock: the job is on its caller's stack and may be destroyed afterwards.
    if (--job->num_active == 0) job->done.notify_one();
  }
}

void ThreadPool::run(const Task& task, int num_threads) {
  const int num_parts = static_cast<int>(std::min<std::int64_t>(num_threads, task.num_grains));
  if (num_parts <= 1) {
    for (std::int64_t grain = 0; grain < task.num_grains; ++grain) task.run(task.context, grain);
    return;
  }
  std::unique_ptr<Part[]> parts(new Part[static_cast<std::size_t>(num_parts)]);
  for (int k = 0; k < num_parts; ++k) {
    parts[k].next.store(task.num_grains * k / num_parts, std::memory_order_relaxed);
    parts[k].end = task.num_grains * (k + 1) / num_parts;
    parts[k].is_taken = k == 0;  // the caller starts with part 0
  }
  Job job(task, parts.get(), num_parts);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    start_workers(static_cast<std::size_t>(num_parts - 1));
    jobs_.push_back(&job);
    has_jobs_.store(true, std::memory_order_relaxed);
    caller_cpu_ = current_cpu();
  }
  for (int k = 1; k < num_parts; ++k) wake_.notify_one();
  job.participate(0);
  std::unique_lock<std::mutex> lock(mutex_);
  jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
  has_jobs_.store(!jobs_.empty(), std::memory_order_relaxed);
  lock.unlock();
  spin_until([&job] { return job.num_active.load(std::memory_order_relaxed) == 0; });
  lock.lock();
  job.done.wait(lock, [&job] { return job.num_active == 0; });
}

}  // namespace cpu_adam
