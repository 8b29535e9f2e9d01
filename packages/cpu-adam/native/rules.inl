// Part of kernel.inl: the update rules.

// [Note: division by a constant]
// Divides every element by the same number, correctly rounded like `div` but cheaper: multiply by
// the rounded reciprocal y to get q, then add y times the error a - b * q (as in Markstein's
// theorem, 1990, although q need not be adjacent to the quotient). Proof: let a and b be 24-bit
// numbers in [1, 2). Rounding can fail only near a midpoint of two floats. a / b stays at least
// 2**-48 / b away from midpoints if a < b, and twice that otherwise. y is off by at most 2**-25, so
// a * y is off by less than one unit, 2**-24, before rounding. Near a midpoint, q is therefore half
// a unit off, never one and a half. The error a - b * q is about b * 2**-25, exact in 24 bits. The
// correction is then off by at most b * 2**-50 (twice that if a >= b), which is less than the
// distance, because b < 2. No intermediate result may underflow: a square root is at least 2**-75.
// For an infinity the error is NaN, and the first product is returned.
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
// A rule updates a vector in two halves. `begin` updates the states, and the master weight as far
// as possible. `finish` returns the new master weight. Pending contains the results of long-latency
// operations (a square root) between the halves.
struct RootPending {
  Vec numerator, root;
};

// Adam (Kingma and Ba 2015) and AdamW (Loshchilov and Hutter 2019), in the operation order of
// torch.optim's for-loop; see reference.py. kL2: weight decay is added to the gradient.
// kLerpFromGrad: interpolate the first moment starting from the gradient (1 - beta1 >= 0.5).
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

// AdamW and Adam with compact states. The formulas are the same, but results need not match torch's
// last bit, so products of constants are precomputed. kL2: weight decay is added to the gradient.
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

  // Updates the moments, which are already multiplied by their decay.
  CPU_ADAM_INLINE void average(Vec master, Vec grad, Vec& exp_avg, Vec& exp_avg_sq) const {
    if (kL2) grad = fma_(master, l2, mul(grad, grad_scale));
    exp_avg = fma_(one_minus_beta1, grad, exp_avg);
    const Vec part = mul(one_minus_beta2_sqrt, grad);
    exp_avg_sq = fma_(part, part, exp_avg_sq);
  }

  // Returns the new master weight. `root` is the square root of the second moment.
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
    // Compute -lr * sign(direction) on bits: 0 for 0, NaN for NaN.
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
