// Kernels for AVX2 and F16C.

#include <immintrin.h>

#include <cstring>

#include "kernels.h"

#define ZERO_COMM_F16C 1

namespace {
#include "table.inl"
}  // namespace

const zero_comm::KernelTable zero_comm::kAvx2Table = table("avx2");
