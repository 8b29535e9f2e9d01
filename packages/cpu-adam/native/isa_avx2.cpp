// AVX2 with FMA and F16C: eight elements at a time.

#include <immintrin.h>

#include "kernels.h"

#if defined(_MSC_VER)
#define CPU_ADAM_INLINE __forceinline
#else
#define CPU_ADAM_INLINE inline __attribute__((always_inline))
#endif

namespace {

using Vec = __m256;
constexpr int kLanes = 8;
constexpr bool kCanStream = true;

CPU_ADAM_INLINE void stream_fence() { _mm_sfence(); }

CPU_ADAM_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
CPU_ADAM_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
CPU_ADAM_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
CPU_ADAM_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
CPU_ADAM_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
CPU_ADAM_INLINE Vec sqrt_(Vec a) { return _mm256_sqrt_ps(a); }
CPU_ADAM_INLINE Vec fma_(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

CPU_ADAM_INLINE __m128i load_halves(const char* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

CPU_ADAM_INLINE void store_halves(char* to, __m128i halves) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}

CPU_ADAM_INLINE void stream_halves(char* to, __m128i halves) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), halves);
}

struct F32 {
  static constexpr int kBytes = 4;
  static CPU_ADAM_INLINE Vec load(const char* from) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) {
    _mm256_storeu_ps(reinterpret_cast<float*>(to), x);
  }
  static CPU_ADAM_INLINE void stream(char* to, Vec x) {
    _mm256_stream_ps(reinterpret_cast<float*>(to), x);
  }
};

struct BF16 {
  static constexpr int kBytes = 2;
  static CPU_ADAM_INLINE Vec load(const char* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(from)), 16));
  }
  static CPU_ADAM_INLINE __m128i round(Vec x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) { store_halves(to, round(x)); }
  static CPU_ADAM_INLINE void stream(char* to, Vec x) { stream_halves(to, round(x)); }
};

struct F16 {
  static constexpr int kBytes = 2;
  static CPU_ADAM_INLINE Vec load(const char* from) { return _mm256_cvtph_ps(load_halves(from)); }
  static CPU_ADAM_INLINE __m128i round(Vec x) {
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static CPU_ADAM_INLINE void store(char* to, Vec x) { store_halves(to, round(x)); }
  static CPU_ADAM_INLINE void stream(char* to, Vec x) { stream_halves(to, round(x)); }
};

#include "kernel.inl"

}  // namespace

namespace cpu_adam {
extern const KernelTable kAvx2Table = CPU_ADAM_KERNEL_TABLE("avx2");
}
