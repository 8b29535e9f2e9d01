// The kernels in terms of primitives. Each isa_*.cpp defines the primitives and includes this file
// within an unnamed namespace, so that every function below has internal linkage.
//
// [Note: what an isa_*.cpp defines]
// kLanes             elements in a vector
// kVectorsAtOnce     vectors that the loops of update_vectors process together
// Vec                a vector of kLanes floats
// set1, add, sub, mul, div, sqrt_, fma_, nfma   elementwise on Vec; fma_(a, b, c) rounds a * b + c
//                    once, nfma(a, b, c) rounds c - a * b once
// copy_sign(x, y)    the magnitude of x with the sign of y
// F32, BF16, F16     one struct per element type: kBytes, load(const char*), store(char*, Vec), and
//                    stream(char*, Vec), a non-temporal store, if kStreamBytes is not 0
// kStreamBytes       the alignment that `stream` needs, or 0
// stream_fence       orders non-temporal stores before later stores
// UInt               a vector of kLanes 32-bit integers
// as_bits, as_float  reinterpret Vec as UInt and back
// to_float, to_int   convert signed integers to Vec and back; to_int rounds in the caller's mode
// uset1, uadd, usub, umul, uand, uor, uxor, ushl<n>, ushr<n>   elementwise, modulo 2**32
// umax, reduce_umax  unsigned maximum: elementwise, and of all lanes as one number
// igreater           compares signed integers: all ones or zero
// is_ordered         all ones where a float is not NaN, otherwise zero
// if_ordered(test, a, b)   a where the float `test` is not NaN, otherwise b; of Vec and of UInt
// if_nonzero(test, a, b)   a where the float with bits `test` is not zero, otherwise b; of UInt
// lanes              0, 1, 2, ...
// load_u8, load_i8, load_i16, load_upper_16   load_upper_16 fills upper halves, with zeros below
// store_8, store_16  store the low 8 or 16 bits of each lane
// store_upper_16     stores the upper 16 bits of each lane
// Doubles            min(kLanes, 16) doubles: zero_doubles, store_doubles, add_square(sum, Vec),
//                    which adds the squares of the first sixteen lanes first
//
// [Note: one result for one element]
// Every primitive is correctly rounded (IEEE 754), the compiler may not contract operations, and
// the last elements run through the same vector code in a padded copy. Results therefore do not
// depend on instruction set, position in the array, or thread count.

#include "memory.inl"
#include "rules.inl"

#include "ranges.inl"

#include "blocks.inl"

// [Note: one sum for all]
// Each of sixteen double-precision sums adds every sixteenth element, and the sums are then added
// in pairs. The order is therefore equal for every vector length. The square of an fp32 number is
// exact in double precision, and a sum of fewer than 2**700 squares does not overflow. The sum is
// thus finite if and only if every element is finite.
template <class Grad>
double sum_of_squares(const char* grad, std::int64_t begin, std::int64_t end) {
  constexpr int kSums = kLanes < 16 ? 16 / kLanes : 1;
  constexpr int kStride = kSums * kLanes;
  Doubles sums[kSums];
  for (int k = 0; k < kSums; ++k) sums[k] = zero_doubles();
  std::int64_t i = begin;
  for (; i + kStride <= end; i += kStride) {
    for (int k = 0; k < kSums; ++k) {
      sums[k] = add_square(sums[k], Grad::load(grad + (i + k * kLanes) * Grad::kBytes));
    }
  }
  if (i < end) {
    char padded[kStride * Grad::kBytes] = {};
    copy_bytes(padded, grad + i * Grad::kBytes, (end - i) * Grad::kBytes);
    for (int k = 0; k < kSums; ++k) {
      sums[k] = add_square(sums[k], Grad::load(padded + k * kLanes * Grad::kBytes));
    }
  }
  double lane[16];
  for (int k = 0; k < kSums; ++k) store_doubles(lane + k * kLanes, sums[k]);
  for (int half = 8; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) lane[k] += lane[k + half];
  }
  return lane[0];
}

// Adds one of several gradients. See [Note: several gradients] in driver.h.
template <class Grad>
void add_gradient(float* sum, const char* grad, std::int64_t numel, bool is_first) {
  char* const to = reinterpret_cast<char*>(sum);
  std::int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    const Vec term = Grad::load(grad + i * Grad::kBytes);
    F32::store(to + i * 4, is_first ? term : add(F32::load(to + i * 4), term));
  }
  if (i < numel) {
    char padded[kLanes * Grad::kBytes] = {};
    char padded_sum[kLanes * 4] = {};
    copy_bytes(padded, grad + i * Grad::kBytes, (numel - i) * Grad::kBytes);
    copy_bytes(padded_sum, to + i * 4, (numel - i) * 4);
    const Vec term = Grad::load(padded);
    F32::store(padded_sum, is_first ? term : add(F32::load(padded_sum), term));
    copy_bytes(to + i * 4, padded_sum, (numel - i) * 4);
  }
}

// Copies with non-temporal stores, except unaligned bytes at the ends.
template <class Float>
void copy_past_caches(char* to, const char* from, std::int64_t num_bytes) {
  std::int64_t i = 0;
  if constexpr (kStreamBytes > 0) {
    constexpr std::int64_t kStride = kLanes * Float::kBytes;
    const auto misaligned = reinterpret_cast<std::uintptr_t>(to) % kStreamBytes;
    if (misaligned != 0) i = static_cast<std::int64_t>(kStreamBytes - misaligned);
    if (i > num_bytes) i = num_bytes;
    std::memcpy(to, from, static_cast<std::size_t>(i));
    for (; i + kStride <= num_bytes; i += kStride) Float::stream(to + i, Float::load(from + i));
    stream_fence();
  }
  std::memcpy(to + i, from + i, static_cast<std::size_t>(num_bytes - i));
}

// Initializes a RuleTable with `function` for each DType. `split` is the variant for a split
// master.
#define CPU_ADAM_BY_OUT(function, grad, split)                                          \
  {function<grad, Whole<F32>>, function<grad, Whole<BF16>>, function<grad, Whole<F16>>, \
   function<grad, Whole<NoOut>>, split}
#define CPU_ADAM_RULE_TABLE(function)                                                    \
  {                                                                                      \
    {                                                                                    \
      CPU_ADAM_BY_OUT(function, F32, nullptr), CPU_ADAM_BY_OUT(function, BF16, nullptr), \
          CPU_ADAM_BY_OUT(function, F16, nullptr)                                        \
    }                                                                                    \
  }
#define CPU_ADAM_SPLIT_RULE_TABLE(function)                         \
  {                                                                 \
    {                                                               \
      CPU_ADAM_BY_OUT(function, F32, (function<F32, Split>)),       \
          CPU_ADAM_BY_OUT(function, BF16, (function<BF16, Split>)), \
          CPU_ADAM_BY_OUT(function, F16, (function<F16, Split>))    \
    }                                                               \
  }
#define CPU_ADAM_KERNEL_TABLE(name)                                  \
  {name,                                                             \
   CPU_ADAM_SPLIT_RULE_TABLE(adam_range),                            \
   CPU_ADAM_SPLIT_RULE_TABLE(adam_int8_range),                       \
   CPU_ADAM_SPLIT_RULE_TABLE(adam_bfloat16_range),                   \
   CPU_ADAM_RULE_TABLE(adagrad_range),                               \
   CPU_ADAM_RULE_TABLE(lion_range),                                  \
   CPU_ADAM_RULE_TABLE(sgd_range),                                   \
   CPU_ADAM_RULE_TABLE(sgd_plain_range),                             \
   {sum_of_squares<F32>, sum_of_squares<BF16>, sum_of_squares<F16>}, \
   {add_gradient<F32>, add_gradient<BF16>, add_gradient<F16>},       \
   copy_past_caches<F32>}
