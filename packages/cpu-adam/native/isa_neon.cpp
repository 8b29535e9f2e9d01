// NEON of 64-bit Arm: eight elements at a time, in two registers, so that eight 16-bit elements
// fill one register when they are stored. Every such processor has it: no flag, no detection.

#include <arm_neon.h>

#include "kernels.h"

#define CPU_ADAM_INLINE inline __attribute__((always_inline))

namespace {

struct Vec {
  float32x4_t low, high;
};
constexpr int kLanes = 8;
constexpr bool kCanStream = false;  // no intrinsic stores past the caches
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

// As bytes, so that an address needs no alignment.
CPU_ADAM_INLINE uint8x16_t load_16_bytes(const char* from) {
  return vld1q_u8(reinterpret_cast<const std::uint8_t*>(from));
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
  static CPU_ADAM_INLINE uint16x4_t round_4(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) {
    const uint16x8_t halves = vcombine_u16(round_4(x.low), round_4(x.high));
    store_16_bytes(to, vreinterpretq_u8_u16(halves));
  }
};

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

#include "kernel.inl"

}  // namespace

namespace cpu_adam {
extern const KernelTable kNeonTable = CPU_ADAM_KERNEL_TABLE("neon");
}
