// In-place fp32 rotation, see [Note: rotation] in block_format.py. Included by codec.inl.

#if defined(__GNUC__) && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define ZERO_COMM_HAS_VECTORS 1
#endif
#endif

#if defined(ZERO_COMM_HAS_VECTORS)

// Eight floats. The compiler uses two registers if registers are smaller.
using Floats = float __attribute__((vector_size(32)));
using Words = std::uint32_t __attribute__((vector_size(32)));

// (a, b) -> (a + b, a - b) for pairs of lanes. `swapped` is x with the lanes of each pair swapped,
// and `sign` negates x in the lanes of b.
ZERO_COMM_INLINE Floats within(Floats x, Floats swapped, Words sign) {
  return swapped + reinterpret_cast<Floats>(reinterpret_cast<Words>(x) ^ sign);
}

template <int kDistance>
ZERO_COMM_INLINE void across(Floats (&x)[8]) {
  for (int i = 0; i < 8; ++i) {
    if ((i & kDistance) != 0) continue;
    const Floats a = x[i], b = x[i + kDistance];
    x[i] = a + b;
    x[i + kDistance] = a - b;
  }
}

ZERO_COMM_INLINE void rotate_group(float* group) {
  constexpr std::uint32_t s = kSign;
  const Words odd = {0, s, 0, s, 0, s, 0, s};
  const Words second = {0, 0, s, s, 0, 0, s, s};
  const Words upper = {0, 0, 0, 0, s, s, s, s};
  Floats x[8];
  std::memcpy(x, group, sizeof x);
  for (Floats& v : x) {
    v *= 0.125f;
    v = within(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6), odd);
    v = within(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5), second);
    v = within(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3), upper);
  }
  across<1>(x);
  across<2>(x);
  across<4>(x);
  std::memcpy(group, x, sizeof x);
}

#else

ZERO_COMM_INLINE void rotate_group(float* group) {
  for (std::int64_t i = 0; i < kRotationSize; ++i) group[i] *= 0.125f;
  for (std::int64_t h = 1; h < kRotationSize; h *= 2) {
    for (std::int64_t i = 0; i < kRotationSize; i += 2 * h) {
      for (std::int64_t j = i; j < i + h; ++j) {
        const float a = group[j], b = group[j + h];
        group[j] = a + b;
        group[j + h] = a - b;
      }
    }
  }
}

#endif

void rotate(float* x, std::int64_t size) {
  for (std::int64_t i = 0; i < size; i += kRotationSize) rotate_group(x + i);
}
