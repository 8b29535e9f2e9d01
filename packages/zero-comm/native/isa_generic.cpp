// The instructions that every processor of this architecture has (SSE2, NEON).

#include <cstring>

#include "kernels.h"

namespace {
#include "codec.inl"
}  // namespace

const zero_comm::KernelTable zero_comm::kGenericTable = {"generic", encode, decode, decode_sum};
