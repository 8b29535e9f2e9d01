// Part of kernel.inl: Adam with 8-bit states, one block at a time.

// [Note: 8-bit states]
// Blocks of kBlockNumel elements share a scale, their largest magnitude (block-wise quantization:
// Dettmers et al. 2021, arXiv 2110.02861). The states are the first moment and the square root of
// the second moment. The encodings keep small values precise next to large ones. The code of a
// first moment x is compress(x * top / scale), rounded to an integer. `compress` approximates the
// square root within 6.1%. It halves the exponent and is linear in between: it shifts the bits of
// an fp32 number right by one and adds half of the bits of 1.0. It takes two integer operations
// instead of a square root's dozen cycles, and its inverse is exact and equally cheap. `top`
// compresses to the largest code, 127. The code of a second moment is an 8-bit floating-point
// number without a sign or a zero, made of the leading bits of the root's ratio to the block's
// largest root. There are 16 codes per power of two, and 255 means the largest root. No code means
// zero, because a denominator of zero would make the update explode. The scale is exact fp32. When
// moments decay, the scale decays and the codes need not change. A block whose largest value is
// below 2**-100 is stored as zero. A block with a non-finite moment gets a scale of NaN, which
// marks its elements as lost.
constexpr int kBlock = static_cast<int>(cpu_adam::kBlockNumel);
constexpr float kExpAvgUnit = 1.0f / 16128.0f;
// Slightly less than 16128, which compresses to 127: no rounding mode may produce 128.
constexpr float kExpAvgTop = 16127.0f;
constexpr std::uint32_t kOneBits = 0x3f800000u;

// `bits` are those of a non-negative float.
CPU_ADAM_INLINE UInt compress(UInt bits) { return uadd(ushr<1>(bits), uset1(kOneBits / 2)); }

// Inverts `compress` for the magnitude of a float: the shift removes the sign. Zero, and the value
// that `compress` returns for zero, give zero.
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

// Scale of a block, and the factor that maps values to codes.
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

// Addresses of a block's arrays.
template <class Grad, class Target>
struct BlockPlace {
  char* master;
  const char* grad;
  char* exp_avg;
  char* exp_avg_sq;
  char* out;
  char* exp_avg_scale;
  char* exp_avg_sq_scale;

  // The block starts at element i of the span.
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
// A block's codes depend on its largest moment, so a block is updated in two halves. The second
// half of each block runs after the first half of the next block, on which it does not depend. The
// first half contains the square root, the second half contains the division and most integer
// operations. An out-of-order CPU can therefore overlap the two.
template <class Grad, class Target, bool kL2>
struct FirstHalf {
  Vec masters[kBlockVectors];
  Vec averages[kBlockVectors];
  Vec roots[kBlockVectors];
  UInt largest_average, largest_root;

  CPU_ADAM_INLINE void run(const CompactAdam<kL2>& adam, const BlockPlace<Grad, Target>& at) {
    // Apply the decay of the moments through the factors that multiply the codes.
    const Vec unit = mul(set1(read_float(at.exp_avg_scale) * kExpAvgUnit), adam.beta1);
    const Vec root_unit = mul(set1(read_float(at.exp_avg_sq_scale)), sqrt_(adam.beta2));
    // Local variables, because members would be stored to memory for every vector.
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
      // Bits of non-negative floats have the order of the floats, with NaN as the largest.
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

// Updates the whole blocks from `begin` to `end`.
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

// Updates the last elements of a tensor, fewer than a block, in a zero-padded copy.
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

// The driver ensures that `begin` is a multiple of kBlock.
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
