// The Python face of the kernels: addresses and numbers in, nothing of Python beyond this file.
// Callers (the package's own Python) have checked every argument; see _memory.py.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.h"
#include "dlpack.h"
#include "driver.h"

namespace py = pybind11;

namespace {

using namespace cpu_adam;

constexpr py::ssize_t kWordsPerItem = 6;  // master, grad, exp_avg, exp_avg_sq, out, numel

unsigned long long word_at(const py::list& words, py::ssize_t at) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(words.ptr(), at));
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return value;
}

char* address_at(const py::list& words, py::ssize_t at) {
  return reinterpret_cast<char*>(static_cast<std::uintptr_t>(word_at(words, at)));
}

std::vector<Item> read_items(const py::list& words) {
  const auto count = static_cast<py::ssize_t>(words.size());
  if (count % kWordsPerItem != 0) throw py::value_error("items: six numbers each");
  std::vector<Item> items(static_cast<std::size_t>(count / kWordsPerItem));
  const auto address = [&words](py::ssize_t at) { return address_at(words, at); };
  py::ssize_t at = 0;
  for (Item& item : items) {
    item.span = {address(at), address(at + 1), {address(at + 2), address(at + 3)}, address(at + 4)};
    item.numel = static_cast<std::int64_t>(word_at(words, at + 5));
    at += kWordsPerItem;
  }
  return items;
}

AdamScalars make_scalars(const std::vector<double>& values) {
  if (values.size() != 9) throw py::value_error("scalars: nine numbers");
  AdamScalars s;
  s.grad_scale = static_cast<float>(values[0]);
  s.decay = static_cast<float>(values[1]);
  s.l2 = static_cast<float>(values[2]);
  // Interpolate from the nearer end, as torch.lerp does.
  const float weight = static_cast<float>(values[3]);
  s.lerp_from_grad = !(std::fabs(weight) < 0.5f);
  s.lerp_coefficient = s.lerp_from_grad ? weight - 1.0f : weight;
  s.beta2 = static_cast<float>(values[4]);
  s.one_minus_beta2 = static_cast<float>(values[5]);
  s.bias_correction2_sqrt = static_cast<float>(values[6]);
  s.eps = static_cast<float>(values[7]);
  s.neg_step_size = static_cast<float>(values[8]);
  return s;
}

void adam(int isa, int grad_type, int out_type, const py::list& words,
          const std::vector<double>& scalars, int num_threads) {
  const auto& tables = available_tables();
  if (isa < 0 || static_cast<std::size_t>(isa) >= tables.size()) {
    throw py::value_error("isa: no such instruction set");
  }
  if (grad_type < 0 || grad_type >= kNumGradTypes || out_type < 0 || out_type >= kNumOutTypes) {
    throw py::value_error("grad_type, out_type: no such element type");
  }
  std::vector<Item> items = read_items(words);
  const AdamScalars s = make_scalars(scalars);
  const RangeFunction function =
      tables[static_cast<std::size_t>(isa)]->adam.by_type[grad_type][out_type];
  const py::gil_scoped_release released;
  run_items(function, items, &s, num_threads);
}

// The step counts of many parameters: as torch calls, they would take longer than the update.
void count_up(const py::list& addresses) {
  const auto count = static_cast<py::ssize_t>(addresses.size());
  for (py::ssize_t at = 0; at < count; ++at) {
    char* const address = address_at(addresses, at);
    float value;
    std::memcpy(&value, address, sizeof value);
    value += 1.0f;
    std::memcpy(address, &value, sizeof value);
  }
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_tables()) names.emplace_back(table->name);
  return names;
}

std::vector<std::string> all_known_isas() {
  std::vector<std::string> names;
  for (const char* name : known_isas()) names.emplace_back(name);
  return names;
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
  m.doc() = "Compiled kernels of cpu_adam; use the functions of the package instead.";
  m.def("available_isas", &available_isas);
  m.def("known_isas", &all_known_isas);
  m.def("adam", &adam, py::arg("isa"), py::arg("grad_type"), py::arg("out_type"), py::arg("items"),
        py::arg("scalars"), py::arg("num_threads"));
  m.def("count_up", &count_up, py::arg("addresses"));
  m.def("read_dlpack", &read_dlpack, py::arg("capsule"));
}
