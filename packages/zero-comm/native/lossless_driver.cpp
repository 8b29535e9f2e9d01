#include "lossless_driver.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "threads.h"

namespace zero_comm {
namespace {

// Blocks that a thread processes at once, and elements per started thread.
constexpr std::int64_t kGrainBlocks = 512;
constexpr std::int64_t kGrainNumel = kGrainBlocks * kFrameBlock;
constexpr std::int64_t kThreadNumel = 1 << 20;

std::int64_t count_blocks(std::int64_t numel) { return (numel + kFrameBlock - 1) / kFrameBlock; }

}  // namespace

std::int64_t run_encode_blocks(const CodingTable& table, std::int64_t itemsize, const char* old,
                               const char* now, std::int64_t numel, std::uint8_t* out,
                               int num_threads) {
  auto* const descriptors = reinterpret_cast<std::uint16_t*>(out);
  std::uint8_t* const codes = out + count_blocks(numel) * 2;
  const std::int64_t most_threads = std::min<std::int64_t>(num_threads, numel / kThreadNumel);
  if (most_threads <= 1) {  // a single thread leaves no gaps
    return count_blocks(numel) * 2 + table.encode(old, now, numel, descriptors, codes);
  }
  // Each thread encodes a grain at the offset of its raw elements. memmove then closes the gaps.
  const std::int64_t num_grains = (numel + kGrainNumel - 1) / kGrainNumel;
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(num_grains));
  const auto run = [&](std::int64_t grain) {
    const std::int64_t first = grain * kGrainNumel, offset = first * itemsize;
    lengths[static_cast<std::size_t>(grain)] =
        table.encode(old + offset, now + offset, std::min(kGrainNumel, numel - first),
                     descriptors + grain * kGrainBlocks, codes + offset);
  };
  share_grains(num_grains, most_threads, [&] { return run; });
  std::int64_t end = 0;
  for (std::int64_t grain = 0; grain < num_grains; ++grain) {
    const auto length = lengths[static_cast<std::size_t>(grain)];
    std::memmove(codes + end, codes + grain * kGrainNumel * itemsize,
                 static_cast<std::size_t>(length));
    end += length;
  }
  return count_blocks(numel) * 2 + end;
}

bool run_decode_blocks(const CodingTable& table, std::int64_t itemsize, const std::uint8_t* in,
                       std::int64_t nbytes, char* values, std::int64_t numel, int num_threads) {
  const std::int64_t num_blocks = count_blocks(numel);
  if (nbytes < num_blocks * 2) return false;
  const auto* const descriptors = reinterpret_cast<const std::uint16_t*>(in);
  const std::uint8_t* const codes = in + num_blocks * 2;
  const std::int64_t num_grains = (numel + kGrainNumel - 1) / kGrainNumel;
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(num_grains));
  std::int64_t offset = 0;
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    if (block % kGrainBlocks == 0) offsets[static_cast<std::size_t>(block / kGrainBlocks)] = offset;
    offset += descriptors[block] & ((1 << kModeShift) - 1);
  }
  if (offset != nbytes - num_blocks * 2) return false;
  std::atomic<bool> is_good{true};
  const auto run = [&](std::int64_t grain) {
    const std::int64_t first = grain * kGrainNumel;
    if (!table.decode(descriptors + grain * kGrainBlocks,
                      codes + offsets[static_cast<std::size_t>(grain)],
                      std::min(kGrainNumel, numel - first), values + first * itemsize)) {
      is_good.store(false, std::memory_order_relaxed);
    }
  };
  share_grains(num_grains, std::min<std::int64_t>(num_threads, numel / kThreadNumel),
               [&] { return run; });
  return is_good.load();
}

}  // namespace zero_comm
