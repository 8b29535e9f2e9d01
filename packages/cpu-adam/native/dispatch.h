// Instruction sets that this build contains and that the CPU and operating system support.
#pragma once

#include <vector>

#include "kernels.h"

namespace cpu_adam {

// Returns the usable kernels, slowest first.
const std::vector<const KernelTable*>& available_tables();

// Returns all instruction sets that any build of this package has, usable here or not.
std::vector<const char*> known_isas();

}  // namespace cpu_adam
