#include "driver.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "threads.h"

namespace zero_comm {
namespace {

// Elements that a thread processes at once, a compromise between balance and overhead.
constexpr std::int64_t kGrainNumel = 1 << 17;
// Elements per started thread. Starting a thread takes as long as some 100,000 elements.
constexpr std::int64_t kThreadNumel = 1 << 20;
constexpr std::uint32_t kSeedStep = 0x9e3779b9u;  // between the seeds of two rows

// `mix` of [Note: stochastic rounding].
std::uint32_t mix(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

std::int64_t element_nbytes(int dtype) { return dtype == kFloat32 ? 4 : 2; }

// Workspace of one thread for kScratchBlocks blocks, aligned to a cache line.
class Scratch {
 public:
  explicit Scratch(const Format& format)
      : memory_(static_cast<std::size_t>(format.block_size * kScratchBlocks) + 32) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    start_ = memory_.data() + ((64 - address % 64) % 64) / sizeof(float);
  }
  Scratch(Scratch&&) = default;  // start_ stays valid: a moved vector keeps its memory
  float* get() { return start_; }

 private:
  std::vector<float> memory_;
  float* start_;
};

// Calls run(row, first block, last block, scratch) for all blocks of all rows, on at most
// num_threads threads including this one.
template <class Run>
void share(const Layout& layout, std::int64_t num_rows, std::int64_t work, int num_threads,
           const Run& run) {
  const std::int64_t blocks = std::max<std::int64_t>(1, kGrainNumel / layout.format.block_size);
  const std::int64_t grains_per_row = (layout.num_blocks + blocks - 1) / blocks;
  const std::int64_t num_grains = grains_per_row * num_rows;
  const auto make_run = [&] {
    return [&, scratch = Scratch(layout.format)](std::int64_t grain) mutable {
      const std::int64_t first = grain % grains_per_row * blocks;
      run(grain / grains_per_row, first, std::min(first + blocks, layout.num_blocks),
          scratch.get());
    };
  };
  share_grains(num_grains, std::min<std::int64_t>(num_threads, work / kThreadNumel), make_run);
}

DecodeRow row_at(const Layout& layout, const Rows& rows, std::int64_t index) {
  const std::uint8_t* const row = rows.data + index * rows.stride;
  return {row, row + layout.scale_offset, layout.numel};
}

}  // namespace

bool run_encode(const KernelTable& table, const Layout& layout, const char* x, const Rows& rows,
                bool has_noise, std::uint32_t seed, int num_threads) {
  std::atomic<bool> is_bad{false};
  const std::int64_t row_nbytes = layout.numel * element_nbytes(layout.dtype);
  const auto run = [&](std::int64_t index, std::int64_t first, std::int64_t last, float* scratch) {
    std::uint8_t* const data = rows.data + index * rows.stride;
    const std::uint32_t own_seed = mix(seed + kSeedStep * static_cast<std::uint32_t>(index));
    const EncodeRow row = {x + index * row_nbytes, data,      data + layout.scale_offset,
                           layout.numel,           has_noise, own_seed};
    if (table.encode(layout.format, layout.dtype, row, first, last, scratch)) {
      is_bad.store(true, std::memory_order_relaxed);
    }
  };
  share(layout, rows.count, rows.count * layout.numel, num_threads, run);
  const auto padding = static_cast<std::size_t>(layout.nbytes - layout.used_nbytes);
  if (padding == 0) return is_bad.load();  // also avoids the null address of empty rows
  for (std::int64_t index = 0; index < rows.count; ++index) {
    std::memset(rows.data + index * rows.stride + layout.used_nbytes, 0, padding);
  }
  return is_bad.load();
}

void run_decode(const KernelTable& table, const Layout& layout, const Rows& rows, char* out,
                int num_threads) {
  const std::int64_t row_nbytes = layout.numel * element_nbytes(layout.dtype);
  const auto run = [&](std::int64_t index, std::int64_t first, std::int64_t last, float* scratch) {
    table.decode(layout.format, layout.dtype, row_at(layout, rows, index), out + index * row_nbytes,
                 first, last, scratch);
  };
  share(layout, rows.count, rows.count * layout.numel, num_threads, run);
}

void run_decode_sum(const KernelTable& table, const Layout& layout, const Rows& rows, float* out,
                    int num_threads) {
  std::vector<DecodeRow> all;
  for (std::int64_t index = 0; index < rows.count; ++index) {
    all.push_back(row_at(layout, rows, index));
  }
  const auto run = [&](std::int64_t, std::int64_t first, std::int64_t last, float* scratch) {
    table.decode_sum(layout.format, all.data(), rows.count, out, first, last, scratch);
  };
  share(layout, 1, rows.count * layout.numel, num_threads, run);
}

}  // namespace zero_comm
