// Kernels for NEON of 64-bit Arm. They process 8 elements at a time in two registers, so that 8
// 16-bit results fill one register. Every 64-bit Arm CPU has NEON, so no compiler flag or detection
// is needed.

#include <arm_neon.h>

#include <cstring>

#include "kernels.h"

namespace {

struct Vec {
  float32x4_t low, high;
};
constexpr int kLanes = 8;
constexpr int kVectorsAtOnce = 4;
constexpr int kStreamBytes = 0;  // no intrinsic for non-temporal stores
[[maybe_unused]] CPU_ADAM_INLINE void stream_fence() {}

CPU_ADAM_INLINE Vec set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
CPU_ADAM_INLINE Vec add(Vec a, Vec b) {
  return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
}
CPU_ADAM_INLINE Vec sub(Vec a, Vec b) {
  return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)};
}
CPU_ADAM_INLINE Vec mul(Vec a, Vec b) {
  return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)};
}
CPU_ADAM_INLINE Vec div(Vec a, Vec b) {
  return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)};
}
CPU_ADAM_INLINE Vec sqrt_(Vec a) { return {vsqrtq_f32(a.low), vsqrtq_f32(a.high)}; }
CPU_ADAM_INLINE Vec fma_(Vec a, Vec b, Vec c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
CPU_ADAM_INLINE Vec nfma(Vec a, Vec b, Vec c) {
  return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)};
}
CPU_ADAM_INLINE float32x4_t if_ordered_4(float32x4_t test, float32x4_t a, float32x4_t b) {
  return vbslq_f32(vceqq_f32(test, test), a, b);
}
CPU_ADAM_INLINE Vec if_ordered(Vec test, Vec a, Vec b) {
  return {if_ordered_4(test.low, a.low, b.low), if_ordered_4(test.high, a.high, b.high)};
}
CPU_ADAM_INLINE float32x4_t copy_sign_4(float32x4_t x, float32x4_t y) {
  return vbslq_f32(vdupq_n_u32(0x80000000u), y, x);
}
CPU_ADAM_INLINE Vec copy_sign(Vec x, Vec y) {
  return {copy_sign_4(x.low, y.low), copy_sign_4(x.high, y.high)};
}

// Loads bytes, because byte loads need no alignment.
CPU_ADAM_INLINE uint8x16_t load_16_bytes(const char* from) {
  return vld1q_u8(reinterpret_cast<const std::uint8_t*>(from));
}

CPU_ADAM_INLINE uint8x8_t load_8_bytes(const char* from) {
  return vld1_u8(reinterpret_cast<const std::uint8_t*>(from));
}

CPU_ADAM_INLINE void store_16_bytes(char* to, uint8x16_t bytes) {
  vst1q_u8(reinterpret_cast<std::uint8_t*>(to), bytes);
}

struct F32 {
  static constexpr int kBytes = 4;
  static CPU_ADAM_INLINE Vec load(const char* from) {
    return {vreinterpretq_f32_u8(load_16_bytes(from)),
            vreinterpretq_f32_u8(load_16_bytes(from + 16))};
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) {
    store_16_bytes(to, vreinterpretq_u8_f32(x.low));
    store_16_bytes(to + 16, vreinterpretq_u8_f32(x.high));
  }
};

struct BF16 {
  static constexpr int kBytes = 2;
  static CPU_ADAM_INLINE float32x4_t widen(uint16x4_t halves) {
    return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
  }
  static CPU_ADAM_INLINE Vec load(const char* from) {
    const uint16x8_t halves = vreinterpretq_u16_u8(load_16_bytes(from));
    return {widen(vget_low_u16(halves)), widen(vget_high_u16(halves))};
  }
  // A NaN is not rounded. Arithmetic results are quiet NaNs, which remain NaNs without their low
  // bits.
  static CPU_ADAM_INLINE uint16x4_t round_4(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vandq_u32(vaddq_u32(odd, vdupq_n_u32(0x7fff)), vceqq_f32(x, x));
    return vshrn_n_u32(vaddq_u32(bits, up), 16);
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) {
    const uint16x8_t halves = vcombine_u16(round_4(x.low), round_4(x.high));
    store_16_bytes(to, vreinterpretq_u8_u16(halves));
  }
};

// Subnormal halves are never flushed. Stores round in the caller's mode, whereas x86 rounds to
// nearest, which would take many instructions here.
struct F16 {
  static constexpr int kBytes = 2;
  static CPU_ADAM_INLINE Vec load(const char* from) {
    const float16x8_t halves = vreinterpretq_f16_u8(load_16_bytes(from));
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) {
    const float16x8_t halves = vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high);
    store_16_bytes(to, vreinterpretq_u8_f16(halves));
  }
};

// 8 32-bit integers. Operations start with `i` if signed, otherwise with `u`.
struct UInt {
  uint32x4_t low, high;
};

CPU_ADAM_INLINE int32x4_t as_signed(uint32x4_t x) { return vreinterpretq_s32_u32(x); }
CPU_ADAM_INLINE uint32x4_t as_unsigned(int32x4_t x) { return vreinterpretq_u32_s32(x); }

CPU_ADAM_INLINE UInt as_bits(Vec x) {
  return {vreinterpretq_u32_f32(x.low), vreinterpretq_u32_f32(x.high)};
}
CPU_ADAM_INLINE Vec as_float(UInt x) {
  return {vreinterpretq_f32_u32(x.low), vreinterpretq_f32_u32(x.high)};
}
CPU_ADAM_INLINE Vec to_float(UInt x) {
  return {vcvtq_f32_s32(as_signed(x.low)), vcvtq_f32_s32(as_signed(x.high))};
}
// No conversion instruction uses the caller's rounding mode. Round to an integral float first,
// whose conversion is exact.
CPU_ADAM_INLINE UInt to_int(Vec x) {
  return {as_unsigned(vcvtq_s32_f32(vrndiq_f32(x.low))),
          as_unsigned(vcvtq_s32_f32(vrndiq_f32(x.high)))};
}
CPU_ADAM_INLINE UInt uset1(std::uint32_t x) { return {vdupq_n_u32(x), vdupq_n_u32(x)}; }
CPU_ADAM_INLINE UInt lanes() {
  static constexpr std::uint32_t kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7};
  return {vld1q_u32(kNumbers), vld1q_u32(kNumbers + 4)};
}
CPU_ADAM_INLINE UInt uadd(UInt a, UInt b) {
  return {vaddq_u32(a.low, b.low), vaddq_u32(a.high, b.high)};
}
CPU_ADAM_INLINE UInt usub(UInt a, UInt b) {
  return {vsubq_u32(a.low, b.low), vsubq_u32(a.high, b.high)};
}
CPU_ADAM_INLINE UInt umul(UInt a, UInt b) {
  return {vmulq_u32(a.low, b.low), vmulq_u32(a.high, b.high)};
}
CPU_ADAM_INLINE UInt uand(UInt a, UInt b) {
  return {vandq_u32(a.low, b.low), vandq_u32(a.high, b.high)};
}
CPU_ADAM_INLINE UInt uor(UInt a, UInt b) {
  return {vorrq_u32(a.low, b.low), vorrq_u32(a.high, b.high)};
}
CPU_ADAM_INLINE UInt uxor(UInt a, UInt b) {
  return {veorq_u32(a.low, b.low), veorq_u32(a.high, b.high)};
}
CPU_ADAM_INLINE UInt umax(UInt a, UInt b) {
  return {vmaxq_u32(a.low, b.low), vmaxq_u32(a.high, b.high)};
}
CPU_ADAM_INLINE UInt igreater(UInt a, UInt b) {
  return {vcgtq_s32(as_signed(a.low), as_signed(b.low)),
          vcgtq_s32(as_signed(a.high), as_signed(b.high))};
}
template <int kBits>
CPU_ADAM_INLINE UInt ushl(UInt x) {
  return {vshlq_n_u32(x.low, kBits), vshlq_n_u32(x.high, kBits)};
}
template <int kBits>
CPU_ADAM_INLINE UInt ushr(UInt x) {
  return {vshrq_n_u32(x.low, kBits), vshrq_n_u32(x.high, kBits)};
}
CPU_ADAM_INLINE UInt is_ordered(Vec x) {
  return {vceqq_f32(x.low, x.low), vceqq_f32(x.high, x.high)};
}
CPU_ADAM_INLINE UInt if_ordered(Vec test, UInt a, UInt b) {
  return as_bits(if_ordered(test, as_float(a), as_float(b)));
}
CPU_ADAM_INLINE uint32x4_t if_nonzero_4(uint32x4_t test, uint32x4_t a, uint32x4_t b) {
  return vbslq_u32(vtstq_u32(test, vdupq_n_u32(0x7fffffffu)), a, b);
}
CPU_ADAM_INLINE UInt if_nonzero(UInt test, UInt a, UInt b) {
  return {if_nonzero_4(test.low, a.low, b.low), if_nonzero_4(test.high, a.high, b.high)};
}
CPU_ADAM_INLINE std::uint32_t reduce_umax(UInt x) { return vmaxvq_u32(vmaxq_u32(x.low, x.high)); }

CPU_ADAM_INLINE UInt widen_unsigned(uint16x8_t halves) {
  return {vmovl_u16(vget_low_u16(halves)), vmovl_high_u16(halves)};
}
CPU_ADAM_INLINE UInt widen_signed(int16x8_t halves) {
  return {as_unsigned(vmovl_s16(vget_low_s16(halves))), as_unsigned(vmovl_high_s16(halves))};
}
CPU_ADAM_INLINE UInt load_u8(const char* from) {
  return widen_unsigned(vmovl_u8(load_8_bytes(from)));
}
CPU_ADAM_INLINE UInt load_i8(const char* from) {
  return widen_signed(vmovl_s8(vreinterpret_s8_u8(load_8_bytes(from))));
}
CPU_ADAM_INLINE UInt load_upper_16(const char* from) {
  const uint16x8_t halves = vreinterpretq_u16_u8(load_16_bytes(from));
  return {vshll_n_u16(vget_low_u16(halves), 16), vshll_n_u16(vget_high_u16(halves), 16)};
}
CPU_ADAM_INLINE UInt load_i16(const char* from) {
  return widen_signed(vreinterpretq_s16_u8(load_16_bytes(from)));
}
CPU_ADAM_INLINE uint16x8_t low_halves(UInt x) { return vmovn_high_u32(vmovn_u32(x.low), x.high); }
CPU_ADAM_INLINE void store_8(char* to, UInt x) {
  vst1_u8(reinterpret_cast<std::uint8_t*>(to), vmovn_u16(low_halves(x)));
}
CPU_ADAM_INLINE void store_16(char* to, UInt x) {
  store_16_bytes(to, vreinterpretq_u8_u16(low_halves(x)));
}
CPU_ADAM_INLINE void store_upper_16(char* to, UInt x) {
  const uint16x8_t halves = vshrn_high_n_u32(vshrn_n_u32(x.low, 16), x.high, 16);
  store_16_bytes(to, vreinterpretq_u8_u16(halves));
}

struct Doubles {
  float64x2_t part[4];
};
CPU_ADAM_INLINE Doubles zero_doubles() {
  const float64x2_t zero = vdupq_n_f64(0.0);
  return {{zero, zero, zero, zero}};
}
CPU_ADAM_INLINE Doubles add_square(Doubles sum, Vec x) {
  const float64x2_t values[4] = {vcvt_f64_f32(vget_low_f32(x.low)), vcvt_high_f64_f32(x.low),
                                 vcvt_f64_f32(vget_low_f32(x.high)), vcvt_high_f64_f32(x.high)};
  for (int k = 0; k < 4; ++k) sum.part[k] = vfmaq_f64(sum.part[k], values[k], values[k]);
  return sum;
}
CPU_ADAM_INLINE void store_doubles(double* to, Doubles x) {
  for (int k = 0; k < 4; ++k) vst1q_f64(to + 2 * k, x.part[k]);
}

#include "kernel.inl"

}  // namespace

namespace cpu_adam {
extern const KernelTable kNeonTable = CPU_ADAM_KERNEL_TABLE("neon");
}
