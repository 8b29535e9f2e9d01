// The kernels, written once. Each isa_*.cpp defines the primitives and then includes this file
// inside its own unnamed namespace, so that every function below has internal linkage.
//
// [Note: what an isa_*.cpp defines]
// CPU_ADAM_INLINE    forced inlining
// kLanes             elements in a vector
// kVectorsAtOnce     vectors in each of the short loops that the work is cut into
// Vec                a vector of kLanes floats
// set1, add, sub, mul, div, sqrt_, fma_, nfma   elementwise on Vec; fma_(a, b, c) rounds a * b + c
//                    once, nfma(a, b, c) rounds c - a * b once
// copy_sign(x, y)    the magnitude of x with the sign of y
// F32, BF16, F16     one struct per element type: kBytes, load(const char*), store(char*, Vec)
// UInt               a vector of kLanes 32-bit integers
// as_bits, as_float  Vec to UInt and back, the same bits
// to_float, to_int   signed integers to Vec and back; to_int rounds in the caller's mode
// uset1, uadd, usub, umul, uand, uor, uxor, ushl<n>, ushr<n>   elementwise, modulo 2**32
// umax, reduce_umax  the larger one, unsigned; the largest of all lanes, as one number
// igreater           of signed integers: all ones or zero
// is_ordered         all ones where a float is not NaN, else zero
// if_ordered(test, a, b)   a where the float `test` is not NaN, else b; of Vec and of UInt
// lanes              0, 1, 2, ...
// load_u8, load_i8, load_i16, load_upper_16   the last one: into the upper halves, zeros below
// store_8, store_16  keep the low bits...
// store_upper_16     ...and this the upper half of each
// Doubles            min(kLanes, 16) doubles: zero_doubles, store_doubles, add_square(sum, Vec),
//                    which takes the first sixteen lanes first
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

// [Note: targets]
// Where a rule's master weight is: Whole<Out> is an fp32 master with a copy of type Out; Split is
// the bf16 parameter and its remainder, see [Note: a split master] in kernels.h.
template <class Out>
struct Whole {
  static constexpr int kMasterBytes = 4;
  static constexpr int kOutBytes = Out::kBytes;
  static constexpr bool kReadsOut = false;
  static CPU_ADAM_INLINE Vec load(const char* master, const char*, std::int64_t index) {
    return F32::load(master + index * kMasterBytes);
  }
  static CPU_ADAM_INLINE void store(char* master, char* out, std::int64_t index, Vec x) {
    F32::store(master + index * kMasterBytes, x);
    Out::store(out + index * kOutBytes, x);
  }
};

CPU_ADAM_INLINE UInt magnitude_bits(Vec x) { return uand(as_bits(x), uset1(0x7fffffffu)); }

struct Split {
  static constexpr int kMasterBytes = 2;
  static constexpr int kOutBytes = 2;
  static constexpr bool kReadsOut = true;
  static CPU_ADAM_INLINE Vec load(const char* master, const char* out, std::int64_t index) {
    return as_float(uadd(load_upper_16(master + index * 2), load_i16(out + index * 2)));
  }
  static CPU_ADAM_INLINE void store(char* master, char* out, std::int64_t index, Vec x) {
    const UInt bits = as_bits(x);
    // A NaN is not rounded: it comes out of arithmetic, so it is quiet, and stays a NaN.
    store_upper_16(master + index * 2, if_ordered(x, uadd(bits, uset1(0x8000)), bits));
    store_16(out + index * 2, bits);
  }
};

// [Note: states]
// How a rule's states lie in memory: kStates, kStateBytes, load, store. `index` says where the
// vector is in memory, `position` which elements of the tensor it holds.
template <int kCount>
struct Float32States {
  static constexpr int kStates = kCount;
  static constexpr int kStateBytes = 4;
  // No array is empty.
  using Values = Vec[kCount > 0 ? kCount : 1];
  static CPU_ADAM_INLINE void load(char* const* state, std::int64_t index, Values& values) {
    for (int k = 0; k < kCount; ++k) values[k] = F32::load(state[k] + index * kStateBytes);
  }
  CPU_ADAM_INLINE void store(char* const* state, std::int64_t index, std::int64_t,
                             const Values& values) const {
    for (int k = 0; k < kCount; ++k) F32::store(state[k] + index * kStateBytes, values[k]);
  }
};

// [Note: stochastic rounding]
// A state is rounded up with the probability of its distance from the value below, so that on
// average small changes are not lost. The random numbers are a function of (key, stream, element)
// alone: a counter, scrambled by two rounds of multiply and xor-shift with the multipliers of
// MurmurHash3's finalizer (Appleby, public domain). The key comes from the seed and the step.
CPU_ADAM_INLINE UInt random_bits(const std::uint32_t (&key)[2], std::int64_t position) {
  const auto wide = static_cast<std::uint64_t>(position);
  const auto low = static_cast<std::uint32_t>(wide);
  const auto high = static_cast<std::uint32_t>(wide >> 32);
  UInt x = uadd(lanes(), uset1(low + key[0]));
  x = umul(uxor(x, ushr<16>(x)), uset1(0x85ebca6bu));
  x = uxor(x, uset1(key[1] ^ (high * 0x9e3779b9u)));
  x = umul(uxor(x, ushr<13>(x)), uset1(0xc2b2ae35u));
  return uxor(x, ushr<16>(x));
}

// The bf16 number above or below, in the upper half of each lane. Infinities stay; so do NaNs.
CPU_ADAM_INLINE UInt round_stochastically(Vec x, UInt random16) {
  return if_ordered(x, uadd(as_bits(x), random16), as_bits(x));
}

struct RandomBF16States {
  static constexpr int kStates = 2;
  static constexpr int kStateBytes = 2;
  using Values = Vec[kStates];
  std::uint32_t key[2];
  static CPU_ADAM_INLINE void load(char* const* state, std::int64_t index, Values& values) {
    for (int k = 0; k < kStates; ++k) values[k] = BF16::load(state[k] + index * kStateBytes);
  }
  CPU_ADAM_INLINE void store(char* const* state, std::int64_t index, std::int64_t position,
                             const Values& values) const {
    const UInt random = random_bits(key, position);
    store_upper_16(state[0] + index * 2,
                   round_stochastically(values[0], uand(random, uset1(0xffff))));
    store_upper_16(state[1] + index * 2, round_stochastically(values[1], ushr<16>(random)));
  }
};

// [Note: division by a constant]
// The quotient of every element by one and the same number, correctly rounded as `div` is but
// cheaper: the product with the rounded reciprocal, and then its error, which a fused multiply-add
// has exactly, times the reciprocal (Markstein 1990). With divisor b, dividend a, both of 24 bits,
// in [1, 2): the product is less than one unit in the last place off, or less than one and a half
// if a < b; then the second sum differs from a / b by less than a / b can differ from the middle
// between two floats, so both round to the same. Nothing may underflow on the way: a square root is
// at least 2**-75. An infinity has no error, and its first product stands.
struct Divisor {
  Vec value, reciprocal;

  explicit CPU_ADAM_INLINE Divisor(float x) : value(set1(x)), reciprocal(set1(1.0f / x)) {}

  CPU_ADAM_INLINE Vec divide(Vec x) const {
    const Vec product = mul(x, reciprocal);
    const Vec error = nfma(product, value, x);
    return if_ordered(error, fma_(error, reciprocal, product), product);
  }
};

// [Note: rules]
// A rule changes one vector in two halves: `begin` updates the states, and the master weight as far
// as it can; `finish` returns the new one. Between them lies what takes long, a square root or
// nothing, and its results: Pending.
struct RootPending {
  Vec numerator, root;
};

// Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), in the operation order of
// torch.optim's for-loop; see reference.py. kL2: weight decay joins the gradient. kLerpFromGrad:
// the first moment is interpolated starting from the gradient (1 - beta1 >= 0.5).
template <bool kL2, bool kLerpFromGrad>
struct AdamRule : Float32States<2> {
  using Pending = RootPending;
  using typename Float32States<2>::Values;
  Vec grad_scale, decay, l2, lerp_coefficient, beta2, one_minus_beta2, eps, neg_step_size;
  Divisor bias_correction2_sqrt;

  CPU_ADAM_INLINE AdamRule(const cpu_adam::AdamScalars& s, std::uint32_t)
      : grad_scale(set1(s.grad_scale)),
        decay(set1(s.decay)),
        l2(set1(s.l2)),
        lerp_coefficient(set1(s.lerp_coefficient)),
        beta2(set1(s.beta2)),
        one_minus_beta2(set1(s.one_minus_beta2)),
        eps(set1(s.eps)),
        neg_step_size(set1(s.neg_step_size)),
        bias_correction2_sqrt(s.bias_correction2_sqrt) {}

  CPU_ADAM_INLINE Pending begin(Vec& master, Vec raw_grad, Values& state) const {
    Vec grad = mul(raw_grad, grad_scale);
    if (kL2) {
      grad = fma_(master, l2, grad);
    } else {
      master = mul(master, decay);
    }
    const Vec base = kLerpFromGrad ? grad : state[0];
    state[0] = fma_(lerp_coefficient, sub(grad, state[0]), base);
    state[1] = fma_(mul(one_minus_beta2, grad), grad, mul(state[1], beta2));
    return {mul(neg_step_size, state[0]), sqrt_(state[1])};
  }

  CPU_ADAM_INLINE Vec finish(Vec master, Pending pending) const {
    const Vec denominator = add(bias_correction2_sqrt.divide(pending.root), eps);
    return add(master, div(pending.numerator, denominator));
  }
};

// AdamW and Adam with compact states. Their formulas are equal, but for what is computed once for
// all: they need not match torch's last place, so every product of constants is one constant.
// kL2: weight decay joins the gradient.
template <bool kL2>
struct CompactAdam {
  Vec grad_scale, decay, l2, beta1, one_minus_beta1, beta2, one_minus_beta2_sqrt, denominator_scale,
      denominator_offset;

  explicit CPU_ADAM_INLINE CompactAdam(const cpu_adam::CompactAdamScalars& s)
      : grad_scale(set1(s.grad_scale)),
        decay(set1(s.decay)),
        l2(set1(s.l2)),
        beta1(set1(s.beta1)),
        one_minus_beta1(set1(kL2 ? s.one_minus_beta1 : s.one_minus_beta1 * s.grad_scale)),
        beta2(set1(s.beta2)),
        one_minus_beta2_sqrt(
            set1(kL2 ? s.one_minus_beta2_sqrt : s.one_minus_beta2_sqrt * s.grad_scale)),
        denominator_scale(set1(s.denominator_scale)),
        denominator_offset(set1(s.denominator_offset)) {}

  // The new moments, from the old ones times their decay.
  CPU_ADAM_INLINE void average(Vec master, Vec grad, Vec& exp_avg, Vec& exp_avg_sq) const {
    if (kL2) grad = fma_(master, l2, mul(grad, grad_scale));
    exp_avg = fma_(one_minus_beta1, grad, exp_avg);
    const Vec part = mul(one_minus_beta2_sqrt, grad);
    exp_avg_sq = fma_(part, part, exp_avg_sq);
  }

  // The new master weight; `root` is the square root of the second moment.
  CPU_ADAM_INLINE Vec apply(Vec master, Vec exp_avg, Vec root) const {
    const Vec denominator = fma_(root, denominator_scale, denominator_offset);
    return fma_(master, decay, div(exp_avg, denominator));
  }
};

template <bool kL2>
struct BF16AdamRule : RandomBF16States {
  using Pending = RootPending;
  CompactAdam<kL2> adam;

  CPU_ADAM_INLINE BF16AdamRule(const cpu_adam::CompactAdamScalars& s, std::uint32_t stream)
      : RandomBF16States{{s.key[0] + stream * 0x85ebca77u, s.key[1] + stream * 0x9e3779b1u}},
        adam(s) {}

  CPU_ADAM_INLINE Pending begin(Vec& master, Vec raw_grad, Values& state) const {
    state[0] = mul(adam.beta1, state[0]);
    state[1] = mul(adam.beta2, state[1]);
    adam.average(master, raw_grad, state[0], state[1]);
    return {state[0], sqrt_(state[1])};
  }

  CPU_ADAM_INLINE Vec finish(Vec master, Pending pending) const {
    return adam.apply(master, pending.numerator, pending.root);
  }
};

// Adagrad (Duchi, Hazan and Singer 2011), in the operation order of torch.optim's for-loop.
struct AdagradRule : Float32States<1> {
  using Pending = RootPending;
  Vec grad_scale, l2, eps, neg_step_size;

  CPU_ADAM_INLINE AdagradRule(const cpu_adam::AdagradScalars& s, std::uint32_t)
      : grad_scale(set1(s.grad_scale)),
        l2(set1(s.l2)),
        eps(set1(s.eps)),
        neg_step_size(set1(s.neg_step_size)) {}

  CPU_ADAM_INLINE Pending begin(Vec& master, Vec raw_grad, Values& state) const {
    const Vec grad = fma_(master, l2, mul(raw_grad, grad_scale));
    state[0] = fma_(grad, grad, state[0]);
    return {mul(neg_step_size, grad), sqrt_(state[0])};
  }

  CPU_ADAM_INLINE Vec finish(Vec master, Pending pending) const {
    return add(master, div(pending.numerator, add(pending.root, eps)));
  }
};

// Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2).
struct LionRule : Float32States<1> {
  using Pending = Vec;
  Vec grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2;
  UInt neg_lr_bits;

  CPU_ADAM_INLINE LionRule(const cpu_adam::LionScalars& s, std::uint32_t)
      : grad_scale(set1(s.grad_scale)),
        decay(set1(s.decay)),
        beta1(set1(s.beta1)),
        one_minus_beta1(set1(s.one_minus_beta1)),
        beta2(set1(s.beta2)),
        one_minus_beta2(set1(s.one_minus_beta2)),
        neg_lr_bits(as_bits(set1(s.neg_lr))) {}

  CPU_ADAM_INLINE Pending begin(Vec& master, Vec raw_grad, Values& state) const {
    const Vec grad = mul(raw_grad, grad_scale);
    const Vec direction = fma_(one_minus_beta1, grad, mul(beta1, state[0]));
    // -lr * sign(direction), by its bits: 0 for 0, NaN for NaN.
    const UInt signed_lr = uxor(neg_lr_bits, uand(as_bits(direction), uset1(0x80000000u)));
    const UInt nonzero = igreater(magnitude_bits(direction), uset1(0));
    const UInt nan = uand(uxor(is_ordered(direction), uset1(~0u)), uset1(0x7fc00000u));
    const Vec step = as_float(uor(uand(signed_lr, nonzero), nan));
    state[0] = fma_(one_minus_beta2, grad, mul(beta2, state[0]));
    master = mul(master, decay);
    return step;
  }

  CPU_ADAM_INLINE Vec finish(Vec master, Pending step) const { return add(master, step); }
};

// Stochastic gradient descent with momentum, in the operation order of torch.optim's for-loop.
template <bool kHasMomentum>
struct SgdRule : Float32States<kHasMomentum ? 1 : 0> {
  using Pending = Vec;
  using typename Float32States<kHasMomentum ? 1 : 0>::Values;
  Vec grad_scale, l2, momentum, buffer_decay, grad_weight, neg_lr;
  bool is_nesterov;

  CPU_ADAM_INLINE SgdRule(const cpu_adam::SgdScalars& s, std::uint32_t)
      : grad_scale(set1(s.grad_scale)),
        l2(set1(s.l2)),
        momentum(set1(s.momentum)),
        buffer_decay(set1(s.buffer_decay)),
        grad_weight(set1(s.grad_weight)),
        neg_lr(set1(s.neg_lr)),
        is_nesterov(s.is_nesterov) {}

  CPU_ADAM_INLINE Pending begin(Vec& master, Vec raw_grad, Values& state) const {
    const Vec grad = fma_(master, l2, mul(raw_grad, grad_scale));
    if constexpr (kHasMomentum) {
      state[0] = fma_(grad_weight, grad, mul(state[0], buffer_decay));
      return is_nesterov ? fma_(momentum, state[0], grad) : state[0];
    } else {
      (void)state;
      return grad;
    }
  }

  CPU_ADAM_INLINE Vec finish(Vec master, Pending direction) const {
    return fma_(neg_lr, direction, master);
  }
};

// kVectors vectors: load, update, store. In short loops, each over all of them: what follows a
// square root or a division waits for it, and a CPU that has taken in too much that waits takes in
// nothing more. `position` is that of the first element, see [Note: states].
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

CPU_ADAM_INLINE void copy_bytes(char* to, const char* from, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// Fewer elements than a vector: through a padded copy, so that the arithmetic is the same.
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

// The tail's copy is stored plainly: a padded copy has no alignment.
template <class Rule, class Grad, class Target, class TailTarget>
CPU_ADAM_INLINE void update_range(const Rule& rule, const cpu_adam::Span& span, std::int64_t begin,
                                  std::int64_t end) {
  // Plain locals: a char* store may alias the struct, and would make the loop reload it.
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
  if constexpr (kCanStream && Out::kBytes > 0) {
    constexpr std::uintptr_t kVectorBytes = kLanes * Out::kBytes;
    const auto address = reinterpret_cast<std::uintptr_t>(span.out + begin * Out::kBytes);
    if (is_streaming && address % kVectorBytes == 0) {
      update_range<Rule, Grad, Whole<Streamed<Out>>, Whole<Out>>(rule, span, begin, end);
      stream_fence();
      return;
    }
  }
  update_range<Rule, Grad, Whole<Out>, Whole<Out>>(rule, span, begin, end);
}

// The remainder is read as well as written: nothing to stream.
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

// A rule that is one type, whatever its scalars.
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

// [Note: 8-bit states]
// Blocks of kBlockNumel elements share a scale, their largest magnitude (block-wise quantization:
// Dettmers et al. 2021, arXiv 2110.02861). Both moments are kept in the unit of the gradient: the
// first, and the square root of the second. Small values shall survive beside large ones.
// The first moment: rounded to an integer is (nearly) the square root, y = compress(x * top /
// scale). `compress` halves the exponent and is linear in between: the bits of an fp32 number,
// shifted right by one, plus half the bits of 1.0. It lies within 6.1% of the square root, takes
// two integer operations where the square root takes a dozen cycles, and has an exact inverse, as
// cheap. `top` is what compresses to the largest code, 127.
// The second: an 8-bit floating-point number without sign or zero, that is, the first bits of the
// ratio to the largest root: 16 codes for each power of two, 255 for the largest itself. Nothing
// becomes zero, and a denominator that vanished would make the update explode.
// The scale is exact: as the moments decay, so does it, and the codes need not change.
// A block whose largest value is below 2**-100 is stored as zero. A block that holds a moment which
// is not finite gets a scale of NaN: its elements are lost, and seen to be.
constexpr int kBlock = static_cast<int>(cpu_adam::kBlockNumel);
constexpr float kExpAvgTop = 16128.0f;
constexpr std::uint32_t kOneBits = 0x3f800000u;

// Of the bits of a number that is not negative.
CPU_ADAM_INLINE UInt compress(UInt bits) { return uadd(ushr<1>(bits), uset1(kOneBits / 2)); }

// Of the magnitude of any number: the sign is shifted out. What `compress` makes of zero, and zero,
// become zero.
CPU_ADAM_INLINE Vec expand(UInt bits) {
  const UInt one = uset1(kOneBits);
  return as_float(usub(umax(uadd(bits, bits), one), one));
}

constexpr int kRootShift = 19;
constexpr std::uint32_t kRootBase = kOneBits - (255u << kRootShift);

CPU_ADAM_INLINE Vec root_of(UInt code) {
  return as_float(uadd(ushl<kRootShift>(code), uset1(kRootBase)));
}
CPU_ADAM_INLINE UInt root_code(Vec ratio) {
  const UInt bits = umax(as_bits(ratio), uset1(kRootBase));
  return ushr<kRootShift>(uadd(bits, uset1((1u << (kRootShift - 1)) - kRootBase)));
}

CPU_ADAM_INLINE float read_float(const char* from) {
  float value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

CPU_ADAM_INLINE float float_from(std::uint32_t bits) {
  return read_float(reinterpret_cast<const char*>(&bits));
}

CPU_ADAM_INLINE void write_float(char* to, float value) { std::memcpy(to, &value, sizeof value); }

// What turns a block's largest value, given as bits, into its stored scale and codes.
struct BlockScale {
  float scale;
  float inverse;
  bool is_finite;

  CPU_ADAM_INLINE BlockScale(std::uint32_t largest_bits, float top) {
    is_finite = largest_bits < 0x7f800000u;
    const bool is_zero = largest_bits < 0x0d800000u;  // 2**-100
    scale = float_from(is_zero ? 0u : largest_bits);
    inverse = is_zero || !is_finite ? 0.0f : top / scale;
  }
};

// Where a block is in memory.
template <class Grad, class Target>
struct BlockPlace {
  char* master;
  const char* grad;
  char* exp_avg;
  char* exp_avg_sq;
  char* out;
  char* exp_avg_scale;
  char* exp_avg_sq_scale;

  // The block from element i of a span on.
  CPU_ADAM_INLINE BlockPlace(const cpu_adam::Span& span, std::int64_t i)
      : master(span.master + i * Target::kMasterBytes),
        grad(span.grad + i * Grad::kBytes),
        exp_avg(span.state[0] + i),
        exp_avg_sq(span.state[1] + i),
        out(span.out + i * Target::kOutBytes),
        exp_avg_scale(span.state[2] + i / kBlock * 4),
        exp_avg_sq_scale(span.state[3] + i / kBlock * 4) {}
};

constexpr int kBlockVectors = kBlock / kLanes;

// [Note: two halves of a block]
// What a block's codes are is known only when all its moments are. So a block is updated in two
// halves, and the second half of one block goes along with the first half of the next, vector by
// vector: the one has a square root, the other a division and most of the integer operations, and a
// CPU works on them side by side.
template <class Grad, class Target, bool kL2>
struct FirstHalf {
  Vec masters[kBlockVectors];
  Vec averages[kBlockVectors];
  Vec roots[kBlockVectors];
  UInt largest_average, largest_root;

  CPU_ADAM_INLINE void run(const CompactAdam<kL2>& adam, const BlockPlace<Grad, Target>& at) {
    // The moments' decay is in the factor that the codes are multiplied by anyway.
    const Vec unit = mul(set1(read_float(at.exp_avg_scale) * (1.0f / kExpAvgTop)), adam.beta1);
    const Vec root_unit = mul(set1(read_float(at.exp_avg_sq_scale)), sqrt_(adam.beta2));
    // Plain locals: members would go to memory and back for every vector.
    UInt largest = uset1(0);
    UInt root_largest = uset1(0);
    for (int k = 0; k < kBlockVectors; ++k) {
      const int i = k * kLanes;
      const Vec code = to_float(load_i8(at.exp_avg + i));
      Vec average = copy_sign(mul(unit, expand(as_bits(code))), code);
      const Vec old_root = mul(root_unit, root_of(load_u8(at.exp_avg_sq + i)));
      Vec square = mul(old_root, old_root);
      masters[k] = Target::load(at.master, at.out, i);
      adam.average(masters[k], Grad::load(at.grad + i * Grad::kBytes), average, square);
      averages[k] = average;
      roots[k] = sqrt_(square);
      // Numbers that are not negative are ordered like their bits, and a NaN is above them.
      largest = umax(largest, magnitude_bits(average));
      root_largest = umax(root_largest, magnitude_bits(roots[k]));
    }
    largest_average = largest;
    largest_root = root_largest;
  }
};

template <class Grad, class Target, bool kL2>
CPU_ADAM_INLINE void run_second_half(const CompactAdam<kL2>& adam,
                                     const BlockPlace<Grad, Target>& at,
                                     const FirstHalf<Grad, Target, kL2>& first) {
  const BlockScale average_scale(reduce_umax(first.largest_average), kExpAvgTop);
  const BlockScale root_scale(reduce_umax(first.largest_root), 1.0f);
  const Vec average_inverse = set1(average_scale.inverse);
  const Vec root_inverse = set1(root_scale.inverse);
  for (int k = 0; k < kBlockVectors; ++k) {
    Target::store(at.master, at.out, k * kLanes,
                  adam.apply(first.masters[k], first.averages[k], first.roots[k]));
  }
  for (int k = 0; k < kBlockVectors; ++k) {
    const int i = k * kLanes;
    const Vec average = mul(first.averages[k], average_inverse);
    const Vec root = mul(first.roots[k], root_inverse);
    store_8(at.exp_avg + i,
            to_int(copy_sign(as_float(compress(magnitude_bits(average))), average)));
    store_8(at.exp_avg_sq + i, root_code(root));
  }
  const bool is_finite = average_scale.is_finite && root_scale.is_finite;
  const float nan = float_from(0x7fc00000u);
  write_float(at.exp_avg_scale, is_finite ? average_scale.scale : nan);
  write_float(at.exp_avg_sq_scale, is_finite ? root_scale.scale : nan);
  if (!is_finite) {
    for (int i = 0; i < kBlock; ++i) at.exp_avg[i] = at.exp_avg_sq[i] = 0;
  }
}

// Whole blocks, from `begin` to `end`.
template <class Grad, class Target, bool kL2>
CPU_ADAM_INLINE void update_blocks(const CompactAdam<kL2>& adam, const cpu_adam::Span& span,
                                   std::int64_t begin, std::int64_t end) {
  using Place = BlockPlace<Grad, Target>;
  if (begin == end) return;
  FirstHalf<Grad, Target, kL2> halves[2];
  int current = 0;
  halves[0].run(adam, Place(span, begin));
  for (std::int64_t i = begin + kBlock; i < end; i += kBlock) {
    halves[1 - current].run(adam, Place(span, i));
    run_second_half(adam, Place(span, i - kBlock), halves[current]);
    current = 1 - current;
  }
  run_second_half(adam, Place(span, end - kBlock), halves[current]);
}

// The last elements of a tensor, fewer than a block: through a padded copy.
template <class Grad, class Target, bool kL2>
void update_last_block(const CompactAdam<kL2>& adam, const cpu_adam::Span& span, std::int64_t begin,
                       std::int64_t count) {
  const BlockPlace<Grad, Target> at(span, begin);
  char master[kBlock * Target::kMasterBytes] = {};
  char grad[kBlock * Grad::kBytes] = {};
  char exp_avg[kBlock] = {};
  char exp_avg_sq[kBlock] = {};
  char out[kBlock * Target::kOutBytes + 1] = {};
  copy_bytes(master, at.master, count * Target::kMasterBytes);
  copy_bytes(grad, at.grad, count * Grad::kBytes);
  copy_bytes(exp_avg, at.exp_avg, count);
  copy_bytes(exp_avg_sq, at.exp_avg_sq, count);
  if (Target::kReadsOut) copy_bytes(out, at.out, count * Target::kOutBytes);
  const cpu_adam::Span padded{
      master, grad, {exp_avg, exp_avg_sq, at.exp_avg_scale, at.exp_avg_sq_scale}, out, 0};
  update_blocks<Grad, Target>(adam, padded, 0, kBlock);
  copy_bytes(at.master, master, count * Target::kMasterBytes);
  copy_bytes(at.exp_avg, exp_avg, count);
  copy_bytes(at.exp_avg_sq, exp_avg_sq, count);
  if (Target::kOutBytes > 0) copy_bytes(at.out, out, count * Target::kOutBytes);
}

// `begin` is a multiple of kBlock: the driver sees to it.
template <class Grad, class Target, bool kL2>
CPU_ADAM_INLINE void update_int8(const cpu_adam::CompactAdamScalars& scalars,
                                 const cpu_adam::Span& span, std::int64_t begin, std::int64_t end) {
  const CompactAdam<kL2> adam(scalars);
  const std::int64_t last = begin + (end - begin) / kBlock * kBlock;
  update_blocks<Grad, Target>(adam, span, begin, last);
  if (last < end) update_last_block<Grad, Target>(adam, span, last, end - last);
}

template <class Grad, class Target>
void adam_int8_range(const cpu_adam::Span& span, std::int64_t begin, std::int64_t end,
                     const void* scalars, bool) {
  const auto& s = *static_cast<const cpu_adam::CompactAdamScalars*>(scalars);
  if (s.l2 != 0.0f) {
    update_int8<Grad, Target, true>(s, span, begin, end);
  } else {
    update_int8<Grad, Target, false>(s, span, begin, end);
  }
}

// [Note: one sum for all]
// Sixteen sums in double precision, of every sixteenth element each, then added in pairs: the same
// for every vector length. A square of an fp32 number is exact in double, and a sum of fewer than
// 2**700 of them finite; so the sum is finite if and only if every element is.
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

// A RuleTable of `function`, in the order of DType; `split` is its variant for a split master.
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
#define CPU_ADAM_KERNEL_TABLE(name)                                                          \
  {                                                                                          \
    name, CPU_ADAM_SPLIT_RULE_TABLE(adam_range), CPU_ADAM_SPLIT_RULE_TABLE(adam_int8_range), \
        CPU_ADAM_SPLIT_RULE_TABLE(adam_bfloat16_range), CPU_ADAM_RULE_TABLE(adagrad_range),  \
        CPU_ADAM_RULE_TABLE(lion_range), CPU_ADAM_RULE_TABLE(sgd_range),                     \
        CPU_ADAM_RULE_TABLE(sgd_plain_range), {                                              \
      sum_of_squares<F32>, sum_of_squares<BF16>, sum_of_squares<F16>                         \
    }                                                                                        \
  }
