// Python bindings of the kernels, which take addresses and numbers. No other file uses Python.
// The callers in zero_comm check the memory behind every address.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "dispatch.h"
#include "driver.h"
#include "lossless_driver.h"

namespace py = pybind11;

namespace {

using namespace zero_comm;

const KernelTable& table_of(int isa) {
  const auto& tables = available_tables();
  if (isa < 0 || static_cast<std::size_t>(isa) >= tables.size()) {
    throw py::value_error("isa: no such instruction set");
  }
  return *tables[static_cast<std::size_t>(isa)];
}

// (kind, block_size, is_symmetric, has_rotation, dtype, elements per row)
using Shape = std::tuple<int, std::int64_t, bool, bool, int, std::int64_t>;

Layout layout_of(const Shape& shape) {
  const auto [kind, block_size, is_symmetric, has_rotation, dtype, numel] = shape;
  if (kind < kInt8 || kind > kE5M2) throw py::value_error("kind: no such format");
  if (dtype < kFloat32 || dtype > kFloat16) throw py::value_error("dtype: no such element type");
  if (block_size < 8 || numel < 0) throw py::value_error("block_size, numel: out of range");
  Layout layout;
  layout.format = {kind, is_symmetric, has_rotation, block_size};
  layout.dtype = dtype;
  layout.numel = numel;
  layout.num_blocks = (numel + block_size - 1) / block_size;
  layout.scale_offset = layout.num_blocks * (kind == kInt4 ? block_size / 2 : block_size);
  layout.used_nbytes = layout.scale_offset + layout.num_blocks * (is_symmetric ? 2 : 8);
  layout.nbytes = (layout.used_nbytes + 15) / 16 * 16;
  return layout;
}

template <class T>
T* pointer(std::uint64_t address) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

bool encode(int isa, const Shape& shape, std::uint64_t x, std::uint64_t rows, std::int64_t stride,
            std::int64_t count, std::optional<std::uint32_t> seed, int num_threads) {
  const KernelTable& table = table_of(isa);
  const Layout layout = layout_of(shape);
  const py::gil_scoped_release released;
  return run_encode(table, layout, pointer<const char>(x),
                    {pointer<std::uint8_t>(rows), stride, count}, seed.has_value(),
                    seed.value_or(0), num_threads);
}

void decode(int isa, const Shape& shape, std::uint64_t rows, std::int64_t stride,
            std::int64_t count, std::uint64_t out, int num_threads) {
  const KernelTable& table = table_of(isa);
  const Layout layout = layout_of(shape);
  const py::gil_scoped_release released;
  run_decode(table, layout, {pointer<std::uint8_t>(rows), stride, count}, pointer<char>(out),
             num_threads);
}

void decode_sum(int isa, const Shape& shape, std::uint64_t rows, std::int64_t stride,
                std::int64_t count, std::uint64_t out, int num_threads) {
  const KernelTable& table = table_of(isa);
  const Layout layout = layout_of(shape);
  if (count < 1) throw py::value_error("count: must be at least 1");
  const py::gil_scoped_release released;
  run_decode_sum(table, layout, {pointer<std::uint8_t>(rows), stride, count}, pointer<float>(out),
                 num_threads);
}

const CodingTable& coding_table_of(int isa, int coding, std::int64_t itemsize) {
  if (coding < 0 || coding >= kNumCodings) throw py::value_error("coding: no such coding");
  if (itemsize != 2 && itemsize != 4) throw py::value_error("itemsize: must be 2 or 4");
  return table_of(isa).codings[coding][itemsize / 4];
}

std::int64_t encode_blocks(int isa, int coding, std::int64_t itemsize, std::uint64_t old,
                           std::uint64_t now, std::int64_t numel, std::uint64_t out,
                           int num_threads) {
  const CodingTable& table = coding_table_of(isa, coding, itemsize);
  const py::gil_scoped_release released;
  return run_encode_blocks(table, itemsize, pointer<const char>(old), pointer<const char>(now),
                           numel, pointer<std::uint8_t>(out), num_threads);
}

bool decode_blocks(int isa, int coding, std::int64_t itemsize, std::uint64_t codes,
                   std::int64_t nbytes, std::uint64_t values, std::int64_t numel, int num_threads) {
  const CodingTable& table = coding_table_of(isa, coding, itemsize);
  const py::gil_scoped_release released;
  return run_decode_blocks(table, itemsize, pointer<const std::uint8_t>(codes), nbytes,
                           pointer<char>(values), numel, num_threads);
}

std::int64_t checksum(int isa, std::uint64_t words, std::int64_t count, std::uint64_t odd) {
  const KernelTable& table = table_of(isa);
  const py::gil_scoped_release released;
  const std::uint64_t sum =
      table.checksum(pointer<const std::uint64_t>(words), count, pointer<const std::uint64_t>(odd));
  return static_cast<std::int64_t>(sum);
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_tables()) names.emplace_back(table->name);
  return names;
}

std::vector<std::string> all_known_isas() {
  const auto names = known_isas();
  return {names.begin(), names.end()};
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
  m.doc() = "Compiled kernels of zero_comm; use the functions of the package instead.";
  m.def("available_isas", &available_isas);
  m.def("known_isas", &all_known_isas);
  const auto isa = py::arg("isa"), shape = py::arg("shape"), rows = py::arg("rows"),
             stride = py::arg("stride"), count = py::arg("count"), out = py::arg("out"),
             num_threads = py::arg("num_threads");
  m.def("encode", &encode, isa, shape, py::arg("x"), rows, stride, count, py::arg("seed"),
        num_threads);
  m.def("decode", &decode, isa, shape, rows, stride, count, out, num_threads);
  m.def("decode_sum", &decode_sum, isa, shape, rows, stride, count, out, num_threads);
  const auto coding = py::arg("coding"), itemsize = py::arg("itemsize"), numel = py::arg("numel");
  m.def("encode_blocks", &encode_blocks, isa, coding, itemsize, py::arg("old"), py::arg("now"),
        numel, out, num_threads);
  m.def("decode_blocks", &decode_blocks, isa, coding, itemsize, py::arg("codes"), py::arg("nbytes"),
        py::arg("values"), numel, num_threads);
  m.def("checksum", &checksum, isa, py::arg("words"), count, py::arg("odd"));
}
