// Interface between the code for one instruction set and all other code: plain structs and a table
// of function pointers. Files compiled with instruction-set flags include this header, so it
// defines no function and includes no standard template. Otherwise the linker might keep an AVX
// copy of such a function for the whole program.
#pragma once

#include <cstdint>

#if defined(_MSC_VER)
#define CPU_ADAM_INLINE __forceinline
#else
#define CPU_ADAM_INLINE inline __attribute__((always_inline))
#endif

namespace cpu_adam {

// Element types of gradients and copies, with the numbers of _memory.py. kSplit, as the type of a
// copy, means that the master weight is split: see [Note: a split master].
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kNone = 3, kSplit = 4 };
constexpr int kNumGradTypes = 3;
constexpr int kNumOutTypes = 5;
constexpr int kMaxStates = 4;

// Elements of a block, which share the scales of 8-bit states.
constexpr std::int64_t kBlockNumel = 128;

// Elements of a chunk in a sum of squares. Sums of chunks are added in order.
constexpr std::int64_t kChunkNumel = 32 * 1024;

// [Note: a split master]
// A bf16 parameter is the upper half of its fp32 master weight, and a separate int16 remainder is
// the lower half. The parameter is the master rounded to the nearest bf16, ties away from zero.
// With both as 32-bit integers, master bits = (parameter bits << 16) + remainder. The remainder is
// the lower half of the master's bits, and the sum restores the master bit by bit.

// Memory of one tensor. `state` has the update rule's states in the rule's order (Adam: exp_avg,
// exp_avg_sq). Addresses need no alignment. If the master is split, `master` is the bf16 parameter
// and `out` the remainder. `stream` makes the random numbers of tensors differ.
struct Span {
  char* master;
  const char* grad;
  char* state[kMaxStates];
  char* out;
  std::uint32_t stream;
};

// Scalars of Adam, equal for all elements of a call. See reference.py for the formulas.
struct AdamScalars {
  float grad_scale;
  float decay;
  float l2;
  float lerp_coefficient;
  bool lerp_from_grad;
  float beta2;
  float one_minus_beta2;
  float bias_correction2_sqrt;
  float eps;
  float neg_step_size;
};

// Scalars of Adam with 8- or 16-bit states. See reference.py. `key` is for the random numbers.
struct CompactAdamScalars {
  float grad_scale;
  float decay;
  float l2;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2_sqrt;
  float denominator_scale;
  float denominator_offset;
  std::uint32_t key[2];
};

struct AdagradScalars {
  float grad_scale;
  float l2;
  float eps;
  float neg_step_size;
};

struct LionScalars {
  float grad_scale;
  float decay;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float neg_lr;
};

struct SgdScalars {
  float grad_scale;
  float l2;
  float momentum;
  float buffer_decay;
  float grad_weight;
  float neg_lr;
  bool is_nesterov;
};

// Updates elements [begin, end) of a span. `scalars` is the struct of the update rule.
// is_streaming: store the copy with non-temporal stores, because it is not read again soon.
using RangeFunction = void (*)(const Span& span, std::int64_t begin, std::int64_t end,
                               const void* scalars, bool is_streaming);

// Returns the sum of squares of elements [begin, end), in double precision.
using SumFunction = double (*)(const char* grad, std::int64_t begin, std::int64_t end);

// Writes elements [0, numel) of a gradient to `sum`, or adds them to `sum`.
using AddFunction = void (*)(float* sum, const char* grad, std::int64_t numel, bool is_first);

// Copies memory that is not read again soon, with non-temporal stores if possible.
using CopyFunction = void (*)(char* to, const char* from, std::int64_t num_bytes);

// Functions of an update rule by types of gradient and copy. Null: not supported.
struct RuleTable {
  RangeFunction by_type[kNumGradTypes][kNumOutTypes];
};

// All kernels for one instruction set. A new update rule adds a member.
struct KernelTable {
  const char* name;
  RuleTable adam;
  RuleTable adam_int8;
  RuleTable adam_bfloat16;
  RuleTable adagrad;
  RuleTable lion;
  RuleTable sgd;        // with a momentum buffer
  RuleTable sgd_plain;  // without a momentum buffer
  SumFunction sum_of_squares[kNumGradTypes];
  AddFunction add_gradient[kNumGradTypes];
  CopyFunction copy;
};

extern const KernelTable kScalarTable;
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
extern const KernelTable kNeonTable;

}  // namespace cpu_adam
