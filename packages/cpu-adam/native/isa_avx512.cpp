// AVX-512 (the foundation subset is enough): sixteen elements at a time. The bf16 instructions of
// later CPUs are left out on purpose: they flush subnormal numbers.

#include <immintrin.h>

#include <cstring>

#include "kernels.h"

#if defined(_MSC_VER)
#define CPU_ADAM_INLINE __forceinline
#else
#define CPU_ADAM_INLINE inline __attribute__((always_inline))
#endif

namespace {

using Vec = __m512;
constexpr int kLanes = 16;
constexpr bool kCanStream = true;

CPU_ADAM_INLINE void stream_fence() { _mm_sfence(); }

CPU_ADAM_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
CPU_ADAM_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
CPU_ADAM_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
CPU_ADAM_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
CPU_ADAM_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
CPU_ADAM_INLINE Vec sqrt_(Vec a) { return _mm512_sqrt_ps(a); }
CPU_ADAM_INLINE Vec fma_(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

CPU_ADAM_INLINE __m256i load_halves(const char* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

CPU_ADAM_INLINE void store_halves(char* to, __m256i halves) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}

CPU_ADAM_INLINE void stream_halves(char* to, __m256i halves) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), halves);
}

struct F32 {
  static constexpr int kBytes = 4;
  static CPU_ADAM_INLINE Vec load(const char* from) { return _mm512_loadu_ps(from); }
  static CPU_ADAM_INLINE void store(char* to, Vec x) { _mm512_storeu_ps(to, x); }
  static CPU_ADAM_INLINE void stream(char* to, Vec x) {
    _mm512_stream_ps(reinterpret_cast<float*>(to), x);
  }
};

struct BF16 {
  static constexpr int kBytes = 2;
  static CPU_ADAM_INLINE Vec load(const char* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(from)), 16));
  }
  static CPU_ADAM_INLINE __m256i round(Vec x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x00400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) { store_halves(to, round(x)); }
  static CPU_ADAM_INLINE void stream(char* to, Vec x) { stream_halves(to, round(x)); }
};

struct F16 {
  static constexpr int kBytes = 2;
  static CPU_ADAM_INLINE Vec load(const char* from) { return _mm512_cvtph_ps(load_halves(from)); }
  static CPU_ADAM_INLINE __m256i round(Vec x) {
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) { store_halves(to, round(x)); }
  static CPU_ADAM_INLINE void stream(char* to, Vec x) { stream_halves(to, round(x)); }
};

// Sixteen 32-bit integers; `i` for signed, `u` for unsigned or either.
using UInt = __m512i;

CPU_ADAM_INLINE UInt as_bits(Vec x) { return _mm512_castps_si512(x); }
CPU_ADAM_INLINE Vec as_float(UInt x) { return _mm512_castsi512_ps(x); }
CPU_ADAM_INLINE Vec to_float(UInt x) { return _mm512_cvtepi32_ps(x); }
CPU_ADAM_INLINE UInt to_int(Vec x) { return _mm512_cvtps_epi32(x); }
CPU_ADAM_INLINE UInt uset1(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
CPU_ADAM_INLINE UInt lanes() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
CPU_ADAM_INLINE UInt uadd(UInt a, UInt b) { return _mm512_add_epi32(a, b); }
CPU_ADAM_INLINE UInt usub(UInt a, UInt b) { return _mm512_sub_epi32(a, b); }
CPU_ADAM_INLINE UInt umul(UInt a, UInt b) { return _mm512_mullo_epi32(a, b); }
CPU_ADAM_INLINE UInt uand(UInt a, UInt b) { return _mm512_and_si512(a, b); }
CPU_ADAM_INLINE UInt uor(UInt a, UInt b) { return _mm512_or_si512(a, b); }
CPU_ADAM_INLINE UInt uxor(UInt a, UInt b) { return _mm512_xor_si512(a, b); }
template <int kBits>
CPU_ADAM_INLINE UInt ushl(UInt x) {
  return _mm512_slli_epi32(x, kBits);
}
template <int kBits>
CPU_ADAM_INLINE UInt ushr(UInt x) {
  return _mm512_srli_epi32(x, kBits);
}
CPU_ADAM_INLINE UInt imax(UInt a, UInt b) { return _mm512_max_epi32(a, b); }
CPU_ADAM_INLINE UInt imin(UInt a, UInt b) { return _mm512_min_epi32(a, b); }
CPU_ADAM_INLINE UInt igreater(UInt a, UInt b) {
  return _mm512_maskz_set1_epi32(_mm512_cmpgt_epi32_mask(a, b), -1);
}
CPU_ADAM_INLINE UInt is_ordered(Vec x) {
  return _mm512_maskz_set1_epi32(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), -1);
}
CPU_ADAM_INLINE std::uint32_t reduce_imax(UInt x) {
  return static_cast<std::uint32_t>(_mm512_reduce_max_epi32(x));
}

CPU_ADAM_INLINE __m128i load_bytes(const char* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
CPU_ADAM_INLINE UInt load_u8(const char* from) { return _mm512_cvtepu8_epi32(load_bytes(from)); }
CPU_ADAM_INLINE UInt load_i8(const char* from) { return _mm512_cvtepi8_epi32(load_bytes(from)); }
CPU_ADAM_INLINE UInt load_u16(const char* from) { return _mm512_cvtepu16_epi32(load_halves(from)); }
CPU_ADAM_INLINE UInt load_i16(const char* from) { return _mm512_cvtepi16_epi32(load_halves(from)); }
CPU_ADAM_INLINE void store_8(char* to, UInt x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
}
CPU_ADAM_INLINE void store_16(char* to, UInt x) { store_halves(to, _mm512_cvtepi32_epi16(x)); }

struct Doubles {
  __m512d low, high;
};
CPU_ADAM_INLINE Doubles zero_doubles() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
CPU_ADAM_INLINE Doubles add_square(Doubles sum, Vec x) {
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
  const __m512d high =
      _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
  return {_mm512_fmadd_pd(low, low, sum.low), _mm512_fmadd_pd(high, high, sum.high)};
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
