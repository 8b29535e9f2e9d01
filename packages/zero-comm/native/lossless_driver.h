// Shares blocks of a lossless coding among threads.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace zero_comm {

// Codes `numel` elements into `out`, which has room for all of them raw: descriptors, then blocks.
// `old` are `now` itself for values. Returns the number of bytes.
std::int64_t run_encode_blocks(const CodingTable& table, std::int64_t itemsize, const char* old,
                               const char* now, std::int64_t numel, std::uint8_t* out,
                               int num_threads);

// Changes or fills `numel` elements of `values` by `nbytes` of code. Returns whether these are what
// an encoder may have written; lengths are checked first, before anything is changed.
bool run_decode_blocks(const CodingTable& table, std::int64_t itemsize, const std::uint8_t* in,
                       std::int64_t nbytes, char* values, std::int64_t numel, int num_threads);

}  // namespace zero_comm
