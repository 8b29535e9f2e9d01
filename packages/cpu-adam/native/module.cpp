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

// Items of `num_states` states: master, grad, the states, out, numel; and the stream, if there is
// one.
std::vector<Item> read_items(const py::list& words, int num_states, bool has_stream) {
  const auto count = static_cast<py::ssize_t>(words.size());
  const py::ssize_t words_per_item = 4 + num_states + (has_stream ? 1 : 0);
  if (count % words_per_item != 0) throw py::value_error("items: too few or too many numbers");
  std::vector<Item> items(static_cast<std::size_t>(count / words_per_item));
  py::ssize_t at = 0;
  for (Item& item : items) {
    item.span = {};
    item.span.master = address_at(words, at++);
    item.span.grad = address_at(words, at++);
    for (int k = 0; k < num_states; ++k) item.span.state[k] = address_at(words, at++);
    item.span.out = address_at(words, at++);
    item.numel = static_cast<std::int64_t>(word_at(words, at++));
    if (has_stream) item.span.stream = static_cast<std::uint32_t>(word_at(words, at++));
  }
  return items;
}

const KernelTable& table_of(int isa) {
  const auto& tables = available_tables();
  if (isa < 0 || static_cast<std::size_t>(isa) >= tables.size()) {
    throw py::value_error("isa: no such instruction set");
  }
  return *tables[static_cast<std::size_t>(isa)];
}

void check_grad_type(int grad_type) {
  if (grad_type < 0 || grad_type >= kNumGradTypes) {
    throw py::value_error("grad_type: no such element type");
  }
}

// The first gradient, and those to be added to it: address and type of each, one after another.
std::vector<Gradient> read_gradients(const char* first, int grad_type, const py::list& words) {
  const auto count = static_cast<py::ssize_t>(words.size());
  if (count % 2 != 0) throw py::value_error("more_grads: an address and a type for each");
  std::vector<Gradient> gradients = {{first, grad_type}};
  for (py::ssize_t at = 0; at < count; at += 2) {
    gradients.push_back({address_at(words, at), static_cast<int>(word_at(words, at + 1))});
  }
  for (const Gradient& gradient : gradients) check_grad_type(gradient.type);
  return gradients;
}

// What is copied first: source, target, bytes per block of elements and bytes of each.
std::vector<Copy> read_copies(const py::list& words, const Span& span) {
  const auto count = static_cast<py::ssize_t>(words.size());
  if (count % 4 != 0) throw py::value_error("copies: four numbers for each");
  std::vector<Copy> copies(static_cast<std::size_t>(count / 4));
  py::ssize_t at = 0;
  for (Copy& copy : copies) {
    copy.from = address_at(words, at++);
    copy.to = address_at(words, at++);
    copy.block_bytes = static_cast<std::int64_t>(word_at(words, at++));
    copy.num_bytes = static_cast<std::int64_t>(word_at(words, at++));
    copy.is_read = copy.to == span.master || copy.to == span.out;
    for (const char* state : span.state) copy.is_read = copy.is_read || copy.to == state;
  }
  return copies;
}

// What the update functions below have in common; `scalars` is the struct of the rule.
template <class Scalars>
void run_rule(const KernelTable& kernels, const RuleTable& table, int grad_type, int out_type,
              std::vector<Item> items, const Scalars& rule_scalars, int num_threads,
              const py::list& more_grads, const py::list& copied) {
  check_grad_type(grad_type);
  if (out_type < 0 || out_type >= kNumOutTypes || table.by_type[grad_type][out_type] == nullptr) {
    throw py::value_error("out_type: no such element type");
  }
  const bool is_one = more_grads.empty();
  if (items.size() != 1 && !(is_one && copied.empty())) {
    throw py::value_error("more_grads and copies: with one item alone");
  }
  RangeFunction function = table.by_type[is_one ? grad_type : kFloat32][out_type];
  const void* scalars = &rule_scalars;
  const auto copies = copied.empty() ? std::vector<Copy>() : read_copies(copied, items[0].span);
  const CopyingUpdate copying{function, scalars, &copies, kernels.copy};
  if (!copies.empty()) {
    function = copy_and_update;
    scalars = &copying;
  }
  if (is_one) {
    const py::gil_scoped_release released;
    run_items(function, items, scalars, num_threads);
    return;
  }
  const auto gradients = read_gradients(items[0].span.grad, grad_type, more_grads);
  const py::gil_scoped_release released;
  run_summed(kernels, function, items[0], gradients, scalars, num_threads);
}

// Numbers of a list, one after another, rounded to fp32.
class Numbers {
 public:
  Numbers(const std::vector<double>& values, std::size_t count) : next_(values.data()) {
    if (values.size() != count) throw py::value_error("scalars: too few or too many numbers");
  }
  float next() { return static_cast<float>(*next_++); }

 private:
  const double* next_;
};

void adam(int isa, int grad_type, int out_type, const py::list& words,
          const std::vector<double>& scalars, int num_threads, const py::list& more_grads,
          const py::list& copies) {
  Numbers numbers(scalars, 9);
  AdamScalars s;
  s.grad_scale = numbers.next();
  s.decay = numbers.next();
  s.l2 = numbers.next();
  // Interpolate from the nearer end, as torch.lerp does.
  const float weight = numbers.next();
  s.lerp_from_grad = !(std::fabs(weight) < 0.5f);
  s.lerp_coefficient = s.lerp_from_grad ? weight - 1.0f : weight;
  s.beta2 = numbers.next();
  s.one_minus_beta2 = numbers.next();
  s.bias_correction2_sqrt = numbers.next();
  s.eps = numbers.next();
  s.neg_step_size = numbers.next();
  const KernelTable& table = table_of(isa);
  run_rule(table, table.adam, grad_type, out_type, read_items(words, 2, false), s, num_threads,
           more_grads, copies);
}

CompactAdamScalars make_compact_scalars(const std::vector<double>& scalars, std::uint64_t key) {
  Numbers numbers(scalars, 9);
  CompactAdamScalars s;
  s.grad_scale = numbers.next();
  s.decay = numbers.next();
  s.l2 = numbers.next();
  s.beta1 = numbers.next();
  s.one_minus_beta1 = numbers.next();
  s.beta2 = numbers.next();
  s.one_minus_beta2_sqrt = numbers.next();
  s.denominator_scale = numbers.next();
  s.denominator_offset = numbers.next();
  s.key[0] = static_cast<std::uint32_t>(key);
  s.key[1] = static_cast<std::uint32_t>(key >> 32);
  return s;
}

void adam_int8(int isa, int grad_type, int out_type, const py::list& words,
               const std::vector<double>& scalars, int num_threads, const py::list& more_grads,
               const py::list& copies) {
  const CompactAdamScalars s = make_compact_scalars(scalars, 0);
  const KernelTable& table = table_of(isa);
  run_rule(table, table.adam_int8, grad_type, out_type, read_items(words, 4, false), s, num_threads,
           more_grads, copies);
}

void adam_bfloat16(int isa, int grad_type, int out_type, const py::list& words,
                   const std::vector<double>& scalars, std::uint64_t key, int num_threads,
                   const py::list& more_grads, const py::list& copies) {
  const CompactAdamScalars s = make_compact_scalars(scalars, key);
  const KernelTable& table = table_of(isa);
  run_rule(table, table.adam_bfloat16, grad_type, out_type, read_items(words, 2, true), s,
           num_threads, more_grads, copies);
}

void adagrad(int isa, int grad_type, int out_type, const py::list& words,
             const std::vector<double>& scalars, int num_threads, const py::list& more_grads,
             const py::list& copies) {
  Numbers numbers(scalars, 4);
  AdagradScalars s;
  s.grad_scale = numbers.next();
  s.l2 = numbers.next();
  s.eps = numbers.next();
  s.neg_step_size = numbers.next();
  const KernelTable& table = table_of(isa);
  run_rule(table, table.adagrad, grad_type, out_type, read_items(words, 1, false), s, num_threads,
           more_grads, copies);
}

void lion(int isa, int grad_type, int out_type, const py::list& words,
          const std::vector<double>& scalars, int num_threads, const py::list& more_grads,
          const py::list& copies) {
  Numbers numbers(scalars, 7);
  LionScalars s;
  s.grad_scale = numbers.next();
  s.decay = numbers.next();
  s.beta1 = numbers.next();
  s.one_minus_beta1 = numbers.next();
  s.beta2 = numbers.next();
  s.one_minus_beta2 = numbers.next();
  s.neg_lr = numbers.next();
  const KernelTable& table = table_of(isa);
  run_rule(table, table.lion, grad_type, out_type, read_items(words, 1, false), s, num_threads,
           more_grads, copies);
}

void sgd(int isa, int grad_type, int out_type, const py::list& words,
         const std::vector<double>& scalars, bool has_momentum, bool is_nesterov, int num_threads,
         const py::list& more_grads, const py::list& copies) {
  Numbers numbers(scalars, 6);
  SgdScalars s;
  s.grad_scale = numbers.next();
  s.l2 = numbers.next();
  s.momentum = numbers.next();
  s.buffer_decay = numbers.next();
  s.grad_weight = numbers.next();
  s.neg_lr = numbers.next();
  s.is_nesterov = is_nesterov;
  const KernelTable& table = table_of(isa);
  run_rule(table, has_momentum ? table.sgd : table.sgd_plain, grad_type, out_type,
           read_items(words, has_momentum ? 1 : 0, false), s, num_threads, more_grads, copies);
}

double sum_of_squares(int isa, int grad_type, std::uint64_t address, std::int64_t numel,
                      int num_threads, const py::list& more_grads) {
  const KernelTable& table = table_of(isa);
  const char* const grad = reinterpret_cast<const char*>(static_cast<std::uintptr_t>(address));
  const auto gradients = read_gradients(grad, grad_type, more_grads);
  const py::gil_scoped_release released;
  if (gradients.size() == 1) {
    return run_sum(table.sum_of_squares[grad_type], grad, numel, num_threads);
  }
  return run_sum_of_summed(table, gradients, numel, num_threads);
}

// The step counts of many parameters: as torch calls, they would take longer than the update.
py::list read_numbers(const py::list& addresses) {
  const auto count = static_cast<py::ssize_t>(addresses.size());
  py::list numbers(count);
  for (py::ssize_t at = 0; at < count; ++at) {
    float value;
    std::memcpy(&value, address_at(addresses, at), sizeof value);
    numbers[static_cast<std::size_t>(at)] = py::float_(value);
  }
  return numbers;
}

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
  const auto isa = py::arg("isa"), grad_type = py::arg("grad_type"), out_type = py::arg("out_type"),
             items = py::arg("items"), scalars = py::arg("scalars"),
             num_threads = py::arg("num_threads");
  const auto more_grads = py::arg("more_grads") = py::list();
  const auto copies = py::arg("copies") = py::list();
  m.def("adam", &adam, isa, grad_type, out_type, items, scalars, num_threads, more_grads, copies);
  m.def("adam_int8", &adam_int8, isa, grad_type, out_type, items, scalars, num_threads, more_grads,
        copies);
  m.def("adam_bfloat16", &adam_bfloat16, isa, grad_type, out_type, items, scalars, py::arg("key"),
        num_threads, more_grads, copies);
  m.def("adagrad", &adagrad, isa, grad_type, out_type, items, scalars, num_threads, more_grads,
        copies);
  m.def("lion", &lion, isa, grad_type, out_type, items, scalars, num_threads, more_grads, copies);
  m.def("sgd", &sgd, isa, grad_type, out_type, items, scalars, py::arg("has_momentum"),
        py::arg("is_nesterov"), num_threads, more_grads, copies);
  m.def("sum_of_squares", &sum_of_squares, isa, grad_type, py::arg("address"), py::arg("numel"),
        num_threads, more_grads);
  m.attr("BLOCK_NUMEL") = kBlockNumel;
  m.def("count_up", &count_up, py::arg("addresses"));
  m.def("read_numbers", &read_numbers, py::arg("addresses"));
  m.def("read_dlpack", &read_dlpack, py::arg("capsule"));
}
