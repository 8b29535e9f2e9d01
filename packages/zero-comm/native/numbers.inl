// Conversions between numbers and their bits without branches, so that compilers vectorize them.
// Included by codec.inl, in the anonymous namespace of each instruction set's file.

ZERO_COMM_INLINE std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

ZERO_COMM_INLINE float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr std::uint32_t kSign = 0x80000000u;
constexpr std::uint32_t kInfinity = 0x7f800000u;
constexpr std::uint32_t kNan = 0x7fc00000u;

// Rounds |x| < 2**22 to the nearest integer, ties to even. The low bits of the sum are the integer
// in two's complement.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2**23
ZERO_COMM_INLINE std::int32_t rounded(float x) {
  return static_cast<std::int32_t>(bits_of(x + kRounder)) - 0x4b400000;
}

ZERO_COMM_INLINE float load(const float* x) { return *x; }
ZERO_COMM_INLINE float load(const std::uint16_t* bfloat16) {
  return float_of(static_cast<std::uint32_t>(*bfloat16) << 16);
}

// Rounds to bfloat16, ties to even. NaN must have zeros in its lower half.
ZERO_COMM_INLINE std::uint16_t to_bfloat16_unless_nan(float x) {
  const std::uint32_t bits = bits_of(x);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

ZERO_COMM_INLINE std::uint16_t to_bfloat16(float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t rounded_bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & ~kSign) > kInfinity;
  return static_cast<std::uint16_t>(is_nan ? kNan >> 16 : rounded_bits);
}

ZERO_COMM_INLINE float half_to_float(std::uint16_t half) {
  const std::uint32_t magnitude = half & 0x7fffu;
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t shifted = magnitude << 13;
  const float subnormal = float_of(shifted + (113u << 23)) - 6.103515625e-05f;  // 2**-14
  std::uint32_t bits = magnitude < 0x400u ? bits_of(subnormal) : shifted + (112u << 23);
  bits = magnitude >= 0x7c00u ? shifted | kInfinity : bits;
  return float_of(bits | sign);
}

// Rounds to fp16, ties to even.
ZERO_COMM_INLINE std::uint16_t float_to_half(float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t magnitude = bits & ~kSign;
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  std::uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;  // 65536 and above
  half = magnitude > kInfinity ? 0x7e00u : half;
  return static_cast<std::uint16_t>(half | ((bits >> 16) & 0x8000u));
}

ZERO_COMM_INLINE void halves_to_floats(const std::uint16_t* ZERO_COMM_RESTRICT x,
                                       float* ZERO_COMM_RESTRICT out, std::int64_t count) {
  std::int64_t i = 0;
#if defined(ZERO_COMM_F16C)
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
  }
#endif
  for (; i < count; ++i) out[i] = half_to_float(x[i]);
}

ZERO_COMM_INLINE void floats_to_halves(const float* ZERO_COMM_RESTRICT x,
                                       std::uint16_t* ZERO_COMM_RESTRICT out, std::int64_t count) {
  std::int64_t i = 0;
#if defined(ZERO_COMM_F16C)
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
  }
#endif
  for (; i < count; ++i) out[i] = float_to_half(x[i]);
}

// `mix` and `u` of [Note: stochastic rounding]. `seed` is mixed already.
ZERO_COMM_INLINE std::uint32_t mix(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}
ZERO_COMM_INLINE float uniform(std::uint32_t index, std::uint32_t seed) {
  return static_cast<float>(static_cast<std::int32_t>(mix(index + seed) >> 8)) *
         5.9604644775390625e-08f;
}

// Codes of the fp8 types, see [Note: symmetric codes].
template <int kKind>
struct Float8 {
  static constexpr int kMantissaBits = kKind == kE4M3 ? 3 : 2;
  static constexpr std::uint32_t kSmallestExponent = kKind == kE4M3 ? 121 : 113;  // biased by 127
  static constexpr std::int32_t kTopCode = kKind == kE4M3 ? 0x7e : 0x7b;
  static constexpr float kTop = kKind == kE4M3 ? 448.0f : 57344.0f;

  template <bool kHasNoise>
  static ZERO_COMM_INLINE std::uint8_t encode(float v, float u) {
    const std::uint32_t bits = bits_of(v);
    float magnitude = float_of(bits & ~kSign);
    magnitude = magnitude < kTop ? magnitude : kTop;
    const std::uint32_t own = bits_of(magnitude) >> 23;
    const std::uint32_t exponent = own > kSmallestExponent ? own : kSmallestExponent;
    // |v| / q is exact as a product, because q is a power of two.
    const float count = magnitude * float_of((254u + kMantissaBits - exponent) << 23);
    const std::int32_t n = kHasNoise ? static_cast<std::int32_t>(count + u) : rounded(count);
    std::int32_t code =
        static_cast<std::int32_t>((exponent - kSmallestExponent) << kMantissaBits) + n;
    code = code < kTopCode ? code : kTopCode;
    const std::int32_t sign = code == 0 ? 0 : static_cast<std::int32_t>((bits >> 24) & 0x80u);
    return static_cast<std::uint8_t>(code | sign);
  }

  static ZERO_COMM_INLINE float decode(std::uint8_t code) {
    constexpr int kShift = 23 - kMantissaBits;
    constexpr std::uint32_t kBias = (kSmallestExponent - 1) << 23;
    constexpr std::uint32_t kLargest = kKind == kE4M3 ? 0x7eu : 0x7cu;  // 0x7c is Inf
    const std::uint32_t magnitude = code & 0x7fu;
    const std::uint32_t shifted = magnitude << kShift;
    const float subnormal =
        float_of(shifted + (kSmallestExponent << 23)) - float_of(kSmallestExponent << 23);
    std::uint32_t bits = magnitude < (1u << kMantissaBits) ? bits_of(subnormal) : shifted + kBias;
    if (kKind == kE5M2) bits = magnitude == kLargest ? kInfinity : bits;
    bits = magnitude > kLargest ? kNan : bits;
    return float_of(bits | static_cast<std::uint32_t>(code & 0x80u) << 24);
  }
};
