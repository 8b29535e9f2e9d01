#include "driver.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "thread_pool.h"

namespace cpu_adam {
namespace {

// Elements that a thread takes at a time. A few pages per array let hardware prefetching work, and
// small grains let threads finish at the same time.
constexpr std::int64_t kGrainNumel = 8 * 1024;

// Items start at multiples of this number in the concatenated list. Grain borders within an aligned
// tensor are therefore aligned to a cache line and never split a block of 8-bit states.
constexpr std::int64_t kAlignNumel = kBlockNumel;
static_assert(kAlignNumel % 64 == 0 && kGrainNumel % kAlignNumel == 0, "borders are aligned");

// From this size on (28 bytes per element), a call's memory exceeds the caches. See [Note:
// streaming the copy].
constexpr std::int64_t kStreamNumel = 4 * 1024 * 1024;

struct Context {
  RangeFunction function;
  const std::vector<Item>* items;
  const void* scalars;
  bool is_streaming;
};

void run_grain(void* opaque, std::int64_t grain) {
  const Context& context = *static_cast<const Context*>(opaque);
  const std::vector<Item>& items = *context.items;
  const std::int64_t begin = grain * kGrainNumel;
  const std::int64_t end = begin + kGrainNumel;
  const auto starts_after = [](std::int64_t at, const Item& item) { return at < item.offset; };
  auto item = std::upper_bound(items.begin(), items.end(), begin, starts_after) - 1;
  for (; item != items.end() && item->offset < end; ++item) {
    const std::int64_t first = std::max<std::int64_t>(begin - item->offset, 0);
    const std::int64_t last = std::min(end - item->offset, item->numel);
    if (first < last) {
      context.function(item->span, first, last, context.scalars, context.is_streaming);
    }
  }
}

constexpr std::int64_t kTypeBytes[kNumGradTypes] = {4, 2, 2};

// Elements of a tile: 8 KiB each for a sum of gradients or a copied state, which fit in a
// first-level cache.
constexpr std::int64_t kTileNumel = 2 * 1024;
static_assert(kTileNumel % kAlignNumel == 0, "borders are aligned");

// Writes elements [begin, end) of the sum of all gradients to `sum`.
void add_all(const KernelTable& table, const std::vector<Gradient>& gradients, std::int64_t begin,
             std::int64_t end, float* sum) {
  bool is_first = true;
  for (const Gradient& gradient : gradients) {
    const char* const from = gradient.address + begin * kTypeBytes[gradient.type];
    table.add_gradient[gradient.type](sum, from, end - begin, is_first);
    is_first = false;
  }
}

struct SummedContext {
  const KernelTable* table;
  RangeFunction function;
  const Item* item;
  const std::vector<Gradient>* gradients;
  const void* scalars;
  bool is_streaming;
};

void run_summed_grain(void* opaque, std::int64_t grain) {
  const SummedContext& context = *static_cast<const SummedContext*>(opaque);
  const std::int64_t stop = std::min((grain + 1) * kGrainNumel, context.item->numel);
  alignas(64) float tile[kTileNumel];
  for (std::int64_t begin = grain * kGrainNumel; begin < stop; begin += kTileNumel) {
    const std::int64_t end = std::min(begin + kTileNumel, stop);
    add_all(*context.table, *context.gradients, begin, end, tile);
    Span span = context.item->span;
    // Address where element 0 would be, because kernels add the index. The index cannot be shifted
    // instead: random numbers depend on it.
    span.grad = reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(tile) -
                                              static_cast<std::uintptr_t>(begin) * sizeof(float));
    context.function(span, begin, end, context.scalars, context.is_streaming);
  }
}

struct SumContext {
  SumFunction function;
  const char* grad;
  std::int64_t numel;
  double* sums;
};

void sum_chunk(void* opaque, std::int64_t chunk) {
  const SumContext& context = *static_cast<const SumContext*>(opaque);
  const std::int64_t begin = chunk * kChunkNumel;
  const std::int64_t end = std::min(begin + kChunkNumel, context.numel);
  context.sums[chunk] = context.function(context.grad, begin, end);
}

struct SummedSumContext {
  const KernelTable* table;
  const std::vector<Gradient>* gradients;
  std::int64_t numel;
  double* sums;
};

void sum_summed_chunk(void* opaque, std::int64_t chunk) {
  const SummedSumContext& context = *static_cast<const SummedSumContext*>(opaque);
  const std::int64_t begin = chunk * kChunkNumel;
  const std::int64_t end = std::min(begin + kChunkNumel, context.numel);
  alignas(64) float sum[kChunkNumel];
  add_all(*context.table, *context.gradients, begin, end, sum);
  const char* const from = reinterpret_cast<const char*>(sum);
  context.sums[chunk] = context.table->sum_of_squares[kFloat32](from, 0, end - begin);
}

// Makes all copies for elements [begin, end). `begin` must be the first element of a block.
void copy_range(const CopyingUpdate& update, std::int64_t begin, std::int64_t end) {
  for (const Copy& copy : *update.copies) {
    const std::int64_t first = begin / kBlockNumel * copy.block_bytes;
    const std::int64_t num_blocks = (end + kBlockNumel - 1) / kBlockNumel;
    const std::int64_t last = std::min(num_blocks * copy.block_bytes, copy.num_bytes);
    if (first >= last) continue;
    if (copy.is_read) {
      std::memcpy(copy.to + first, copy.from + first, static_cast<std::size_t>(last - first));
    } else {
      update.copy(copy.to + first, copy.from + first, last - first);
    }
  }
}

}  // namespace

void copy_and_update(const Span& span, std::int64_t begin, std::int64_t end, const void* opaque,
                     bool is_streaming) {
  const CopyingUpdate& update = *static_cast<const CopyingUpdate*>(opaque);
  for (std::int64_t low = begin; low < end; low += kTileNumel) {
    const std::int64_t high = std::min(low + kTileNumel, end);
    copy_range(update, low, high);
    update.function(span, low, high, update.scalars, is_streaming);
  }
}

double run_sum(SumFunction function, const char* grad, std::int64_t numel, int num_threads) {
  const std::int64_t num_chunks = (numel + kChunkNumel - 1) / kChunkNumel;
  std::vector<double> sums(static_cast<std::size_t>(num_chunks));
  SumContext context{function, grad, numel, sums.data()};
  ThreadPool::of_this_process().run({sum_chunk, &context, num_chunks}, num_threads);
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

void run_items(RangeFunction function, std::vector<Item>& items, const void* scalars,
               int num_threads) {
  std::int64_t total = 0;
  for (Item& item : items) {
    item.offset = total;
    total += (item.numel + kAlignNumel - 1) / kAlignNumel * kAlignNumel;
  }
  const bool is_streaming = total >= kStreamNumel;
  if (num_threads <= 1 || total <= kInlineNumel) {
    for (const Item& item : items) function(item.span, 0, item.numel, scalars, is_streaming);
    return;
  }
  Context context{function, &items, scalars, is_streaming};
  const Task task{run_grain, &context, (total + kGrainNumel - 1) / kGrainNumel};
  ThreadPool::of_this_process().run(task, num_threads);
}

void run_summed(const KernelTable& table, RangeFunction function, const Item& item,
                const std::vector<Gradient>& gradients, const void* scalars, int num_threads) {
  const bool is_streaming = item.numel >= kStreamNumel;
  SummedContext context{&table, function, &item, &gradients, scalars, is_streaming};
  const Task task{run_summed_grain, &context, (item.numel + kGrainNumel - 1) / kGrainNumel};
  ThreadPool::of_this_process().run(task, item.numel <= kInlineNumel ? 1 : num_threads);
}

double run_sum_of_summed(const KernelTable& table, const std::vector<Gradient>& gradients,
                         std::int64_t numel, int num_threads) {
  const std::int64_t num_chunks = (numel + kChunkNumel - 1) / kChunkNumel;
  std::vector<double> sums(static_cast<std::size_t>(num_chunks));
  SummedSumContext context{&table, &gradients, numel, sums.data()};
  ThreadPool::of_this_process().run({sum_summed_chunk, &context, num_chunks}, num_threads);
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace cpu_adam
