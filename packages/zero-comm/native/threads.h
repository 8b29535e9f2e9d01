// Threads that share grains of work.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace zero_comm {

// Calls run(grain) for all grains, on this thread and up to num_threads - 1 others. Each thread has
// a `run` of its own, made here by make_run().
template <class MakeRun>
void share_grains(std::int64_t num_grains, std::int64_t num_threads, const MakeRun& make_run) {
  std::atomic<std::int64_t> next{0};
  const auto take_grains = [&next, num_grains](auto& run) {
    for (std::int64_t grain = next++; grain < num_grains; grain = next++) run(grain);
  };
  auto own = make_run();
  std::vector<std::thread> threads;
  try {
    const std::int64_t helpers = std::min(num_threads, num_grains) - 1;
    for (std::int64_t k = 0; k < helpers; ++k) {
      threads.emplace_back([&take_grains, run = make_run()]() mutable { take_grains(run); });
    }
  } catch (const std::exception&) {
    // Out of threads or memory: those that exist, and the caller, do the work.
  }
  take_grains(own);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace zero_comm
