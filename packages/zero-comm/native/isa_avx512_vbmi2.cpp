// Kernels for AVX-512 with VBMI2, which compresses and expands vectors of 8-bit and 16-bit lanes.

#include <immintrin.h>

#include <cstring>

#include "kernels.h"

#define ZERO_COMM_F16C 1
#define ZERO_COMM_VBMI2 1

namespace {
#include "table.inl"
}  // namespace

const zero_comm::KernelTable zero_comm::kAvx512Vbmi2Table = table("avx512_vbmi2");
