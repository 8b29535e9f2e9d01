// Runs every kernel that this build has and this CPU can run, on many lengths, element types,
// update rules and alignments, and compares each with the scalar kernel bit for bit. Needs no
// Python: for processors that are only emulated, and for sanitizers.
//
// Prints one line per instruction set, with a digest of its results, which is the same on every
// processor; the exit status is 1 after a difference.

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
constexpr std::int64_t kGuardBytes = 0;  // the sanitizer watches what lies behind
#else
constexpr std::int64_t kGuardBytes = 64;
#endif
constexpr std::int64_t kCacheLine = 64;
constexpr int kItemBytes[] = {4, 2, 2, 0};
constexpr const char* kTypeNames[] = {"float32", "bfloat16", "float16", "none"};

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

// The bits of an fp32 number: mostly of ordinary size, else special, or next to where rounding to
// 16 bits changes its mind.
std::uint32_t interesting_float(Random& random) {
  static const std::uint32_t kSpecial[] = {0u,          0x80000000u, 1u,          0x80000001u,
                                           0x007fffffu, 0x00800000u, 0x7f7fffffu, 0xff7fffffu,
                                           0x7f800000u, 0xff800000u, 0x7fc00000u, 0x3f800000u};
  static const std::uint32_t kLow[] = {0x0000u, 0x0fffu, 0x1000u, 0x1001u,
                                       0x7fffu, 0x8000u, 0x8001u, 0xffffu};
  const std::uint64_t r = random.next();
  const auto bits = static_cast<std::uint32_t>(r >> 32);
  switch (r & 15u) {
    case 0:
      return kSpecial[bits % 12u];
    case 1:
    case 2:
      return (bits & 0xffff0000u) | kLow[bits & 7u];
    default:
      return (bits & 0x807fffffu) | ((87u + (bits >> 5) % 64u) << 23);
  }
}

// Memory of exactly the given size, `shift` bytes off a cache line.
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

// The bits of element `index`; all NaNs are one, since sign and payload are the CPU's choice.
std::uint32_t bits_at(const Buffer& buffer, int type, std::int64_t index) {
  if (type == kFloat32) {
    std::uint32_t bits;
    std::memcpy(&bits, buffer.data() + index * 4, sizeof bits);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
  }
  std::uint16_t bits;
  std::memcpy(&bits, buffer.data() + index * 2, sizeof bits);
  const unsigned infinity = type == kBFloat16 ? 0x7f80u : 0x7c00u;
  return (bits & 0x7fffu) > infinity ? 0x7fffu : bits;
}

struct Arrays {
  Arrays(std::int64_t count, int grad, int out, std::int64_t shift, Random& random)
      : numel(count),
        grad_type(grad),
        out_type(out),
        buffers{{count * 4, shift},
                {count * kItemBytes[grad], shift},
                {count * 4, shift},
                {count * 4, shift},
                {count * kItemBytes[out], shift}} {
    for (int k = 0; k < 4; ++k) {
      const int bytes = k == 1 ? kItemBytes[grad] : 4;
      for (std::int64_t i = 0; i < count; ++i) {
        std::uint32_t bits = interesting_float(random);
        if (k == 3) bits &= 0x7fffffffu;
        if (bytes == 2) bits = static_cast<std::uint32_t>(random.next() & 0xffffu);
        const auto half = static_cast<std::uint16_t>(bits);
        const void* from = bytes == 2 ? static_cast<const void*>(&half) : &bits;
        std::memcpy(buffers[k].data() + i * bytes, from, static_cast<std::size_t>(bytes));
      }
    }
  }

  Span span() const {
    return {buffers[0].data(),
            buffers[1].data(),
            {buffers[2].data(), buffers[3].data()},
            out_type == kNone ? nullptr : buffers[4].data()};
  }

  int type_of(int buffer) const {
    if (buffer == 1) return grad_type;
    return buffer == 4 ? out_type : static_cast<int>(kFloat32);
  }

  std::int64_t numel;
  int grad_type;
  int out_type;
  Buffer buffers[5];  // master, grad, exp_avg, exp_avg_sq, out
};

const char* const kBufferNames[] = {"master", "grad", "exp_avg", "exp_avg_sq", "out"};

void report(const char* isa, const Arrays& arrays, const char* what, std::int64_t index) {
  std::fprintf(stderr, "%s: %s, element %lld of %lld, gradient %s, copy %s\n", isa, what,
               static_cast<long long>(index), static_cast<long long>(arrays.numel),
               kTypeNames[arrays.grad_type], kTypeNames[arrays.out_type]);
}

bool is_same(const char* isa, const Arrays& actual, const Arrays& expected) {
  for (int k = 0; k < 5; ++k) {
    if (!actual.buffers[k].is_guard_intact()) {
      report(isa, actual, "wrote outside its memory", k);
      return false;
    }
    if (actual.type_of(k) == kNone) continue;
    for (std::int64_t i = 0; i < actual.numel; ++i) {
      if (bits_at(actual.buffers[k], actual.type_of(k), i) !=
          bits_at(expected.buffers[k], expected.type_of(k), i)) {
        report(isa, actual, kBufferNames[k], i);
        return false;
      }
    }
  }
  return true;
}

// FNV-1a over the canonical bits.
void digest(std::uint64_t& hash, const Arrays& arrays) {
  for (int k = 0; k < 5; ++k) {
    if (arrays.type_of(k) == kNone) continue;
    for (std::int64_t i = 0; i < arrays.numel; ++i) {
      hash = (hash ^ bits_at(arrays.buffers[k], arrays.type_of(k), i)) * 0x100000001b3u;
    }
  }
}

// Steps of ordinary size, and one that changes nothing, so that every master value is rounded.
AdamScalars scalars_of(int variant) {
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
  return s;
}

struct Outcome {
  std::uint64_t hash = 0xcbf29ce484222325u;
  long long num_cases = 0;
  long long num_wrong = 0;
};

void check_one(const KernelTable& table, const Arrays& fresh, int variant, bool is_streaming,
               Outcome& outcome) {
  const AdamScalars scalars = scalars_of(variant);
  const auto run = [&](const KernelTable& with, const Arrays& on, bool streaming) {
    with.adam.by_type[on.grad_type][on.out_type](on.span(), 0, on.numel, &scalars, streaming);
  };
  const Arrays expected = fresh;
  const Arrays actual = fresh;
  run(kScalarTable, expected, false);
  run(table, actual, is_streaming);
  ++outcome.num_cases;
  if (!is_same(table.name, actual, expected)) ++outcome.num_wrong;
  digest(outcome.hash, actual);
}

void check_every_case(const KernelTable& table, Outcome& outcome) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t numel = 0; numel <= 50; ++numel) lengths.push_back(numel);
  for (const std::int64_t numel : {63, 64, 65, 1000, 4099}) lengths.push_back(numel);
  Random random(1);
  for (const std::int64_t numel : lengths) {
    for (int grad = 0; grad < kNumGradTypes; ++grad) {
      for (int out = 0; out < kNumOutTypes; ++out) {
        for (const std::int64_t shift : {0, 1, 4}) {
          const Arrays fresh(numel, grad, out, shift, random);
          for (int variant = 0; variant < 8; ++variant) {
            check_one(table, fresh, variant, false, outcome);
          }
          check_one(table, fresh, 0, true, outcome);
        }
      }
    }
  }
}

// Several tensors in one call, cut into grains for three threads.
void check_threads(const KernelTable& table, Outcome& outcome) {
  Random random(2);
  const AdamScalars scalars = scalars_of(0);
  std::vector<Arrays> actual, expected;
  for (const std::int64_t numel : {70001, 0, 5, 33000, 64}) {
    actual.emplace_back(numel, kBFloat16, kFloat16, 0, random);
    expected.push_back(actual.back());
  }
  const auto items_of = [](const std::vector<Arrays>& all) {
    std::vector<Item> items;
    for (const Arrays& arrays : all) items.push_back({arrays.span(), arrays.numel});
    return items;
  };
  std::vector<Item> actual_items = items_of(actual), expected_items = items_of(expected);
  run_items(kScalarTable.adam.by_type[kBFloat16][kFloat16], expected_items, &scalars, 1);
  run_items(table.adam.by_type[kBFloat16][kFloat16], actual_items, &scalars, 3);
  for (std::size_t k = 0; k < actual.size(); ++k) {
    ++outcome.num_cases;
    if (!is_same(table.name, actual[k], expected[k])) ++outcome.num_wrong;
    digest(outcome.hash, actual[k]);
  }
}

}  // namespace

int main() {
  long long num_wrong = 0;
  for (const KernelTable* table : available_tables()) {
    Outcome outcome;
    check_every_case(*table, outcome);
    check_threads(*table, outcome);
    std::printf("%s cases=%lld wrong=%lld digest=%016llx\n", table->name, outcome.num_cases,
                outcome.num_wrong, static_cast<unsigned long long>(outcome.hash));
    num_wrong += outcome.num_wrong;
  }
  return num_wrong == 0 ? 0 : 1;
}
