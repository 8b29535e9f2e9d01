// Splits a list of tensors into grains and runs a kernel on them, on several threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace cpu_adam {

struct Item {
  Span span;
  std::int64_t numel;
  std::int64_t offset = 0;  // start in the concatenated list; set by run_items
};

// [Note: several gradients]
// A gradient may be a sum of several gradients, for example of a step's micro-steps, whose types
// may differ. They are added in fp32, in order, tile by tile, in a buffer that fits in the caches.
// The kernel for fp32 gradients reads the buffer, so each gradient is read from memory once.
struct Gradient {
  const char* address;
  int type;
};

// [Note: copies first]
// Memory can be copied just before the update of the same elements, tile by tile, so that the
// update finds the tile in the caches. A copy may save old values of a state, or write the values
// that the update starts from. `block_bytes` are the bytes of kBlockNumel elements.
struct Copy {
  const char* from;
  char* to;
  std::int64_t block_bytes;
  std::int64_t num_bytes;
  bool is_read;  // whether the update reads the target
};

// A `function` with its `scalars`, to be run after `copies`. `copy_and_update` is the RangeFunction
// that takes this struct as its scalars.
struct CopyingUpdate {
  RangeFunction function;
  const void* scalars;
  const std::vector<Copy>* copies;
  CopyFunction copy;
};
void copy_and_update(const Span& span, std::int64_t begin, std::int64_t end, const void* update,
                     bool is_streaming);

// With at most this many elements, only the calling thread works.
constexpr std::int64_t kInlineNumel = 32 * 1024;

void run_items(RangeFunction function, std::vector<Item>& items, const void* scalars,
               int num_threads);

// Updates one item with the sum of `gradients` instead of the item's own gradient. `function` is
// the one for fp32 gradients.
void run_summed(const KernelTable& table, RangeFunction function, const Item& item,
                const std::vector<Gradient>& gradients, const void* scalars, int num_threads);

// Returns the sum of squares of `numel` elements. Chunks have a fixed size and are added in order,
// so the result does not depend on thread count or instruction set.
double run_sum(SumFunction function, const char* grad, std::int64_t numel, int num_threads);

// Returns the sum of squares of the fp32 sum of several gradients.
double run_sum_of_summed(const KernelTable& table, const std::vector<Gradient>& gradients,
                         std::int64_t numel, int num_threads);

}  // namespace cpu_adam
