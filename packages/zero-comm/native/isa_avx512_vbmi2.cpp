// AVX-512 with VBMI2, which keeps and spreads 16-bit elements.

#include <immintrin.h>

#include <cstring>

#include "kernels.h"

#define ZERO_COMM_F16C 1
#define ZERO_COMM_VBMI2 1

namespace {
#include "codec.inl"
#include "difference.inl"
}  // namespace

const zero_comm::KernelTable zero_comm::kAvx512Vbmi2Table = {
    "avx512_vbmi2",
    encode,
    decode,
    decode_sum,
    {encode_blocks<std::uint16_t>, decode_blocks<std::uint16_t>},
    {encode_blocks<std::uint32_t>, decode_blocks<std::uint32_t>},
    sum_words};
