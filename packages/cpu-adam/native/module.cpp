// Python binding of the kernels. Functions take addresses and numbers, which the package's Python
// code has checked (see _memory.py). All other C++ files are independent of Python.

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

// Reads items: master, grad, `num_states` states, out, numel, and with `has_stream` the stream.
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

// Reads gradients. `words` has address and type of each further gradient.
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

// Reads copies: source, target, bytes per block of elements, and total bytes.
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

// Runs the rule of `table`. `scalars` is the rule's struct.
void run_rule(const KernelTable& kernels, const RuleTable& table, int grad_type, int out_type,
              std::vector<Item> items, const void* scalars, int num_threads,
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

// Reader of a call's scalars, one after another.
class Numbers {
 public:
  explicit Numbers(const std::vector<double>& values) : values_(values) {}
  float next() { return static_cast<float>(next_double()); }
  std::uint32_t next_word() { return static_cast<std::uint32_t>(next_double()); }
  bool is_at_end() const { return at_ == values_.size(); }

 private:
  double next_double() {
    if (is_at_end()) throw py::value_error("scalars: too few numbers");
    return values_[at_++];
  }

  const std::vector<double>& values_;
  std::size_t at_ = 0;
};

// Scalars are in the order of the rule's struct. C++ evaluates a braced list in that order.

void read_scalars(Numbers& from, AdamScalars& s) {
  s.grad_scale = from.next();
  s.decay = from.next();
  s.l2 = from.next();
  // Interpolate from the nearer end, as torch.lerp does.
  const float weight = from.next();
  s.lerp_from_grad = !(std::fabs(weight) < 0.5f);
  s.lerp_coefficient = s.lerp_from_grad ? weight - 1.0f : weight;
  s.beta2 = from.next();
  s.one_minus_beta2 = from.next();
  s.bias_correction2_sqrt = from.next();
  s.eps = from.next();
  s.neg_step_size = from.next();
}

void read_scalars(Numbers& from, CompactAdamScalars& s) {
  s = {from.next(), from.next(), from.next(), from.next(), from.next(),
       from.next(), from.next(), from.next(), from.next(), {from.next_word(), from.next_word()}};
}

void read_scalars(Numbers& from, AdagradScalars& s) {
  s = {from.next(), from.next(), from.next(), from.next()};
}

void read_scalars(Numbers& from, LionScalars& s) {
  s = {from.next(), from.next(), from.next(), from.next(), from.next(), from.next(), from.next()};
}

void read_scalars(Numbers& from, SgdScalars& s) {
  s = {from.next(), from.next(), from.next(),        from.next(),
       from.next(), from.next(), from.next() != 0.0f};
}

// Defines the Python function of `rule`. Items have `num_states` states, and a stream if the rule
// draws random numbers.
template <class Scalars>
void define_update(py::module_& m, const char* name, RuleTable KernelTable::* rule, int num_states,
                   bool has_stream = false) {
  m.def(
      name,
      [rule, num_states, has_stream](int isa, int grad_type, int out_type, const py::list& items,
                                     const std::vector<double>& scalars, int num_threads,
                                     const py::list& more_grads, const py::list& copies) {
        Numbers numbers(scalars);
        Scalars s;
        read_scalars(numbers, s);
        if (!numbers.is_at_end()) throw py::value_error("scalars: too many numbers");
        const KernelTable& table = table_of(isa);
        run_rule(table, table.*rule, grad_type, out_type, read_items(items, num_states, has_stream),
                 &s, num_threads, more_grads, copies);
      },
      py::arg("isa"), py::arg("grad_type"), py::arg("out_type"), py::arg("items"),
      py::arg("scalars"), py::arg("num_threads"), py::arg("more_grads") = py::list(),
      py::arg("copies") = py::list());
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

// Reads the fp32 number at each address. Torch calls for many parameters' step counts would take
// longer than the update.
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
  define_update<AdamScalars>(m, "adam", &KernelTable::adam, 2);
  define_update<CompactAdamScalars>(m, "adam_int8", &KernelTable::adam_int8, 4);
  define_update<CompactAdamScalars>(m, "adam_bfloat16", &KernelTable::adam_bfloat16, 2, true);
  define_update<AdagradScalars>(m, "adagrad", &KernelTable::adagrad, 1);
  define_update<LionScalars>(m, "lion", &KernelTable::lion, 1);
  define_update<SgdScalars>(m, "sgd", &KernelTable::sgd, 1);
  define_update<SgdScalars>(m, "sgd_plain", &KernelTable::sgd_plain, 0);
  m.def("sum_of_squares", &sum_of_squares, py::arg("isa"), py::arg("grad_type"), py::arg("address"),
        py::arg("numel"), py::arg("num_threads"), py::arg("more_grads") = py::list());
  m.attr("BLOCK_NUMEL") = kBlockNumel;
  m.def("count_up", &count_up, py::arg("addresses"));
  m.def("read_numbers", &read_numbers, py::arg("addresses"));
  m.def("read_dlpack", &read_dlpack, py::arg("capsule"));
}
