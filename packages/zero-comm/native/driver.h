// Cuts rows into runs of blocks and shares them among threads.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace zero_comm {

// `count` rows at a fixed distance of each other.
struct Rows {
  std::uint8_t* data;
  std::int64_t stride;  // bytes
  std::int64_t count;
};

struct Layout {
  Format format;
  int dtype;
  std::int64_t numel;         // of one row
  std::int64_t num_blocks;    // of one row
  std::int64_t scale_offset;  // bytes
  std::int64_t used_nbytes;
  std::int64_t nbytes;
};

// Quantizes `rows.count` rows of `x`; returns whether one has NaN or Inf.
bool run_encode(const KernelTable& table, const Layout& layout, const char* x, const Rows& rows,
                bool has_noise, std::uint32_t seed, int num_threads);

// Dequantizes all rows into `out`.
void run_decode(const KernelTable& table, const Layout& layout, const Rows& rows, char* out,
                int num_threads);

// Adds up all rows, one at least, in `out`.
void run_decode_sum(const KernelTable& table, const Layout& layout, const Rows& rows, float* out,
                    int num_threads);

}  // namespace zero_comm
