// AVX-512 (the foundation subset is enough): sixteen elements at a time. The bf16 instructions of
// later CPUs are left out on purpose: they flush subnormal numbers.

#include <immintrin.h>

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

#include "kernel.inl"

}  // namespace

namespace cpu_adam {
extern const KernelTable kAvx512Table = CPU_ADAM_KERNEL_TABLE("avx512");
}
