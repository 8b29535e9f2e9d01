// Scalar kernels for any CPU: the simplest implementation, and the fallback.

#include <cmath>
#include <cstring>

#include "kernels.h"

namespace {

using Vec = float;
constexpr int kLanes = 1;
constexpr int kVectorsAtOnce = 1;
constexpr int kStreamBytes = 0;
[[maybe_unused]] CPU_ADAM_INLINE void stream_fence() {}

CPU_ADAM_INLINE std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

CPU_ADAM_INLINE float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

CPU_ADAM_INLINE Vec set1(float x) { return x; }
CPU_ADAM_INLINE Vec add(Vec a, Vec b) { return a + b; }
CPU_ADAM_INLINE Vec sub(Vec a, Vec b) { return a - b; }
CPU_ADAM_INLINE Vec mul(Vec a, Vec b) { return a * b; }
CPU_ADAM_INLINE Vec div(Vec a, Vec b) { return a / b; }

#if defined(_MSC_VER)
CPU_ADAM_INLINE Vec sqrt_(Vec a) { return std::sqrt(a); }
#else
CPU_ADAM_INLINE Vec sqrt_(Vec a) { return __builtin_sqrtf(a); }
#endif

#if defined(__FP_FAST_FMAF)
CPU_ADAM_INLINE Vec fma_(Vec a, Vec b, Vec c) { return __builtin_fmaf(a, b, c); }
#else
// Computes fma without the instruction, because libm's software fma is ten times slower. The
// product is exact in double precision. The sum is rounded to odd, which makes the final rounding
// to float correct (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
// Knuth's TwoSum gives the error of the sum.
CPU_ADAM_INLINE Vec fma_(Vec a, Vec b, Vec c) {
  const double product = static_cast<double>(a) * static_cast<double>(b);
  const double addend = c;
  const double sum = product + addend;
  const double back = sum - product;
  const double error = (product - (sum - back)) + (addend - back);
  std::int64_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  // For infinite operands the error is NaN, both comparisons are false, and the sum is unchanged.
  if (((error > 0.0) | (error < 0.0)) & ((bits & 1) == 0)) {
    bits += ((error > 0.0) == (sum > 0.0)) ? 1 : -1;
  }
  double odd;
  std::memcpy(&odd, &bits, sizeof odd);
  return static_cast<float>(odd);
}
#endif
CPU_ADAM_INLINE Vec nfma(Vec a, Vec b, Vec c) { return fma_(-a, b, c); }
CPU_ADAM_INLINE Vec copy_sign(Vec x, Vec y) {
  return float_of((bits_of(x) & 0x7fffffffu) | (bits_of(y) & 0x80000000u));
}

struct F32 {
  static constexpr int kBytes = 4;
  static CPU_ADAM_INLINE Vec load(const char* from) {
    float x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) { std::memcpy(to, &x, sizeof x); }
};

struct BF16 {
  static constexpr int kBytes = 2;
  static CPU_ADAM_INLINE Vec load(const char* from) {
    std::uint16_t half;
    std::memcpy(&half, from, sizeof half);
    return float_of(static_cast<std::uint32_t>(half) << 16);
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) {
    const std::uint32_t bits = bits_of(x);
    const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const std::uint32_t quiet = bits | 0x00400000u;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const std::uint16_t half = static_cast<std::uint16_t>((is_nan ? quiet : rounded) >> 16);
    std::memcpy(to, &half, sizeof half);
  }
};

struct F16 {
  static constexpr int kBytes = 2;
  static CPU_ADAM_INLINE Vec load(const char* from) {
    std::uint16_t half;
    std::memcpy(&half, from, sizeof half);
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    const std::uint32_t exponent = (half >> 10) & 0x1fu;
    const std::uint32_t fraction = half & 0x3ffu;
    if (exponent == 0) {
      const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
      return float_of(bits_of(magnitude) | sign);
    }
    if (exponent == 31) {
      const std::uint32_t quiet = fraction != 0 ? 0x00400000u : 0u;
      return float_of(sign | 0x7f800000u | (fraction << 13) | quiet);
    }
    return float_of(sign | ((exponent + 112u) << 23) | (fraction << 13));
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) {
    const std::uint32_t bits = bits_of(x);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    std::uint32_t half;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);  // NaN: quiet, keeping the top of the payload
    } else if (magnitude >= 0x47800000u) {
      half = 0x7c00u;  // 65536 and above: infinity
    } else if (magnitude >= 0x38800000u) {
      // A normal half. A carry into the exponent is correct, also if the result is infinity.
      half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    } else {
      // A subnormal half is a multiple of 2**-24, which is one ulp of 0.5f.
      half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    }
    const std::uint16_t result = static_cast<std::uint16_t>(sign | half);
    std::memcpy(to, &result, sizeof result);
  }
};

// Integer vector operations start with `i` if signed, otherwise with `u`.
using UInt = std::uint32_t;

CPU_ADAM_INLINE UInt as_bits(Vec x) { return bits_of(x); }
CPU_ADAM_INLINE Vec as_float(UInt x) { return float_of(x); }
CPU_ADAM_INLINE Vec to_float(UInt x) { return static_cast<float>(static_cast<std::int32_t>(x)); }
// Rounds numbers from -255 to 255 to integers in the caller's rounding mode. Adding 2**23 makes the
// last bit of the sum worth 1. The constant has the sign of x, otherwise rounding towards zero
// would round negative numbers down.
CPU_ADAM_INLINE UInt to_int(Vec x) {
  const std::uint32_t sign = bits_of(x) & 0x80000000u;
  const std::uint32_t big = sign | bits_of(0x1p23f);
  const std::uint32_t magnitude = bits_of(x + float_of(big)) ^ big;
  return sign != 0 ? 0u - magnitude : magnitude;
}
CPU_ADAM_INLINE UInt uset1(std::uint32_t x) { return x; }
CPU_ADAM_INLINE UInt lanes() { return 0; }
CPU_ADAM_INLINE UInt uadd(UInt a, UInt b) { return a + b; }
CPU_ADAM_INLINE UInt usub(UInt a, UInt b) { return a - b; }
CPU_ADAM_INLINE UInt umul(UInt a, UInt b) { return a * b; }
CPU_ADAM_INLINE UInt uand(UInt a, UInt b) { return a & b; }
CPU_ADAM_INLINE UInt uor(UInt a, UInt b) { return a | b; }
CPU_ADAM_INLINE UInt uxor(UInt a, UInt b) { return a ^ b; }
template <int kBits>
CPU_ADAM_INLINE UInt ushl(UInt x) {
  return x << kBits;
}
template <int kBits>
CPU_ADAM_INLINE UInt ushr(UInt x) {
  return x >> kBits;
}
CPU_ADAM_INLINE UInt umax(UInt a, UInt b) { return a > b ? a : b; }
CPU_ADAM_INLINE std::uint32_t reduce_umax(UInt x) { return x; }
CPU_ADAM_INLINE UInt igreater(UInt a, UInt b) {
  return static_cast<std::int32_t>(a) > static_cast<std::int32_t>(b) ? 0xffffffffu : 0u;
}
CPU_ADAM_INLINE UInt is_ordered(Vec x) { return x == x ? 0xffffffffu : 0u; }
CPU_ADAM_INLINE UInt if_nonzero(UInt test, UInt a, UInt b) {
  return (test & 0x7fffffffu) != 0 ? a : b;
}
template <class Either>
CPU_ADAM_INLINE Either if_ordered(Vec test, Either a, Either b) {
  return test == test ? a : b;
}

template <class Integer>
CPU_ADAM_INLINE UInt load_integer(const char* from) {
  Integer value;
  std::memcpy(&value, from, sizeof value);
  return static_cast<UInt>(static_cast<std::int32_t>(value));
}
CPU_ADAM_INLINE UInt load_u8(const char* from) { return load_integer<std::uint8_t>(from); }
CPU_ADAM_INLINE UInt load_i8(const char* from) { return load_integer<std::int8_t>(from); }
CPU_ADAM_INLINE UInt load_upper_16(const char* from) {
  return load_integer<std::uint16_t>(from) << 16;
}
CPU_ADAM_INLINE UInt load_i16(const char* from) { return load_integer<std::int16_t>(from); }
CPU_ADAM_INLINE void store_8(char* to, UInt x) {
  const std::uint8_t value = static_cast<std::uint8_t>(x);
  std::memcpy(to, &value, sizeof value);
}
CPU_ADAM_INLINE void store_16(char* to, UInt x) {
  const std::uint16_t value = static_cast<std::uint16_t>(x);
  std::memcpy(to, &value, sizeof value);
}
CPU_ADAM_INLINE void store_upper_16(char* to, UInt x) { store_16(to, x >> 16); }

using Doubles = double;
CPU_ADAM_INLINE Doubles zero_doubles() { return 0.0; }
CPU_ADAM_INLINE Doubles add_square(Doubles sum, Vec x) {
  return sum + static_cast<double>(x) * static_cast<double>(x);
}
CPU_ADAM_INLINE void store_doubles(double* to, Doubles x) { *to = x; }

#include "kernel.inl"

}  // namespace

namespace cpu_adam {
extern const KernelTable kScalarTable = CPU_ADAM_KERNEL_TABLE("scalar");
}
