// Kernels for AVX2 with FMA and F16C. They process 16 elements at a time in two registers, so that
// 16 16-bit results fill one register.

#include <immintrin.h>

#include <cstring>

#include "kernels.h"

namespace {

struct Vec {
  __m256 low, high;
};
constexpr int kLanes = 16;
constexpr int kVectorsAtOnce = 4;
constexpr int kStreamBytes = 32;

CPU_ADAM_INLINE void stream_fence() { _mm_sfence(); }

CPU_ADAM_INLINE Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
CPU_ADAM_INLINE Vec add(Vec a, Vec b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
CPU_ADAM_INLINE Vec sub(Vec a, Vec b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
CPU_ADAM_INLINE Vec mul(Vec a, Vec b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
CPU_ADAM_INLINE Vec div(Vec a, Vec b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
CPU_ADAM_INLINE Vec sqrt_(Vec a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
CPU_ADAM_INLINE Vec fma_(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
CPU_ADAM_INLINE Vec nfma(Vec a, Vec b, Vec c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
CPU_ADAM_INLINE __m256 if_ordered_8(__m256 test, __m256 a, __m256 b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(test, test, _CMP_ORD_Q));
}
CPU_ADAM_INLINE Vec if_ordered(Vec test, Vec a, Vec b) {
  return {if_ordered_8(test.low, a.low, b.low), if_ordered_8(test.high, a.high, b.high)};
}
CPU_ADAM_INLINE __m256 copy_sign_8(__m256 x, __m256 y) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return _mm256_or_ps(_mm256_andnot_ps(sign, x), _mm256_and_ps(sign, y));
}
CPU_ADAM_INLINE Vec copy_sign(Vec x, Vec y) {
  return {copy_sign_8(x.low, y.low), copy_sign_8(x.high, y.high)};
}

CPU_ADAM_INLINE __m128i load_8_halves(const char* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

CPU_ADAM_INLINE void store_halves(char* to, __m256i halves) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}

CPU_ADAM_INLINE void stream_halves(char* to, __m256i halves) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), halves);
}

struct F32 {
  static constexpr int kBytes = 4;
  static CPU_ADAM_INLINE Vec load(const char* from) {
    const float* values = reinterpret_cast<const float*>(from);
    return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)};
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) {
    float* values = reinterpret_cast<float*>(to);
    _mm256_storeu_ps(values, x.low);
    _mm256_storeu_ps(values + 8, x.high);
  }
  static CPU_ADAM_INLINE void stream(char* to, Vec x) {
    float* values = reinterpret_cast<float*>(to);
    _mm256_stream_ps(values, x.low);
    _mm256_stream_ps(values + 8, x.high);
  }
};

struct BF16 {
  static constexpr int kBytes = 2;
  static CPU_ADAM_INLINE __m256 widen(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  static CPU_ADAM_INLINE Vec load(const char* from) {
    return {widen(load_8_halves(from)), widen(load_8_halves(from + 16))};
  }
  // Returns rounded values in the low half of each 32-bit lane. A NaN is not rounded. Arithmetic
  // results are quiet NaNs, which remain NaNs without their low bits.
  static CPU_ADAM_INLINE __m256i round_8(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i up =
        _mm256_andnot_si256(is_nan, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
  }
  static CPU_ADAM_INLINE __m256i round(Vec x) {
    // The pack instruction works within 128-bit lanes: swap the middle quarters afterwards.
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(round_8(x.low), round_8(x.high)), 0xd8);
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) { store_halves(to, round(x)); }
  static CPU_ADAM_INLINE void stream(char* to, Vec x) { stream_halves(to, round(x)); }
};

struct F16 {
  static constexpr int kBytes = 2;
  static CPU_ADAM_INLINE Vec load(const char* from) {
    return {_mm256_cvtph_ps(load_8_halves(from)), _mm256_cvtph_ps(load_8_halves(from + 16))};
  }
  static CPU_ADAM_INLINE __m256i round(Vec x) {
    constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm256_cvtps_ph(x.low, kNearestEven)),
                                   _mm256_cvtps_ph(x.high, kNearestEven), 1);
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) { store_halves(to, round(x)); }
  static CPU_ADAM_INLINE void stream(char* to, Vec x) { stream_halves(to, round(x)); }
};

// 16 32-bit integers. Operations start with `i` if signed, otherwise with `u`.
struct UInt {
  __m256i low, high;
};

CPU_ADAM_INLINE UInt as_bits(Vec x) {
  return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)};
}
CPU_ADAM_INLINE Vec as_float(UInt x) {
  return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)};
}
CPU_ADAM_INLINE Vec to_float(UInt x) {
  return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
}
CPU_ADAM_INLINE UInt to_int(Vec x) {
  return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)};
}
CPU_ADAM_INLINE UInt uset1(std::uint32_t x) {
  const __m256i all = _mm256_set1_epi32(static_cast<int>(x));
  return {all, all};
}
CPU_ADAM_INLINE UInt lanes() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
          _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
CPU_ADAM_INLINE UInt uadd(UInt a, UInt b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
CPU_ADAM_INLINE UInt usub(UInt a, UInt b) {
  return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
CPU_ADAM_INLINE UInt umul(UInt a, UInt b) {
  return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
}
CPU_ADAM_INLINE UInt uand(UInt a, UInt b) {
  return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
CPU_ADAM_INLINE UInt uor(UInt a, UInt b) {
  return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
CPU_ADAM_INLINE UInt uxor(UInt a, UInt b) {
  return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)};
}
CPU_ADAM_INLINE UInt umax(UInt a, UInt b) {
  return {_mm256_max_epu32(a.low, b.low), _mm256_max_epu32(a.high, b.high)};
}
CPU_ADAM_INLINE UInt igreater(UInt a, UInt b) {
  return {_mm256_cmpgt_epi32(a.low, b.low), _mm256_cmpgt_epi32(a.high, b.high)};
}
template <int kBits>
CPU_ADAM_INLINE UInt ushl(UInt x) {
  return {_mm256_slli_epi32(x.low, kBits), _mm256_slli_epi32(x.high, kBits)};
}
template <int kBits>
CPU_ADAM_INLINE UInt ushr(UInt x) {
  return {_mm256_srli_epi32(x.low, kBits), _mm256_srli_epi32(x.high, kBits)};
}
CPU_ADAM_INLINE UInt is_ordered(Vec x) {
  return {_mm256_castps_si256(_mm256_cmp_ps(x.low, x.low, _CMP_ORD_Q)),
          _mm256_castps_si256(_mm256_cmp_ps(x.high, x.high, _CMP_ORD_Q))};
}
CPU_ADAM_INLINE UInt if_ordered(Vec test, UInt a, UInt b) {
  return as_bits(if_ordered(test, as_float(a), as_float(b)));
}
CPU_ADAM_INLINE __m256i if_nonzero_8(__m256i test, __m256i a, __m256i b) {
  const __m256i magnitude = _mm256_and_si256(test, _mm256_set1_epi32(INT32_MAX));
  return _mm256_blendv_epi8(a, b, _mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256()));
}
CPU_ADAM_INLINE UInt if_nonzero(UInt test, UInt a, UInt b) {
  return {if_nonzero_8(test.low, a.low, b.low), if_nonzero_8(test.high, a.high, b.high)};
}
CPU_ADAM_INLINE std::uint32_t reduce_umax(UInt x) {
  const __m256i eight = _mm256_max_epu32(x.low, x.high);
  const __m128i four =
      _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  const __m128i one = _mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(one));
}

CPU_ADAM_INLINE UInt load_u8(const char* from) {
  const __m128i bytes = load_8_halves(from);
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
CPU_ADAM_INLINE UInt load_i8(const char* from) {
  const __m128i bytes = load_8_halves(from);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
CPU_ADAM_INLINE __m256i load_8_upper(const char* from) {
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_8_halves(from)), 16);
}
CPU_ADAM_INLINE UInt load_upper_16(const char* from) {
  return {load_8_upper(from), load_8_upper(from + 16)};
}
CPU_ADAM_INLINE UInt load_i16(const char* from) {
  return {_mm256_cvtepi16_epi32(load_8_halves(from)),
          _mm256_cvtepi16_epi32(load_8_halves(from + 16))};
}
CPU_ADAM_INLINE __m256i low_halves(UInt x) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(x.low, x.high), 0xd8);
}
CPU_ADAM_INLINE void store_8(char* to, UInt x) {
  const __m256i halves = low_halves(uand(x, uset1(0xff)));
  const __m128i bytes =
      _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
CPU_ADAM_INLINE void store_16(char* to, UInt x) {
  store_halves(to, low_halves(uand(x, uset1(0xffff))));
}
CPU_ADAM_INLINE void store_upper_16(char* to, UInt x) { store_halves(to, low_halves(ushr<16>(x))); }

struct Doubles {
  __m256d part[4];
};
CPU_ADAM_INLINE Doubles zero_doubles() {
  const __m256d zero = _mm256_setzero_pd();
  return {{zero, zero, zero, zero}};
}
CPU_ADAM_INLINE Doubles add_square(Doubles sum, Vec x) {
  const __m128 quarters[4] = {_mm256_castps256_ps128(x.low), _mm256_extractf128_ps(x.low, 1),
                              _mm256_castps256_ps128(x.high), _mm256_extractf128_ps(x.high, 1)};
  for (int k = 0; k < 4; ++k) {
    const __m256d value = _mm256_cvtps_pd(quarters[k]);
    sum.part[k] = _mm256_fmadd_pd(value, value, sum.part[k]);
  }
  return sum;
}
CPU_ADAM_INLINE void store_doubles(double* to, Doubles x) {
  for (int k = 0; k < 4; ++k) _mm256_storeu_pd(to + 4 * k, x.part[k]);
}

#include "kernel.inl"

}  // namespace

namespace cpu_adam {
extern const KernelTable kAvx2Table = CPU_ADAM_KERNEL_TABLE("avx2");
}
