// Instruction sets of this build that the CPU and the operating system support.
#pragma once

#include <vector>

#include "kernels.h"

namespace zero_comm {

// Usable kernels, from the most basic instruction set to the fastest.
const std::vector<const KernelTable*>& available_tables();

// All instruction sets of all builds of this package, usable here or not.
std::vector<const char*> known_isas();

}  // namespace zero_comm
