// The border between the code for one instruction set and everything else: plain structs and a
// table of function pointers. Included by files with instruction-set flags, so it defines no
// function and pulls in no standard template: the linker might keep their AVX copy for all.
#pragma once

#include <cstdint>

#if defined(_MSC_VER)
#define CPU_ADAM_INLINE __forceinline
#else
#define CPU_ADAM_INLINE inline __attribute__((always_inline))
#endif

namespace cpu_adam {

// Element types of gradients and copies. The numbers are shared with _memory.py.
// kSplit, in the place of a copy's type: the master weight is split, see [Note: a split master].
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kNone = 3, kSplit = 4 };
constexpr int kNumGradTypes = 3;
constexpr int kNumOutTypes = 5;
constexpr int kMaxStates = 4;

// Elements that share the scales of their 8-bit states.
constexpr std::int64_t kBlockNumel = 128;

// Elements whose squares are summed before the sums of all such chunks are added, in order.
constexpr std::int64_t kChunkNumel = 32 * 1024;

// [Note: a split master]
// A bf16 parameter is the upper half of its fp32 master weight; the lower half is kept beside it.
// The parameter is the master rounded to the nearest bf16, and the one of the greater magnitude if
// two are as near. The remainder, an int16, is the difference of the two, both seen as 32-bit
// integers: master bits = (parameter bits << 16) + remainder. It is the lower half of the master's
// bits as they are, and the master comes back bit by bit.

// One tensor's memory. `state` holds what the update rule keeps, in the rule's order (Adam:
// exp_avg, exp_avg_sq). Addresses need no alignment. If the master is split, `master` is the bf16
// parameter and `out` the remainder. `stream` sets the random numbers of tensors apart.
struct Span {
  char* master;
  const char* grad;
  char* state[kMaxStates];
  char* out;
  std::uint32_t stream;
};

// What Adam's update needs, the same for every element of a call; see reference.py for the
// formulas.
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

// Adam with states of 8 or 16 bits; see reference.py. The key is that of the random numbers.
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

// Updates elements [begin, end) of a span; `scalars` is the struct of the update rule.
// is_streaming: the copy is not read again soon, and may go past the caches.
using RangeFunction = void (*)(const Span& span, std::int64_t begin, std::int64_t end,
                               const void* scalars, bool is_streaming);

// The sum of the squares of elements [begin, end), in double precision.
using SumFunction = double (*)(const char* grad, std::int64_t begin, std::int64_t end);

// Writes elements [0, numel) of a gradient to `sum`, or adds them to it.
using AddFunction = void (*)(float* sum, const char* grad, std::int64_t numel, bool is_first);

// Copies memory that is not read again soon, past the caches where it can.
using CopyFunction = void (*)(char* to, const char* from, std::int64_t num_bytes);

// One update rule, for each type of gradient and of copy; null where the rule has no such variant.
struct RuleTable {
  RangeFunction by_type[kNumGradTypes][kNumOutTypes];
};

// Everything that one instruction set offers. Another update rule is another member.
struct KernelTable {
  const char* name;
  RuleTable adam;
  RuleTable adam_int8;
  RuleTable adam_bfloat16;
  RuleTable adagrad;
  RuleTable lion;
  RuleTable sgd;        // with a momentum buffer
  RuleTable sgd_plain;  // without
  SumFunction sum_of_squares[kNumGradTypes];
  AddFunction add_gradient[kNumGradTypes];
  CopyFunction copy;
};

extern const KernelTable kScalarTable;
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
extern const KernelTable kNeonTable;

}  // namespace cpu_adam
