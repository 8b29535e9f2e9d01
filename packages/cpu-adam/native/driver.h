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

// [Note: several gradients]
// A gradient may be the sum of several, say of the micro-steps of one step, each of a type of its
// own. They are added in fp32, in order, a tile at a time, in a buffer that stays in the caches:
// the kernel for an fp32 gradient reads it from there, and memory is passed once.
struct Gradient {
  const char* address;
  int type;
};

// [Note: copies first]
// Memory that is copied right before the elements that it belongs to are updated, a tile at a time,
// so that the update finds what was copied in the caches: the old values of states, say, or those
// that the update then starts from. `block_bytes` belong to kBlockNumel elements.
struct Copy {
  const char* from;
  char* to;
  std::int64_t block_bytes;
  std::int64_t num_bytes;
  bool is_read;  // whether the update reads the copy
};

// Updates one item by `function` with `scalars`, after `copies`. `copy_and_update` is a
// RangeFunction whose scalars are this struct.
struct CopyingUpdate {
  RangeFunction function;
  const void* scalars;
  const std::vector<Copy>* copies;
  CopyFunction copy;
};
void copy_and_update(const Span& span, std::int64_t begin, std::int64_t end, const void* update,
                     bool is_streaming);

// Up to this many elements, the calling thread does the work alone.
constexpr std::int64_t kInlineNumel = 32 * 1024;

void run_items(RangeFunction function, std::vector<Item>& items, const void* scalars,
               int num_threads);

// Updates one item with the sum of `gradients` in place of its own; `function` takes fp32.
void run_summed(const KernelTable& table, RangeFunction function, const Item& item,
                const std::vector<Gradient>& gradients, const void* scalars, int num_threads);

// The sum of squares of `numel` elements: chunks of a fixed size, added in order, so that neither
// thread count nor instruction set changes it.
double run_sum(SumFunction function, const char* grad, std::int64_t numel, int num_threads);

// The same of the sum of several gradients, which is that of their fp32 sum in memory.
double run_sum_of_summed(const KernelTable& table, const std::vector<Gradient>& gradients,
                         std::int64_t numel, int num_threads);

}  // namespace cpu_adam
