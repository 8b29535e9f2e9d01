// The kernels, written once. Each isa_*.cpp defines the primitives and then includes this file
// inside its own unnamed namespace, so that every function below has internal linkage.
//
// [Note: what an isa_*.cpp defines]
// CPU_ADAM_INLINE    forced inlining
// kLanes             elements in a vector
// Vec                a vector of kLanes floats
// set1, add, sub, mul, div, sqrt_, fma_   elementwise on Vec; fma_(a, b, c) = a * b + c, rounded
// once F32, BF16, F16     one struct per element type: kBytes, load(const char*), store(char*, Vec)
//
// [Note: one result for one element]
// Every primitive is correctly rounded (IEEE 754), contraction by the compiler is off, and the last
// few elements go through the very same vector code by way of a padded copy. So a result depends on
// neither instruction set, position in the array, nor thread count.

// The absent copy: nothing is stored.
struct NoOut {
  static constexpr int kBytes = 0;
  static CPU_ADAM_INLINE void store(char*, Vec) {}
};

// [Note: streaming the copy]
// The copy is only written. An ordinary store first reads the cache line: 30 bytes of traffic per
// element where 28 would do (16-bit). A streamed store does not. It pays if the memory of the call
// exceeds the caches, so that the copy would be evicted anyway; the driver decides that.
template <class Out>
struct Streamed {
  static constexpr int kBytes = Out::kBytes;
  static CPU_ADAM_INLINE void store(char* to, Vec x) { Out::stream(to, x); }
};

// Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), in the operation order of
// torch.optim's for-loop; see reference.py. kL2: weight decay joins the gradient. kLerpFromGrad:
// the first moment is interpolated starting from the gradient (1 - beta1 >= 0.5).
template <bool kL2, bool kLerpFromGrad>
struct AdamRule {
  static constexpr int kStates = 2;
  Vec grad_scale, decay, l2, lerp_coefficient, beta2, one_minus_beta2, bias_correction2_sqrt, eps,
      neg_step_size;

  explicit CPU_ADAM_INLINE AdamRule(const cpu_adam::AdamScalars& s)
      : grad_scale(set1(s.grad_scale)),
        decay(set1(s.decay)),
        l2(set1(s.l2)),
        lerp_coefficient(set1(s.lerp_coefficient)),
        beta2(set1(s.beta2)),
        one_minus_beta2(set1(s.one_minus_beta2)),
        bias_correction2_sqrt(set1(s.bias_correction2_sqrt)),
        eps(set1(s.eps)),
        neg_step_size(set1(s.neg_step_size)) {}

  CPU_ADAM_INLINE Vec update(Vec master, Vec raw_grad, Vec (&state)[kStates]) const {
    Vec grad = mul(raw_grad, grad_scale);
    if (kL2) {
      grad = fma_(master, l2, grad);
    } else {
      master = mul(master, decay);
    }
    const Vec base = kLerpFromGrad ? grad : state[0];
    state[0] = fma_(lerp_coefficient, sub(grad, state[0]), base);
    state[1] = fma_(mul(one_minus_beta2, grad), grad, mul(state[1], beta2));
    const Vec denominator = add(div(sqrt_(state[1]), bias_correction2_sqrt), eps);
    return add(master, div(mul(neg_step_size, state[0]), denominator));
  }
};

// One vector: load, update, store.
template <class Rule, class Grad, class Out>
CPU_ADAM_INLINE void update_vector(const Rule& rule, char* master, const char* grad,
                                   char* const* state, char* out, std::int64_t index) {
  Vec values[Rule::kStates];
  for (int k = 0; k < Rule::kStates; ++k) values[k] = F32::load(state[k] + index * F32::kBytes);
  const Vec updated = rule.update(F32::load(master + index * F32::kBytes),
                                  Grad::load(grad + index * Grad::kBytes), values);
  for (int k = 0; k < Rule::kStates; ++k) F32::store(state[k] + index * F32::kBytes, values[k]);
  F32::store(master + index * F32::kBytes, updated);
  Out::store(out + index * Out::kBytes, updated);
}

CPU_ADAM_INLINE void copy_bytes(char* to, const char* from, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// Fewer elements than a vector: through a padded copy, so that the arithmetic is the same.
template <class Rule, class Grad, class Out>
void update_tail(const Rule& rule, char* master, const char* grad, char* const* state, char* out,
                 std::int64_t index, std::int64_t count) {
  char padded_master[kLanes * F32::kBytes] = {};
  char padded_grad[kLanes * Grad::kBytes] = {};
  char padded_states[Rule::kStates][kLanes * F32::kBytes] = {};
  char padded_out[kLanes * Out::kBytes + 1] = {};
  char* padded_state[Rule::kStates];
  copy_bytes(padded_master, master + index * F32::kBytes, count * F32::kBytes);
  copy_bytes(padded_grad, grad + index * Grad::kBytes, count * Grad::kBytes);
  for (int k = 0; k < Rule::kStates; ++k) {
    padded_state[k] = padded_states[k];
    copy_bytes(padded_state[k], state[k] + index * F32::kBytes, count * F32::kBytes);
  }
  update_vector<Rule, Grad, Out>(rule, padded_master, padded_grad, padded_state, padded_out, 0);
  copy_bytes(master + index * F32::kBytes, padded_master, count * F32::kBytes);
  for (int k = 0; k < Rule::kStates; ++k) {
    copy_bytes(state[k] + index * F32::kBytes, padded_state[k], count * F32::kBytes);
  }
  if (Out::kBytes > 0) {
    copy_bytes(out + index * Out::kBytes, padded_out, count * Out::kBytes);
  }
}

// The tail's copy is stored plainly: a padded copy has no alignment.
template <class Rule, class Grad, class Out, class TailOut>
CPU_ADAM_INLINE void update_range(const Rule& rule, const cpu_adam::Span& span, std::int64_t begin,
                                  std::int64_t end) {
  // Plain locals: a char* store may alias the struct, and would make the loop reload it.
  char* const master = span.master;
  const char* const grad = span.grad;
  char* const out = span.out;
  char* state[Rule::kStates];
  for (int k = 0; k < Rule::kStates; ++k) state[k] = span.state[k];
  std::int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    update_vector<Rule, Grad, Out>(rule, master, grad, state, out, i);
  }
  if (i < end) update_tail<Rule, Grad, TailOut>(rule, master, grad, state, out, i, end - i);
}

template <class Rule, class Grad, class Out>
CPU_ADAM_INLINE void update_span(const Rule& rule, const cpu_adam::Span& span, std::int64_t begin,
                                 std::int64_t end, bool is_streaming) {
  if constexpr (kCanStream && Out::kBytes > 0) {
    constexpr std::uintptr_t kVectorBytes = kLanes * Out::kBytes;
    const auto address = reinterpret_cast<std::uintptr_t>(span.out + begin * Out::kBytes);
    if (is_streaming && address % kVectorBytes == 0) {
      update_range<Rule, Grad, Streamed<Out>, Out>(rule, span, begin, end);
      stream_fence();
      return;
    }
  }
  update_range<Rule, Grad, Out, Out>(rule, span, begin, end);
}

template <class Grad, class Out>
void adam_range(const cpu_adam::Span& span, std::int64_t begin, std::int64_t end,
                const void* scalars, bool is_streaming) {
  const cpu_adam::AdamScalars& s = *static_cast<const cpu_adam::AdamScalars*>(scalars);
  const bool is_l2 = s.l2 != 0.0f;
  if (s.lerp_from_grad) {
    if (is_l2) {
      using Rule = AdamRule<true, true>;
      update_span<Rule, Grad, Out>(Rule(s), span, begin, end, is_streaming);
    } else {
      using Rule = AdamRule<false, true>;
      update_span<Rule, Grad, Out>(Rule(s), span, begin, end, is_streaming);
    }
  } else {
    if (is_l2) {
      using Rule = AdamRule<true, false>;
      update_span<Rule, Grad, Out>(Rule(s), span, begin, end, is_streaming);
    } else {
      using Rule = AdamRule<false, false>;
      update_span<Rule, Grad, Out>(Rule(s), span, begin, end, is_streaming);
    }
  }
}

// A RuleTable of `function`, in the order of DType.
#define CPU_ADAM_BY_OUT(function, grad) \
  {function<grad, F32>, function<grad, BF16>, function<grad, F16>, function<grad, NoOut>}
#define CPU_ADAM_RULE_TABLE(function)                                  \
  {                                                                    \
    {                                                                  \
      CPU_ADAM_BY_OUT(function, F32), CPU_ADAM_BY_OUT(function, BF16), \
          CPU_ADAM_BY_OUT(function, F16)                               \
    }                                                                  \
  }
#define CPU_ADAM_KERNEL_TABLE(name) {name, CPU_ADAM_RULE_TABLE(adam_range)}
