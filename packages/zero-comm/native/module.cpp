// The Python face of the kernels: addresses and numbers in, nothing of Python beyond this file.
// Callers (zero_comm/native_backend.py) have checked every argument.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "difference_driver.h"
#include "dispatch.h"
#include "driver.h"

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

// (kind, block_size, is_symmetric, has_rotation, dtype, numel of a row)
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

template <class Table>
const Table& of_itemsize(std::int64_t itemsize, const Table& of_16_bits, const Table& of_32_bits) {
  if (itemsize == 2) return of_16_bits;
  if (itemsize == 4) return of_32_bits;
  throw py::value_error("itemsize: must be 2 or 4");
}

const DifferenceTable& difference_table_of(int isa, std::int64_t itemsize) {
  const KernelTable& table = table_of(isa);
  return of_itemsize(itemsize, table.differences_of_16_bits, table.differences_of_32_bits);
}

std::int64_t encode_difference(int isa, std::int64_t itemsize, std::uint64_t old, std::uint64_t now,
                               std::int64_t numel, std::uint64_t out, int num_threads) {
  const DifferenceTable& table = difference_table_of(isa, itemsize);
  const py::gil_scoped_release released;
  return run_encode_difference(table, itemsize, pointer<const char>(old), pointer<const char>(now),
                               numel, pointer<std::uint8_t>(out), num_threads);
}

bool decode_difference(int isa, std::int64_t itemsize, std::uint64_t codes, std::int64_t nbytes,
                       std::uint64_t values, std::int64_t numel, int num_threads) {
  const DifferenceTable& table = difference_table_of(isa, itemsize);
  const py::gil_scoped_release released;
  return run_decode_difference(table, itemsize, pointer<const std::uint8_t>(codes), nbytes,
                               pointer<char>(values), numel, num_threads);
}

const ValueTable& value_table_of(int isa, std::int64_t itemsize) {
  const KernelTable& table = table_of(isa);
  return of_itemsize(itemsize, table.values_of_16_bits, table.values_of_32_bits);
}

std::int64_t encode_values(int isa, std::int64_t itemsize, std::uint64_t values, std::int64_t numel,
                           std::uint64_t out, int num_threads) {
  const ValueTable& table = value_table_of(isa, itemsize);
  const py::gil_scoped_release released;
  return run_encode_values(table, itemsize, pointer<const char>(values), numel,
                           pointer<std::uint8_t>(out), num_threads);
}

bool decode_values(int isa, std::int64_t itemsize, std::uint64_t codes, std::int64_t nbytes,
                   std::uint64_t values, std::int64_t numel, int num_threads) {
  const ValueTable& table = value_table_of(isa, itemsize);
  const py::gil_scoped_release released;
  return run_decode_values(table, itemsize, pointer<const std::uint8_t>(codes), nbytes,
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
  const auto itemsize = py::arg("itemsize"), numel = py::arg("numel");
  m.def("encode_difference", &encode_difference, isa, itemsize, py::arg("old"), py::arg("now"),
        numel, out, num_threads);
  m.def("decode_difference", &decode_difference, isa, itemsize, py::arg("codes"), py::arg("nbytes"),
        py::arg("values"), numel, num_threads);
  m.def("encode_values", &encode_values, isa, itemsize, py::arg("values"), numel, out, num_threads);
  m.def("decode_values", &decode_values, isa, itemsize, py::arg("codes"), py::arg("nbytes"),
        py::arg("values"), numel, num_threads);
  m.def("checksum", &checksum, isa, py::arg("words"), count, py::arg("odd"));
}
