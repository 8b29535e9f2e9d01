#include "driver.h"

#include <algorithm>

#include "thread_pool.h"

namespace cpu_adam {
namespace {

// Elements a thread takes at a time: long enough for hardware prefetching (a few pages per
// stream), short enough for the threads to finish together.
constexpr std::int64_t kGrainNumel = 32 * 1024;

// Items start at multiples of this in the concatenated list, so that a grain's border inside an
// aligned tensor is aligned to a cache line.
constexpr std::int64_t kAlignNumel = 64;

// From here on (at 28 bytes each) a call's memory exceeds the caches; see [Note: streaming the
// copy].
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

}  // namespace

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

}  // namespace cpu_adam
