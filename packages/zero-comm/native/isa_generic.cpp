// Kernels for the instructions that every processor of the architecture has (SSE2, NEON).

#include <cstring>

#include "kernels.h"

namespace {
#include "table.inl"
}  // namespace

const zero_comm::KernelTable zero_comm::kGenericTable = table("generic");
