// Splits a list of tensors into grains and runs a kernel over them.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace cpu_adam {

struct Item {
  Span span;
  std::int64_t numel;
  std::int64_t offset = 0;  // where it starts in the concatenated list; set by run_items
};

// Up to this many elements, the calling thread does the work alone.
constexpr std::int64_t kInlineNumel = 32 * 1024;

void run_items(RangeFunction function, std::vector<Item>& items, const void* scalars,
               int num_threads);

// The sum of squares of `numel` elements: chunks of a fixed size, added in order, so that neither
// thread count nor instruction set changes it.
double run_sum(SumFunction function, const char* grad, std::int64_t numel, int num_threads);

}  // namespace cpu_adam
