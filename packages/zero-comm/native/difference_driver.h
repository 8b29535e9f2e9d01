// Shares blocks of differences, or of values, among threads.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace zero_comm {

// Codes `numel` elements into `out`, which has room for all of them raw: descriptors, then blocks.
// Returns the number of bytes.
std::int64_t run_encode_difference(const DifferenceTable& table, std::int64_t itemsize,
                                   const char* old, const char* now, std::int64_t numel,
                                   std::uint8_t* out, int num_threads);

// Changes `numel` elements of `values` by the `nbytes` of differences. Returns whether these are
// what an encoder may have written; lengths are checked first, before anything is changed.
bool run_decode_difference(const DifferenceTable& table, std::int64_t itemsize,
                           const std::uint8_t* in, std::int64_t nbytes, char* values,
                           std::int64_t numel, int num_threads);

// As run_encode_difference, of values alone.
std::int64_t run_encode_values(const ValueTable& table, std::int64_t itemsize, const char* values,
                               std::int64_t numel, std::uint8_t* out, int num_threads);

// As run_decode_difference; `values` are overwritten.
bool run_decode_values(const ValueTable& table, std::int64_t itemsize, const std::uint8_t* in,
                       std::int64_t nbytes, char* values, std::int64_t numel, int num_threads);

}  // namespace zero_comm
