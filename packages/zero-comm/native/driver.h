// Splits rows into groups of blocks and distributes the groups over threads.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace zero_comm {

// `count` rows with a constant stride.
struct Rows {
  std::uint8_t* data;
  std::int64_t stride;  // bytes
  std::int64_t count;
};

struct Layout {
  Format format;
  int dtype;
  std::int64_t numel;         // per row
  std::int64_t num_blocks;    // per row
  std::int64_t scale_offset;  // bytes
  std::int64_t used_nbytes;
  std::int64_t nbytes;
};

// Quantizes `rows.count` rows of `x`. Returns whether `x` has NaN or Inf.
bool run_encode(const KernelTable& table, const Layout& layout, const char* x, const Rows& rows,
                bool has_noise, std::uint32_t seed, int num_threads);

// Dequantizes all rows into `out`.
void run_decode(const KernelTable& table, const Layout& layout, const Rows& rows, char* out,
                int num_threads);

// Fills `out` with the sum of all rows. There must be at least one row.
void run_decode_sum(const KernelTable& table, const Layout& layout, const Rows& rows, float* out,
                    int num_threads);

}  // namespace zero_comm
