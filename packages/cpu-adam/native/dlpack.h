// Reads a DLPack capsule, version 0.x or 1.x (https://dmlc.github.io/dlpack/latest/c_api.html).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>

namespace cpu_adam {

// Binary layout of the DLPack specification. The order of the fields matters.
struct DLTensorView {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  std::uint8_t type_code;
  std::uint8_t type_bits;
  std::uint16_t type_lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct VersionedView {
  std::uint32_t major;
  std::uint32_t minor;
  void* manager_context;
  void (*deleter)(void*);
  std::uint64_t flags;
  DLTensorView tensor;
};

inline constexpr std::uint64_t kReadOnlyFlag = 1;

// Returns (address, shape, strides or None, type code, bits, lanes, device type, is_read_only) of a
// capsule, which the caller must keep alive. Raises TypeError for an unusable capsule.
inline pybind11::tuple read_dlpack(const pybind11::capsule& capsule) {
  namespace py = pybind11;
  const char* name = capsule.name();
  const DLTensorView* tensor = nullptr;
  bool is_read_only = false;
  if (name != nullptr && std::strcmp(name, "dltensor") == 0) {
    tensor = static_cast<const DLTensorView*>(capsule.get_pointer());
  } else if (name != nullptr && std::strcmp(name, "dltensor_versioned") == 0) {
    const auto* versioned = static_cast<const VersionedView*>(capsule.get_pointer());
    if (versioned->major != 1) throw py::type_error("DLPack major version is not 1");
    is_read_only = (versioned->flags & kReadOnlyFlag) != 0;
    tensor = &versioned->tensor;
  } else {
    throw py::type_error("not a DLPack capsule, or one that was used before");
  }
  if (tensor->ndim < 0) throw py::type_error("DLPack tensor of a negative number of dimensions");
  py::tuple shape(tensor->ndim);
  for (std::int32_t i = 0; i < tensor->ndim; ++i) shape[i] = py::int_(tensor->shape[i]);
  py::object strides = py::none();
  if (tensor->strides != nullptr) {
    py::tuple values(tensor->ndim);
    for (std::int32_t i = 0; i < tensor->ndim; ++i) values[i] = py::int_(tensor->strides[i]);
    strides = values;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(tensor->data) + tensor->byte_offset;
  return py::make_tuple(address, shape, strides, tensor->type_code, tensor->type_bits,
                        tensor->type_lanes, tensor->device_type, is_read_only);
}

}  // namespace cpu_adam
