// The instructions that every processor of this architecture has (SSE2, NEON).

#include <cstring>

#include "kernels.h"

namespace {
#include "codec.inl"
#include "difference.inl"
}  // namespace

const zero_comm::KernelTable zero_comm::kGenericTable = {
    "generic",
    encode,
    decode,
    decode_sum,
    {encode_blocks<std::uint16_t>, decode_blocks<std::uint16_t>},
    {encode_blocks<std::uint32_t>, decode_blocks<std::uint32_t>},
    sum_words};
