// Which instruction sets this build has and this CPU and operating system can run.
#pragma once

#include <vector>

#include "kernels.h"

namespace zero_comm {

// Usable kernels, plainest first.
const std::vector<const KernelTable*>& available_tables();

// Every instruction set that some build of this package has, usable here or not.
std::vector<const char*> known_isas();

}  // namespace zero_comm
