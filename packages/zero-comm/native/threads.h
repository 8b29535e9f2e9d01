// Distribution of grains (numbered parts of the work) over threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace zero_comm {

// Calls run(grain) for all grains, on at most num_threads threads including this one. Each thread
// gets its own `run` from make_run().
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
    // No more threads or memory: the existing threads do all the work.
  }
  take_grains(own);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace zero_comm
