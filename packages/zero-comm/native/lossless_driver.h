// Distributes blocks of a lossless coding over threads.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace zero_comm {

// Encodes `numel` elements into `out`, which has room for a buffer with only raw blocks. With the
// value coding `old` equals `now`. Returns the number of bytes.
std::int64_t run_encode_blocks(const CodingTable& table, std::int64_t itemsize, const char* old,
                               const char* now, std::int64_t numel, std::uint8_t* out,
                               int num_threads);

// Decodes a buffer of `nbytes` into `numel` elements of `values`. Returns false if no encoder can
// have written the buffer. If its lengths are wrong, `values` are unchanged then.
bool run_decode_blocks(const CodingTable& table, std::int64_t itemsize, const std::uint8_t* in,
                       std::int64_t nbytes, char* values, std::int64_t numel, int num_threads);

}  // namespace zero_comm
