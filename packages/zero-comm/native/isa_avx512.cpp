// AVX-512 (F, BW, VL, DQ), and F16C.

#include <immintrin.h>

#include <cstring>

#include "kernels.h"

#define ZERO_COMM_F16C 1

namespace {
#include "codec.inl"
#include "difference.inl"
}  // namespace

const zero_comm::KernelTable zero_comm::kAvx512Table = {
    "avx512",
    encode,
    decode,
    decode_sum,
    {encode_blocks<std::uint16_t>, decode_blocks<std::uint16_t>},
    {encode_blocks<std::uint32_t>, decode_blocks<std::uint32_t>},
    sum_words};
