// Reads a DLPack capsule (https://dmlc.github.io/dlpack/latest/c_api.html), 0.x or 1.x.
#pragma once

#include <pybind11/pybind11.h>

namespace cpu_adam {

// (address, shape, strides or None, type code, bits, lanes, device type, is_read_only), of a
// capsule that stays the caller's to keep alive. Raises TypeError for anything else.
pybind11::tuple read_dlpack(const pybind11::capsule& capsule);

}  // namespace cpu_adam
