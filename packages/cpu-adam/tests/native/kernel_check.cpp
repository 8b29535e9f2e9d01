// Compares every kernel of this build that the CPU supports with the scalar kernel, bit by bit.
// Covers every update rule, element type, tail length and alignment. Needs no Python, so the
// program also runs on emulated processors and with sanitizers.
//
// Prints one line per instruction set with a digest of its results, which must be equal on all
// processors. The exit status is 1 if any result differs.

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <vector>

#include "dispatch.h"
#include "driver.h"

namespace {

using namespace cpu_adam;

#if defined(__SANITIZE_ADDRESS__)
constexpr std::int64_t kGuardBytes = 0;  // the sanitizer detects overruns
#else
constexpr std::int64_t kGuardBytes = 64;
#endif
constexpr std::int64_t kCacheLine = 64;
// Maximum number of elements in a vector.
constexpr std::int64_t kVectorNumel = 32;
constexpr const char* kTypeNames[] = {"float32", "bfloat16", "float16", "none", "split"};

// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  std::uint64_t state_;
};

// Kind of random numbers in a test case. Non-finite numbers invalidate whole blocks of 8-bit
// states, so most cases have none. Blocks of numbers about 2**-100 may be rounded to zero.
enum Mood : int { kOrdinary, kAnything, kTiny };

Mood random_mood(Random& random) {
  switch (random.next() & 3u) {
    case 0:
      return kAnything;
    case 1:
      return kTiny;
    default:
      return kOrdinary;
  }
}

// Returns the bits of a random fp32 number, often near a value where rounding to 16 bits changes.
std::uint32_t float_bits(Random& random, Mood mood) {
  static const std::uint32_t kSpecial[] = {
      0u,          0x80000000u, 1u,          0x80000001u, 0x007fffffu,
      0x00800000u, 0x3f800000u, 0x7f7fffffu, 0xff7fffffu, 0x7f7f7fffu,
      0x7f7f8000u, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x477fefffu,
      0x477ff000u,  // around 65520, which rounds to infinity in fp16
      0x33000000u, 0x33000001u, 0x33c00000u, 0x387fefffu};  // subnormal in fp16
  static const std::uint32_t kLow[] = {0x0000u, 0x0fffu, 0x1000u, 0x1001u,
                                       0x3000u, 0x7fffu, 0x8000u, 0x8001u};
  const std::uint64_t r = random.next();
  auto bits = static_cast<std::uint32_t>(r >> 32);
  if ((r & 7u) == 0) bits = (bits & 0xffff0000u) | kLow[(r >> 3) & 7u];
  if (mood == kAnything) {
    const std::uint64_t kind = (r >> 6) & 15u;
    if (kind == 0) return kSpecial[(r >> 10) % (sizeof kSpecial / sizeof kSpecial[0])];
    if (kind == 1) return bits;
  }
  const auto any = static_cast<std::uint32_t>((r >> 16) & 0xffffu);
  const std::uint32_t exponent = mood == kTiny ? 20u + any % 11u : 87u + any % 64u;
  return (bits & 0x807fffffu) | (exponent << 23);
}

// Element type of a buffer.
enum class Element { kFloat32, kBFloat16, kFloat16, kByte, kRemainder, kNone };

struct Format {
  Element element;
  bool is_negative_too = true;
  // Elements of the tensor per element of this buffer.
  std::int64_t share = 1;

  std::int64_t bytes() const {
    constexpr std::int64_t kBytes[] = {4, 2, 2, 1, 2, 0};
    return kBytes[static_cast<int>(element)];
  }
  std::int64_t count(std::int64_t numel) const { return (numel + share - 1) / share; }
};

constexpr Format kNothing = {Element::kNone};
constexpr Format kWeights = {Element::kFloat32};
constexpr Format kSquares = {Element::kFloat32, false};
constexpr Format kScales = {Element::kFloat32, false, kBlockNumel};
constexpr Format kUpperHalves = {Element::kBFloat16};
constexpr Format kUpperSquares = {Element::kBFloat16, false};
constexpr Format kCodes = {Element::kByte};
constexpr Format kRemainders = {Element::kRemainder};
constexpr Format kFormats[] = {kWeights, kUpperHalves, {Element::kFloat16}, kNothing, kRemainders};

std::uint32_t random_element(Random& random, const Format& format, Mood mood) {
  // Zeros are frequent, so that sometimes both gradient and moment are zero.
  if ((random.next() & 15u) == 0) return 0;
  const std::uint32_t sign_too = format.is_negative_too ? 0xffffffffu : 0x7fffffffu;
  switch (format.element) {
    case Element::kFloat32:
      return float_bits(random, mood) & sign_too;
    case Element::kBFloat16:
      return (float_bits(random, mood) & sign_too) >> 16;
    case Element::kFloat16: {
      // Masks for any, for finite (even exponent), and for subnormal numbers.
      constexpr std::uint64_t kMasks[] = {0xfbffu, 0xffffu, 0x83ffu};
      return static_cast<std::uint32_t>(random.next() & kMasks[mood]);
    }
    case Element::kRemainder: {
      static const std::uint32_t kEdges[] = {0x7fffu, 0x8000u, 0u, 0xffffu};
      const std::uint64_t r = random.next();
      return (r & 7u) == 0 ? kEdges[(r >> 3) & 3u] : static_cast<std::uint32_t>(r >> 48);
    }
    default:
      return static_cast<std::uint32_t>(random.next() & 0xffu);
  }
}

// Memory of exactly the given size, `shift` bytes after a cache line's start.
class Buffer {
 public:
  Buffer(std::int64_t bytes, std::int64_t shift)
      : size_(shift + bytes + kGuardBytes),
        shift_(shift),
        raw_(static_cast<char*>(
            ::operator new[](static_cast<std::size_t>(size_), std::align_val_t(kCacheLine)))) {
    std::memset(raw_, 0x5a, static_cast<std::size_t>(size_));
  }
  Buffer(const Buffer& other) : Buffer(other.size_ - other.shift_ - kGuardBytes, other.shift_) {
    std::memcpy(raw_, other.raw_, static_cast<std::size_t>(size_));
  }
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { ::operator delete[](raw_, std::align_val_t(kCacheLine)); }

  char* data() const { return raw_ + shift_; }

  bool is_guard_intact() const {
    for (std::int64_t i = 0; i < shift_; ++i) {
      if (raw_[i] != 0x5a) return false;
    }
    for (std::int64_t i = size_ - kGuardBytes; i < size_; ++i) {
      if (raw_[i] != 0x5a) return false;
    }
    return true;
  }

 private:
  std::int64_t size_;
  std::int64_t shift_;
  char* raw_;
};

template <class Bits>
Bits read(const char* from) {
  Bits bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

// Returns the bits of an element. All NaNs are equal, because sign and payload depend on the CPU.
std::uint32_t bits_at(const char* from, Element element) {
  switch (element) {
    case Element::kFloat32: {
      const auto bits = read<std::uint32_t>(from);
      return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
    }
    case Element::kBFloat16:
    case Element::kFloat16: {
      const auto bits = read<std::uint16_t>(from);
      const unsigned infinity = element == Element::kBFloat16 ? 0x7f80u : 0x7c00u;
      return (bits & 0x7fffu) > infinity ? 0x7fffu : bits;
    }
    case Element::kRemainder:
      return read<std::uint16_t>(from);
    default:
      return read<std::uint8_t>(from);
  }
}

// An update rule and the scalars to test it with.
struct Rule {
  const char* name;
  RuleTable KernelTable::* table;
  std::vector<Format> states;
  std::vector<const void*> scalars;

  std::int64_t step_numel() const {
    return states.size() == kMaxStates ? kBlockNumel : kVectorNumel;
  }
};

// Memory of one tensor, with random contents.
struct Arrays {
  Arrays(const Rule& rule, int grad, int out, std::int64_t count, std::int64_t shift,
         Random& random)
      : numel(count), grad_type(grad), out_type(out) {
    formats = {out == kSplit ? kUpperHalves : kWeights, kFormats[grad], kFormats[out]};
    formats.insert(formats.end(), rule.states.begin(), rule.states.end());
    buffers.reserve(formats.size());
    const Mood mood = random_mood(random);
    for (const Format& format : formats) {
      const std::int64_t bytes = format.bytes();
      buffers.emplace_back(format.count(count) * bytes, shift);
      for (std::int64_t i = 0; bytes > 0 && i < format.count(count); ++i) {
        write(buffers.back().data() + i * bytes, random_element(random, format, mood), bytes);
      }
    }
  }

  static void write(char* to, std::uint32_t bits, std::int64_t bytes) {
    const auto half = static_cast<std::uint16_t>(bits);
    const auto byte = static_cast<std::uint8_t>(bits);
    const void* from = bytes == 4   ? static_cast<const void*>(&bits)
                       : bytes == 2 ? static_cast<const void*>(&half)
                                    : &byte;
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }

  Span span() const {
    Span span = {};
    span.master = buffers[0].data();
    span.grad = buffers[1].data();
    span.out = out_type == kNone ? nullptr : buffers[2].data();
    for (std::size_t k = 3; k < buffers.size(); ++k) span.state[k - 3] = buffers[k].data();
    span.stream = 5;
    return span;
  }

  // The remainder of a NaN parameter has no meaning.
  std::uint32_t bits(std::size_t buffer, std::int64_t index) const {
    const Format& format = formats[buffer];
    if (format.element == Element::kRemainder && bits(0, index) == 0x7fffu) return 0;
    return bits_at(buffers[buffer].data() + index * format.bytes(), format.element);
  }

  std::int64_t count(std::size_t buffer) const {
    return formats[buffer].element == Element::kNone ? 0 : formats[buffer].count(numel);
  }

  std::int64_t numel;
  int grad_type;
  int out_type;
  std::vector<Format> formats;
  std::vector<Buffer> buffers;  // master, grad, out, states
};

constexpr const char* kBufferNames[] = {"master",  "grad",    "out",    "state 0",
                                        "state 1", "state 2", "state 3"};

struct Outcome {
  std::uint64_t hash = 0xcbf29ce484222325u;
  long long num_cases = 0;
  long long num_wrong = 0;

  // FNV-1a hash.
  void digest(std::uint64_t bits) { hash = (hash ^ bits) * 0x100000001b3u; }
};

bool is_same(const char* isa, const char* rule, const Arrays& actual, const Arrays& expected) {
  const auto report = [&](const char* what, std::size_t buffer, std::int64_t index) {
    std::fprintf(stderr, "%s: %s: %s %s, element %lld of %lld, gradient %s, copy %s\n", isa, rule,
                 kBufferNames[buffer], what, static_cast<long long>(index),
                 static_cast<long long>(actual.numel), kTypeNames[actual.grad_type],
                 kTypeNames[actual.out_type]);
    return false;
  };
  for (std::size_t k = 0; k < actual.buffers.size(); ++k) {
    if (!actual.buffers[k].is_guard_intact()) return report("written outside its memory", k, 0);
    for (std::int64_t i = 0; i < actual.count(k); ++i) {
      if (actual.bits(k, i) != expected.bits(k, i)) return report("differs", k, i);
    }
  }
  return true;
}

void compare(const char* isa, const char* rule, const Arrays& actual, const Arrays& expected,
             Outcome& outcome) {
  ++outcome.num_cases;
  if (!is_same(isa, rule, actual, expected)) ++outcome.num_wrong;
  for (std::size_t k = 0; k < actual.buffers.size(); ++k) {
    for (std::int64_t i = 0; i < actual.count(k); ++i) outcome.digest(actual.bits(k, i));
  }
}

template <class Scalars>
std::vector<const void*> pointers_to(const std::vector<Scalars>& all) {
  std::vector<const void*> pointers;
  for (const Scalars& scalars : all) pointers.push_back(&scalars);
  return pointers;
}

// Returns scalars of ordinary steps, and of steps that change nothing, so that every master value
// is rounded.
std::vector<AdamScalars> adam_scalars() {
  std::vector<AdamScalars> all;
  for (int variant = 0; variant < 8; ++variant) {
    const bool is_l2 = (variant & 1) != 0;
    const bool is_from_grad = (variant & 2) != 0;
    const bool is_still = (variant & 4) != 0;
    AdamScalars s;
    s.grad_scale = is_still ? 1.0f : 0.37f;
    s.decay = is_l2 || is_still ? 1.0f : 0.99f;
    s.l2 = is_l2 ? 0.01f : 0.0f;
    s.lerp_coefficient = is_from_grad ? -0.25f : 0.1f;
    s.lerp_from_grad = is_from_grad;
    s.beta2 = 0.999f;
    s.one_minus_beta2 = 0.001f;
    s.bias_correction2_sqrt = 0.75f;
    s.eps = 1e-8f;
    s.neg_step_size = is_still ? -0.0f : -1e-3f;
    all.push_back(s);
  }
  return all;
}

const std::vector<Rule>& rules() {
  static const std::vector<AdamScalars> adam = adam_scalars();
  static const std::vector<CompactAdamScalars> compact = {
      {0.37f, 0.99f, 0.0f, 0.9f, 0.1f, 0.999f, 0.0316f, -1250.0f, -1e-5f, {7u, 11u}},
      {0.7f, 1.0f, 0.01f, 0.0f, 1.0f, 0.9f, 0.316f, -3.0f, -1e-8f, {0xfffffff9u, 13u}},
      {1.0f, 1.0f, 0.0f, 0.9f, 0.1f, 0.999f, 0.0316f, 0.0f, -HUGE_VALF, {0u, 0xffffffffu}}};
  static const std::vector<AdagradScalars> adagrad = {{0.37f, 0.01f, 1e-10f, -0.01f},
                                                      {1.0f, 0.0f, 1e-10f, -0.0f}};
  static const std::vector<LionScalars> lion = {{0.37f, 0.99f, 0.9f, 0.1f, 0.99f, 0.01f, -1e-3f},
                                                {1.0f, 1.0f, 0.9f, 0.1f, 0.99f, 0.01f, -0.0f}};
  static const std::vector<SgdScalars> sgd = {{0.37f, 0.01f, 0.9f, 0.9f, 0.8f, -0.1f, false},
                                              {1.0f, 0.0f, 0.9f, 0.9f, 1.0f, -0.1f, true},
                                              {1.0f, 0.0f, 0.9f, 0.0f, 1.0f, -0.0f, false}};
  static const std::vector<Rule> all = {
      {"adam", &KernelTable::adam, {kWeights, kSquares}, pointers_to(adam)},
      {"adam_int8",
       &KernelTable::adam_int8,
       {kCodes, kCodes, kScales, kScales},
       pointers_to(compact)},
      {"adam_bfloat16",
       &KernelTable::adam_bfloat16,
       {kUpperHalves, kUpperSquares},
       pointers_to(compact)},
      {"adagrad", &KernelTable::adagrad, {kSquares}, pointers_to(adagrad)},
      {"lion", &KernelTable::lion, {kWeights}, pointers_to(lion)},
      {"sgd", &KernelTable::sgd, {kWeights}, pointers_to(sgd)},
      {"sgd_plain", &KernelTable::sgd_plain, {}, pointers_to(sgd)},
  };
  return all;
}

void check_one(const KernelTable& table, const Rule& rule, const Arrays& fresh, const void* scalars,
               bool is_streaming, Outcome& outcome) {
  const auto run = [&](const KernelTable& with, const Arrays& on, bool streaming) {
    const RangeFunction function = (with.*rule.table).by_type[on.grad_type][on.out_type];
    function(on.span(), 0, on.numel, scalars, streaming);
  };
  const Arrays expected = fresh;
  const Arrays actual = fresh;
  run(kScalarTable, expected, false);
  run(table, actual, is_streaming);
  compare(table.name, rule.name, actual, expected, outcome);
}

// Tests short arrays with every tail length. Longer arrays are not needed, because results do not
// depend on the position.
void check_every_case(const KernelTable& table, const Rule& rule, Outcome& outcome) {
  std::vector<std::int64_t> lengths;
  const std::int64_t step = rule.step_numel();
  for (std::int64_t numel = 0; numel <= step + 1; ++numel) lengths.push_back(numel);
  for (const std::int64_t extra : {0, 1, 7, 8, 9, 15}) lengths.push_back(2 * step + extra);
  lengths.push_back(515);
  Random random(1);
  for (const std::int64_t numel : lengths) {
    for (int grad = 0; grad < kNumGradTypes; ++grad) {
      for (int out = 0; out < kNumOutTypes; ++out) {
        const bool is_absent = (kScalarTable.*rule.table).by_type[grad][out] == nullptr;
        if (((table.*rule.table).by_type[grad][out] == nullptr) != is_absent) {
          std::fprintf(stderr, "%s: %s: gradient %s, copy %s is in one table alone\n", table.name,
                       rule.name, kTypeNames[grad], kTypeNames[out]);
          ++outcome.num_wrong;
          continue;
        }
        if (is_absent) continue;
        for (const std::int64_t shift : {0, 1, 4}) {
          const Arrays fresh(rule, grad, out, numel, shift, random);
          for (const void* scalars : rule.scalars) {
            check_one(table, rule, fresh, scalars, false, outcome);
          }
          check_one(table, rule, fresh, rule.scalars[0], true, outcome);
        }
      }
    }
  }
}

// Kernels use the caller's rounding mode, except for fp16 copies, which x86 rounds to nearest.
void check_rounding_modes(const KernelTable& table, const Rule& rule, Outcome& outcome) {
  Random random(3);
  for (const int mode : {FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO}) {
    for (const int out : {kNone, kBFloat16, kSplit}) {
      if ((kScalarTable.*rule.table).by_type[kFloat32][out] == nullptr) continue;
      for (int repeat = 0; repeat < 8; ++repeat) {
        const Arrays fresh(rule, kFloat32, out, 2 * kBlockNumel, 0, random);
        std::fesetround(mode);
        check_one(table, rule, fresh, rule.scalars[0], false, outcome);
        std::fesetround(FE_TONEAREST);
      }
    }
  }
}

// Tests several tensors in one call, split into grains for three threads.
void check_threads(const KernelTable& table, const Rule& rule, Outcome& outcome) {
  Random random(2);
  const bool has_split = (kScalarTable.*rule.table).by_type[kBFloat16][kSplit] != nullptr;
  const int out = has_split ? kSplit : kFloat16;
  std::vector<Arrays> actual, expected;
  for (const std::int64_t numel : {40001, 0, 5, 25000, 64}) {
    actual.emplace_back(rule, kBFloat16, out, numel, 0, random);
    expected.push_back(actual.back());
  }
  const auto run = [&](const KernelTable& with, const std::vector<Arrays>& all, int num_threads) {
    std::vector<Item> items;
    for (const Arrays& arrays : all) items.push_back({arrays.span(), arrays.numel});
    run_items((with.*rule.table).by_type[kBFloat16][out], items, rule.scalars[0], num_threads);
  };
  run(kScalarTable, expected, 1);
  run(table, actual, 3);
  for (std::size_t k = 0; k < actual.size(); ++k) {
    compare(table.name, rule.name, actual[k], expected[k], outcome);
  }
}

// Returns the fp32 sum of gradients of different types, added by the scalar kernel.
std::vector<float> plain_sum(const std::vector<Gradient>& gradients, std::int64_t numel) {
  std::vector<float> sum(static_cast<std::size_t>(numel) + 1);
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    const AddFunction add = kScalarTable.add_gradient[gradients[k].type];
    add(sum.data(), gradients[k].address, numel, k == 0);
  }
  return sum;
}

// Several gradients must give the result of their sum, for every tail length and on threads.
void check_summed(const KernelTable& table, const Rule& rule, Outcome& outcome) {
  Random random(5);
  const bool has_split = (kScalarTable.*rule.table).by_type[kFloat32][kSplit] != nullptr;
  const int out = has_split ? kSplit : kFloat16;
  std::vector<std::int64_t> lengths = {0, 1, kVectorNumel - 1, kVectorNumel + 5, 4100, 40001};
  const Rule nothing = {"gradient", nullptr, {}, {}};
  for (const std::int64_t numel : lengths) {
    for (std::size_t count = 2; count <= 5; ++count) {
      std::vector<Arrays> terms;
      std::vector<Gradient> gradients;
      terms.reserve(count);
      for (std::size_t k = 0; k < count; ++k) {
        const int type = static_cast<int>((k + count) % kNumGradTypes);
        terms.emplace_back(nothing, type, kNone, numel, static_cast<std::int64_t>(k), random);
        gradients.push_back({terms.back().buffers[1].data(), type});
      }
      const Arrays fresh(rule, kFloat32, out, numel, 0, random);
      const Arrays expected = fresh;
      const Arrays actual = fresh;
      const std::vector<float> sum = plain_sum(gradients, numel);
      Span span = expected.span();
      span.grad = reinterpret_cast<const char*>(sum.data());
      (kScalarTable.*rule.table).by_type[kFloat32][out](span, 0, numel, rule.scalars[0], false);
      const RangeFunction function = (table.*rule.table).by_type[kFloat32][out];
      run_summed(table, function, {actual.span(), numel}, gradients, rule.scalars[0], 3);
      compare(table.name, rule.name, actual, expected, outcome);
      const double norm = run_sum(kScalarTable.sum_of_squares[kFloat32], span.grad, numel, 1);
      const double summed = run_sum_of_summed(table, gradients, numel, 3);
      if (norm == norm ? norm != summed : summed == summed) {
        std::fprintf(stderr, "%s: sum of squares of %zu gradients: %a, not %a\n", table.name, count,
                     summed, norm);
        ++outcome.num_wrong;
      }
    }
  }
}

void check_sums(const KernelTable& table, Outcome& outcome) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t numel = 0; numel <= 2 * kVectorNumel + 1; ++numel) lengths.push_back(numel);
  for (const std::int64_t numel : {1003, 40001}) lengths.push_back(numel);
  const Rule nothing = {"sum_of_squares", nullptr, {}, {}};
  Random random(4);
  for (const std::int64_t numel : lengths) {
    for (int grad = 0; grad < kNumGradTypes; ++grad) {
      for (const std::int64_t shift : {0, 1, 4, 16}) {
        const Arrays arrays(nothing, grad, kNone, numel, shift, random);
        const char* const data = arrays.buffers[1].data();
        const double expected = run_sum(kScalarTable.sum_of_squares[grad], data, numel, 1);
        const double actual = run_sum(table.sum_of_squares[grad], data, numel, 3);
        const bool is_nan = expected != expected;
        ++outcome.num_cases;
        if (is_nan ? actual == actual : std::memcmp(&actual, &expected, sizeof actual) != 0) {
          std::fprintf(stderr, "%s: sum_of_squares: %a, not %a, of %lld, gradient %s\n", table.name,
                       actual, expected, static_cast<long long>(numel), kTypeNames[grad]);
          ++outcome.num_wrong;
        }
        std::uint64_t bits;
        std::memcpy(&bits, &actual, sizeof bits);
        outcome.digest(is_nan ? 0x7ff8000000000000u : bits);
      }
    }
  }
}

}  // namespace

int main() {
  long long num_wrong = 0;
  for (const KernelTable* table : available_tables()) {
    Outcome outcome;
    for (const Rule& rule : rules()) {
      check_every_case(*table, rule, outcome);
      check_threads(*table, rule, outcome);
      check_rounding_modes(*table, rule, outcome);
      check_summed(*table, rule, outcome);
    }
    check_sums(*table, outcome);
    std::printf("%s cases=%lld wrong=%lld digest=%016llx\n", table->name, outcome.num_cases,
                outcome.num_wrong, static_cast<unsigned long long>(outcome.hash));
    num_wrong += outcome.num_wrong;
  }
  return num_wrong == 0 ? 0 : 1;
}
