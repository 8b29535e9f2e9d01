// The border between the code for one instruction set and everything else: plain structs and a
// table of function pointers. Included by files with instruction-set flags, so it defines no
// function and pulls in no standard template: the linker might keep their AVX copy for all.
#pragma once

#include <cstdint>

namespace cpu_adam {

// Element types of gradients and copies. The numbers are shared with _memory.py.
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kNone = 3 };
constexpr int kNumGradTypes = 3;
constexpr int kNumOutTypes = 4;
constexpr int kMaxStates = 2;

// One tensor's memory. `state` holds what the update rule keeps per element, in the rule's order
// (Adam: exp_avg, exp_avg_sq). Addresses need no alignment.
struct Span {
  char* master;
  const char* grad;
  char* state[kMaxStates];
  char* out;
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

// Updates elements [begin, end) of a span; `scalars` is the struct of the update rule.
// is_streaming: the copy is not read again soon, and may go past the caches.
using RangeFunction = void (*)(const Span& span, std::int64_t begin, std::int64_t end,
                               const void* scalars, bool is_streaming);

// One update rule, for each type of gradient and of copy.
struct RuleTable {
  RangeFunction by_type[kNumGradTypes][kNumOutTypes];
};

// Everything that one instruction set offers. Another update rule is another member.
struct KernelTable {
  const char* name;
  RuleTable adam;
};

extern const KernelTable kScalarTable;
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
extern const KernelTable kNeonTable;

}  // namespace cpu_adam
