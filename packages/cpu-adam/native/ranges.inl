// Part of kernel.inl: rules applied to a range of elements.

// Updates kVectors vectors, in short loops over all of them. Otherwise instructions that wait for a
// square root or division would fill the CPU's reorder buffer. `position` is the index of the first
// element in the tensor: see [Note: states].
template <int kVectors, class Rule, class Grad, class Target>
CPU_ADAM_INLINE void update_vectors(const Rule& rule, char* master, const char* grad,
                                    char* const* state, char* out, std::int64_t index,
                                    std::int64_t position) {
  Vec masters[kVectors];
  typename Rule::Pending pending[kVectors];
  for (int k = 0; k < kVectors; ++k) {
    const std::int64_t i = index + k * kLanes;
    typename Rule::Values values;
    Rule::load(state, i, values);
    masters[k] = Target::load(master, out, i);
    pending[k] = rule.begin(masters[k], Grad::load(grad + i * Grad::kBytes), values);
    rule.store(state, i, position + k * kLanes, values);
  }
  for (int k = 0; k < kVectors; ++k) masters[k] = rule.finish(masters[k], pending[k]);
  for (int k = 0; k < kVectors; ++k) Target::store(master, out, index + k * kLanes, masters[k]);
}

// Updates fewer elements than a vector in a padded copy, with the same arithmetic.
template <class Rule, class Grad, class Target>
void update_tail(const Rule& rule, char* master, const char* grad, char* const* state, char* out,
                 std::int64_t index, std::int64_t count) {
  constexpr int kStates = Rule::kStates;
  constexpr int kSlots = kStates > 0 ? kStates : 1;
  constexpr int kStateBytes = Rule::kStateBytes;
  char padded_master[kLanes * Target::kMasterBytes] = {};
  char padded_grad[kLanes * Grad::kBytes] = {};
  char padded_states[kSlots][kLanes * kStateBytes] = {};
  char padded_out[kLanes * Target::kOutBytes + 1] = {};
  char* padded_state[kSlots];
  copy_bytes(padded_master, master + index * Target::kMasterBytes, count * Target::kMasterBytes);
  copy_bytes(padded_grad, grad + index * Grad::kBytes, count * Grad::kBytes);
  for (int k = 0; k < kStates; ++k) {
    padded_state[k] = padded_states[k];
    copy_bytes(padded_state[k], state[k] + index * kStateBytes, count * kStateBytes);
  }
  if (Target::kReadsOut) {
    copy_bytes(padded_out, out + index * Target::kOutBytes, count * Target::kOutBytes);
  }
  update_vectors<1, Rule, Grad, Target>(rule, padded_master, padded_grad, padded_state, padded_out,
                                        0, index);
  copy_bytes(master + index * Target::kMasterBytes, padded_master, count * Target::kMasterBytes);
  for (int k = 0; k < kStates; ++k) {
    copy_bytes(state[k] + index * kStateBytes, padded_state[k], count * kStateBytes);
  }
  if (Target::kOutBytes > 0) {
    copy_bytes(out + index * Target::kOutBytes, padded_out, count * Target::kOutBytes);
  }
}

// TailTarget stores the tail's copy with ordinary stores, because a padded copy is not aligned.
template <class Rule, class Grad, class Target, class TailTarget>
CPU_ADAM_INLINE void update_range(const Rule& rule, const cpu_adam::Span& span, std::int64_t begin,
                                  std::int64_t end) {
  // Local variables: a char* store may alias the struct, so the loop would reload its members.
  char* const master = span.master;
  const char* const grad = span.grad;
  char* const out = span.out;
  char* state[cpu_adam::kMaxStates];
  for (int k = 0; k < cpu_adam::kMaxStates; ++k) state[k] = span.state[k];
  constexpr int kVectors = kVectorsAtOnce;
  std::int64_t i = begin;
  for (; i + kVectors * kLanes <= end; i += kVectors * kLanes) {
    update_vectors<kVectors, Rule, Grad, Target>(rule, master, grad, state, out, i, i);
  }
  for (; i + kLanes <= end; i += kLanes) {
    update_vectors<1, Rule, Grad, Target>(rule, master, grad, state, out, i, i);
  }
  if (i < end) update_tail<Rule, Grad, TailTarget>(rule, master, grad, state, out, i, end - i);
}

template <class Rule, class Grad, class Out>
CPU_ADAM_INLINE void update_span(const Rule& rule, const cpu_adam::Span& span, std::int64_t begin,
                                 std::int64_t end, bool is_streaming, Whole<Out>) {
  if constexpr (kStreamBytes > 0 && Out::kBytes > 0) {
    const auto address = reinterpret_cast<std::uintptr_t>(span.out + begin * Out::kBytes);
    if (is_streaming && address % kStreamBytes == 0) {
      update_range<Rule, Grad, Whole<Streamed<Out>>, Whole<Out>>(rule, span, begin, end);
      stream_fence();
      return;
    }
  }
  update_range<Rule, Grad, Whole<Out>, Whole<Out>>(rule, span, begin, end);
}

// The remainder is read and written, so non-temporal stores would not save traffic.
template <class Rule, class Grad>
CPU_ADAM_INLINE void update_span(const Rule& rule, const cpu_adam::Span& span, std::int64_t begin,
                                 std::int64_t end, bool, Split) {
  update_range<Rule, Grad, Split, Split>(rule, span, begin, end);
}

template <class Grad, class Target>
void adam_range(const cpu_adam::Span& span, std::int64_t begin, std::int64_t end,
                const void* scalars, bool is_streaming) {
  const cpu_adam::AdamScalars& s = *static_cast<const cpu_adam::AdamScalars*>(scalars);
  const bool is_l2 = s.l2 != 0.0f;
  if (s.lerp_from_grad) {
    if (is_l2) {
      using Rule = AdamRule<true, true>;
      update_span<Rule, Grad>(Rule(s, 0), span, begin, end, is_streaming, Target());
    } else {
      using Rule = AdamRule<false, true>;
      update_span<Rule, Grad>(Rule(s, 0), span, begin, end, is_streaming, Target());
    }
  } else {
    if (is_l2) {
      using Rule = AdamRule<true, false>;
      update_span<Rule, Grad>(Rule(s, 0), span, begin, end, is_streaming, Target());
    } else {
      using Rule = AdamRule<false, false>;
      update_span<Rule, Grad>(Rule(s, 0), span, begin, end, is_streaming, Target());
    }
  }
}

// Runs a rule whose type does not depend on its scalars.
template <class Rule, class Scalars, class Grad, class Target>
CPU_ADAM_INLINE void rule_range(const cpu_adam::Span& span, std::int64_t begin, std::int64_t end,
                                const void* scalars, bool is_streaming) {
  const Rule rule(*static_cast<const Scalars*>(scalars), span.stream);
  update_span<Rule, Grad>(rule, span, begin, end, is_streaming, Target());
}

#define CPU_ADAM_RULE_RANGE(function, rule, scalars)                                           \
  template <class Grad, class Target>                                                          \
  void function(const cpu_adam::Span& span, std::int64_t begin, std::int64_t end,              \
                const void* values, bool is_streaming) {                                       \
    rule_range<rule, cpu_adam::scalars, Grad, Target>(span, begin, end, values, is_streaming); \
  }
CPU_ADAM_RULE_RANGE(adagrad_range, AdagradRule, AdagradScalars)
CPU_ADAM_RULE_RANGE(lion_range, LionRule, LionScalars)
CPU_ADAM_RULE_RANGE(sgd_range, SgdRule<true>, SgdScalars)
CPU_ADAM_RULE_RANGE(sgd_plain_range, SgdRule<false>, SgdScalars)

template <class Grad, class Target>
void adam_bfloat16_range(const cpu_adam::Span& span, std::int64_t begin, std::int64_t end,
                         const void* scalars, bool is_streaming) {
  using Scalars = cpu_adam::CompactAdamScalars;
  if (static_cast<const Scalars*>(scalars)->l2 != 0.0f) {
    rule_range<BF16AdamRule<true>, Scalars, Grad, Target>(span, begin, end, scalars, is_streaming);
  } else {
    rule_range<BF16AdamRule<false>, Scalars, Grad, Target>(span, begin, end, scalars, is_streaming);
  }
}
