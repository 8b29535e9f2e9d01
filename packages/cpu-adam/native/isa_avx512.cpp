// Kernels for AVX-512 F, and BW for 16-bit elements. They process 32 elements at a time in two
// registers, so that 32 16-bit results fill one register. The bf16 instructions of later CPUs are
// not used, because they flush subnormal numbers.

#include <immintrin.h>

#include <cstring>

#include "kernels.h"

namespace {

struct Vec {
  __m512 low, high;
};
constexpr int kLanes = 32;
constexpr int kVectorsAtOnce = 2;
constexpr int kStreamBytes = 64;

CPU_ADAM_INLINE void stream_fence() { _mm_sfence(); }

CPU_ADAM_INLINE Vec set1(float x) { return {_mm512_set1_ps(x), _mm512_set1_ps(x)}; }
CPU_ADAM_INLINE Vec add(Vec a, Vec b) {
  return {_mm512_add_ps(a.low, b.low), _mm512_add_ps(a.high, b.high)};
}
CPU_ADAM_INLINE Vec sub(Vec a, Vec b) {
  return {_mm512_sub_ps(a.low, b.low), _mm512_sub_ps(a.high, b.high)};
}
CPU_ADAM_INLINE Vec mul(Vec a, Vec b) {
  return {_mm512_mul_ps(a.low, b.low), _mm512_mul_ps(a.high, b.high)};
}
CPU_ADAM_INLINE Vec div(Vec a, Vec b) {
  return {_mm512_div_ps(a.low, b.low), _mm512_div_ps(a.high, b.high)};
}
CPU_ADAM_INLINE Vec sqrt_(Vec a) { return {_mm512_sqrt_ps(a.low), _mm512_sqrt_ps(a.high)}; }
CPU_ADAM_INLINE Vec fma_(Vec a, Vec b, Vec c) {
  return {_mm512_fmadd_ps(a.low, b.low, c.low), _mm512_fmadd_ps(a.high, b.high, c.high)};
}
CPU_ADAM_INLINE Vec nfma(Vec a, Vec b, Vec c) {
  return {_mm512_fnmadd_ps(a.low, b.low, c.low), _mm512_fnmadd_ps(a.high, b.high, c.high)};
}
CPU_ADAM_INLINE __mmask16 ordered_mask(__m512 x) { return _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q); }
CPU_ADAM_INLINE Vec if_ordered(Vec test, Vec a, Vec b) {
  return {_mm512_mask_mov_ps(b.low, ordered_mask(test.low), a.low),
          _mm512_mask_mov_ps(b.high, ordered_mask(test.high), a.high)};
}

// 32 32-bit integers. Operations start with `i` if signed, otherwise with `u`.
struct UInt {
  __m512i low, high;
};

CPU_ADAM_INLINE UInt as_bits(Vec x) {
  return {_mm512_castps_si512(x.low), _mm512_castps_si512(x.high)};
}
CPU_ADAM_INLINE Vec as_float(UInt x) {
  return {_mm512_castsi512_ps(x.low), _mm512_castsi512_ps(x.high)};
}
CPU_ADAM_INLINE Vec to_float(UInt x) {
  return {_mm512_cvtepi32_ps(x.low), _mm512_cvtepi32_ps(x.high)};
}
CPU_ADAM_INLINE UInt to_int(Vec x) {
  return {_mm512_cvtps_epi32(x.low), _mm512_cvtps_epi32(x.high)};
}
CPU_ADAM_INLINE UInt uset1(std::uint32_t x) {
  const __m512i all = _mm512_set1_epi32(static_cast<int>(x));
  return {all, all};
}
CPU_ADAM_INLINE UInt lanes() {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {low, _mm512_add_epi32(low, _mm512_set1_epi32(16))};
}
CPU_ADAM_INLINE UInt uadd(UInt a, UInt b) {
  return {_mm512_add_epi32(a.low, b.low), _mm512_add_epi32(a.high, b.high)};
}
CPU_ADAM_INLINE UInt usub(UInt a, UInt b) {
  return {_mm512_sub_epi32(a.low, b.low), _mm512_sub_epi32(a.high, b.high)};
}
CPU_ADAM_INLINE UInt umul(UInt a, UInt b) {
  return {_mm512_mullo_epi32(a.low, b.low), _mm512_mullo_epi32(a.high, b.high)};
}
CPU_ADAM_INLINE UInt uand(UInt a, UInt b) {
  return {_mm512_and_si512(a.low, b.low), _mm512_and_si512(a.high, b.high)};
}
CPU_ADAM_INLINE UInt uor(UInt a, UInt b) {
  return {_mm512_or_si512(a.low, b.low), _mm512_or_si512(a.high, b.high)};
}
CPU_ADAM_INLINE UInt uxor(UInt a, UInt b) {
  return {_mm512_xor_si512(a.low, b.low), _mm512_xor_si512(a.high, b.high)};
}
template <int kBits>
CPU_ADAM_INLINE UInt ushl(UInt x) {
  return {_mm512_slli_epi32(x.low, kBits), _mm512_slli_epi32(x.high, kBits)};
}
template <int kBits>
CPU_ADAM_INLINE UInt ushr(UInt x) {
  return {_mm512_srli_epi32(x.low, kBits), _mm512_srli_epi32(x.high, kBits)};
}
CPU_ADAM_INLINE UInt umax(UInt a, UInt b) {
  return {_mm512_max_epu32(a.low, b.low), _mm512_max_epu32(a.high, b.high)};
}
CPU_ADAM_INLINE std::uint32_t reduce_umax(UInt x) {
  return _mm512_reduce_max_epu32(_mm512_max_epu32(x.low, x.high));
}
CPU_ADAM_INLINE __m512i greater_16(__m512i a, __m512i b) {
  return _mm512_maskz_set1_epi32(_mm512_cmpgt_epi32_mask(a, b), -1);
}
CPU_ADAM_INLINE UInt igreater(UInt a, UInt b) {
  return {greater_16(a.low, b.low), greater_16(a.high, b.high)};
}
CPU_ADAM_INLINE UInt is_ordered(Vec x) {
  return {_mm512_maskz_set1_epi32(ordered_mask(x.low), -1),
          _mm512_maskz_set1_epi32(ordered_mask(x.high), -1)};
}
CPU_ADAM_INLINE UInt if_ordered(Vec test, UInt a, UInt b) {
  return {_mm512_mask_mov_epi32(b.low, ordered_mask(test.low), a.low),
          _mm512_mask_mov_epi32(b.high, ordered_mask(test.high), a.high)};
}
CPU_ADAM_INLINE __m512 copy_sign_16(__m512 x, __m512 y) {
  // 0xd8 selects the second operand's bit where the third's is 1, otherwise the first's.
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
      _mm512_castps_si512(x), _mm512_castps_si512(y), _mm512_set1_epi32(INT32_MIN), 0xd8));
}
CPU_ADAM_INLINE Vec copy_sign(Vec x, Vec y) {
  return {copy_sign_16(x.low, y.low), copy_sign_16(x.high, y.high)};
}

CPU_ADAM_INLINE __m128i load_bytes(const char* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
CPU_ADAM_INLINE UInt if_nonzero(UInt test, UInt a, UInt b) {
  const __m512i magnitude = _mm512_set1_epi32(INT32_MAX);
  return {_mm512_mask_mov_epi32(b.low, _mm512_test_epi32_mask(test.low, magnitude), a.low),
          _mm512_mask_mov_epi32(b.high, _mm512_test_epi32_mask(test.high, magnitude), a.high)};
}

CPU_ADAM_INLINE __m256i load_16_halves(const char* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
CPU_ADAM_INLINE UInt load_u8(const char* from) {
  return {_mm512_cvtepu8_epi32(load_bytes(from)), _mm512_cvtepu8_epi32(load_bytes(from + 16))};
}
CPU_ADAM_INLINE UInt load_i8(const char* from) {
  return {_mm512_cvtepi8_epi32(load_bytes(from)), _mm512_cvtepi8_epi32(load_bytes(from + 16))};
}
CPU_ADAM_INLINE UInt load_i16(const char* from) {
  return {_mm512_cvtepi16_epi32(load_16_halves(from)),
          _mm512_cvtepi16_epi32(load_16_halves(from + 32))};
}
// Moves 16 of 32 16-bit values, from `first` on, to the upper halves of 32-bit lanes.
CPU_ADAM_INLINE __m512i widen_halves(__m512i halves, int first) {
  const __m512i places =
      _mm512_setr_epi32(0x00000000, 0x00010000, 0x00020000, 0x00030000, 0x00040000, 0x00050000,
                        0x00060000, 0x00070000, 0x00080000, 0x00090000, 0x000a0000, 0x000b0000,
                        0x000c0000, 0x000d0000, 0x000e0000, 0x000f0000);
  const __m512i from = _mm512_add_epi32(places, _mm512_set1_epi32(first << 16));
  return _mm512_maskz_permutexvar_epi16(0xaaaaaaaau, from, halves);
}
CPU_ADAM_INLINE UInt load_upper_16(const char* from) {
  const __m512i halves = _mm512_loadu_si512(from);
  return {widen_halves(halves, 0), widen_halves(halves, 16)};
}
// Selects the lower (first = 0) or upper (first = 1) 16 bits of each 32-bit lane.
CPU_ADAM_INLINE __m512i halves_of(UInt x, int first) {
  const __m512i even =
      _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                       24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i places = _mm512_add_epi16(even, _mm512_set1_epi16(static_cast<short>(first)));
  return _mm512_permutex2var_epi16(x.low, places, x.high);
}
CPU_ADAM_INLINE __m512i lower_halves(UInt x) { return halves_of(x, 0); }
CPU_ADAM_INLINE __m512i upper_halves(UInt x) { return halves_of(x, 1); }

CPU_ADAM_INLINE void store_8(char* to, UInt x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(lower_halves(x)));
}
CPU_ADAM_INLINE void store_16(char* to, UInt x) { _mm512_storeu_si512(to, lower_halves(x)); }
CPU_ADAM_INLINE void store_upper_16(char* to, UInt x) { _mm512_storeu_si512(to, upper_halves(x)); }

struct F32 {
  static constexpr int kBytes = 4;
  static CPU_ADAM_INLINE Vec load(const char* from) {
    return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + 64)};
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) {
    _mm512_storeu_ps(to, x.low);
    _mm512_storeu_ps(to + 64, x.high);
  }
  static CPU_ADAM_INLINE void stream(char* to, Vec x) {
    _mm512_stream_ps(reinterpret_cast<float*>(to), x.low);
    _mm512_stream_ps(reinterpret_cast<float*>(to + 64), x.high);
  }
};

struct BF16 {
  static constexpr int kBytes = 2;
  static CPU_ADAM_INLINE Vec load(const char* from) { return as_float(load_upper_16(from)); }
  // A NaN is not rounded. Arithmetic results are quiet NaNs, which remain NaNs without their low
  // bits.
  static CPU_ADAM_INLINE __m512i round_16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    return _mm512_mask_add_epi32(bits, ordered_mask(x), bits, up);
  }
  static CPU_ADAM_INLINE __m512i round(Vec x) {
    return upper_halves({round_16(x.low), round_16(x.high)});
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) { _mm512_storeu_si512(to, round(x)); }
  static CPU_ADAM_INLINE void stream(char* to, Vec x) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), round(x));
  }
};

struct F16 {
  static constexpr int kBytes = 2;
  static CPU_ADAM_INLINE Vec load(const char* from) {
    return {_mm512_cvtph_ps(load_16_halves(from)), _mm512_cvtph_ps(load_16_halves(from + 32))};
  }
  static CPU_ADAM_INLINE __m512i round(Vec x) {
    constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(x.low, kNearestEven)),
                              _mm512_cvtps_ph(x.high, kNearestEven), 1);
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) { _mm512_storeu_si512(to, round(x)); }
  static CPU_ADAM_INLINE void stream(char* to, Vec x) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), round(x));
  }
};

// Sixteen sums. Elements of even and odd registers are added to the same sums.
struct Doubles {
  __m512d low, high;
};
CPU_ADAM_INLINE Doubles zero_doubles() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
CPU_ADAM_INLINE Doubles add_square_16(Doubles sum, __m512 x) {
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
  const __m512d high =
      _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
  return {_mm512_fmadd_pd(low, low, sum.low), _mm512_fmadd_pd(high, high, sum.high)};
}
CPU_ADAM_INLINE Doubles add_square(Doubles sum, Vec x) {
  return add_square_16(add_square_16(sum, x.low), x.high);
}
CPU_ADAM_INLINE void store_doubles(double* to, Doubles x) {
  _mm512_storeu_pd(to, x.low);
  _mm512_storeu_pd(to + 8, x.high);
}

#include "kernel.inl"

}  // namespace

namespace cpu_adam {
extern const KernelTable kAvx512Table = CPU_ADAM_KERNEL_TABLE("avx512");
}
