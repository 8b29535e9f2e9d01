// Codes blocks of differences between two tensors. Compiled once for each instruction set, in an
// anonymous namespace, after codec.inl. [Note: the difference buffer] in block_frame.py defines
// modes and bytes, and torch_codec.py is the reference. Loops over a block are plain so that
// compilers vectorize them. Compression and expansion of vectors, which compilers do not vectorize,
// have a variant for AVX-512 VBMI2.

constexpr int kBlock = kFrameBlock;
constexpr int kBitmapNbytes = kBlock / 8;
// The positions of more elements would take more bytes than a bitmap.
constexpr int kMostListed = kBitmapNbytes;
constexpr int kVector = 32;
constexpr int kRoom = kBlock + 2 * kVector;  // whole vectors may be written past the last element

// kBounds lists, for s = 0, 1, ..., the smallest integer with a code in each level after the first.
template <class T>
struct Word;
template <>
struct Word<std::uint16_t> {
  using Signed = std::int16_t;
  static constexpr int kBits = 16, kNumStarts = 3, kNumBounds = 6;
  static constexpr std::uint32_t kBounds[kNumBounds] = {3, 18, 273, 15, 270, 255};
};
template <>
struct Word<std::uint32_t> {
  using Signed = std::int32_t;
  static constexpr int kBits = 32, kNumStarts = 4, kNumBounds = 10;
  static constexpr std::uint32_t kBounds[kNumBounds] = {3,   18,    273, 65808, 15,
                                                        270, 65805, 255, 65790, 65535};
};

// ---- differences as small integers -----------------------------------------------------------

// The ordered integer of [Note: the difference buffer].
template <class T>
ZERO_COMM_INLINE T ordered(T bits) {
  constexpr int kTop = Word<T>::kBits - 1;
  using S = typename Word<T>::Signed;
  const T is_negative = static_cast<T>(static_cast<S>(bits) >> kTop);
  return static_cast<T>(bits ^ (is_negative | static_cast<T>(T{1} << kTop)));
}

template <class T>
ZERO_COMM_INLINE T from_ordered(T integer) {
  constexpr int kTop = Word<T>::kBits - 1;
  using S = typename Word<T>::Signed;
  const T is_negative = static_cast<T>(~static_cast<T>(static_cast<S>(integer) >> kTop));
  return static_cast<T>(integer ^ (is_negative | static_cast<T>(T{1} << kTop)));
}

template <class T>
ZERO_COMM_INLINE T zigzag(T difference) {
  constexpr int kTop = Word<T>::kBits - 1;
  using S = typename Word<T>::Signed;
  return static_cast<T>(static_cast<T>(difference << 1) ^
                        static_cast<T>(static_cast<S>(difference) >> kTop));
}

template <class T>
ZERO_COMM_INLINE T from_zigzag(T z) {
  return static_cast<T>(static_cast<T>(z >> 1) ^ static_cast<T>(T{0} - static_cast<T>(z & 1)));
}

template <class T>
ZERO_COMM_INLINE T difference(T old, T now) {
  return zigzag<T>(static_cast<T>(ordered<T>(now) - ordered<T>(old)));
}

template <class T>
ZERO_COMM_INLINE void apply_differences(const T* ZERO_COMM_RESTRICT z, T* ZERO_COMM_RESTRICT x) {
  for (int i = 0; i < kBlock; ++i) {
    x[i] = from_ordered<T>(static_cast<T>(ordered<T>(x[i]) + from_zigzag<T>(z[i])));
  }
}

// Clears one vector of integers after the first n.
template <class T>
ZERO_COMM_INLINE void clear_past(T* x, int n) {
  std::memset(x + n, 0, kVector * sizeof(T));
}

// ---- compression and expansion ---------------------------------------------------------------

ZERO_COMM_INLINE int lowest_bit(std::uint64_t word) {
#if defined(_MSC_VER)
  unsigned long index;
  _BitScanForward64(&index, word);
  return static_cast<int>(index);
#else
  return __builtin_ctzll(word);
#endif
}

ZERO_COMM_INLINE int count_bits(std::uint64_t word) {
#if defined(_MSC_VER)
  word = word - ((word >> 1) & 0x5555555555555555ull);
  word = (word & 0x3333333333333333ull) + ((word >> 2) & 0x3333333333333333ull);
  return static_cast<int>(
      (((word + (word >> 4)) & 0x0f0f0f0f0f0f0f0full) * 0x0101010101010101ull) >> 56);
#else
  return __builtin_popcountll(word);
#endif
}

#if defined(ZERO_COMM_VBMI2)

template <class T>
struct Lanes;
template <>
struct Lanes<std::uint16_t> {
  static constexpr int kCount = 32;
  using Mask = __mmask32;
  static Mask at_least(__m512i x, __m512i least) { return _mm512_cmpge_epu16_mask(x, least); }
  static Mask differ(__m512i a, __m512i b) { return _mm512_cmpneq_epi16_mask(a, b); }
  static __m512i all(std::uint16_t x) { return _mm512_set1_epi16(static_cast<short>(x)); }
  static __m512i subtract(__m512i a, __m512i b) { return _mm512_sub_epi16(a, b); }
  static __m512i add(__m512i a, __m512i b) { return _mm512_add_epi16(a, b); }
  static __m512i keep(Mask mask, __m512i x) { return _mm512_maskz_compress_epi16(mask, x); }
  static __m512i spread(Mask mask, __m512i x) { return _mm512_maskz_expand_epi16(mask, x); }
  static __m512i masked(Mask mask, __m512i x) { return _mm512_maskz_mov_epi16(mask, x); }
  static __m512i at_most(__m512i x, __m512i most) { return _mm512_min_epu16(x, most); }
  static __m512i larger(__m512i a, __m512i b) { return _mm512_max_epu16(a, b); }
  static __m512i signs(__m512i x) { return _mm512_srai_epi16(x, 15); }
  static __m512i shift_left(__m512i x, unsigned by) { return _mm512_slli_epi16(x, by); }
  static __m512i shift_right(__m512i x, unsigned by) { return _mm512_srli_epi16(x, by); }
  // For codes of at most 8 bits.
  static void store(std::uint8_t* out, Mask mask, __m512i x, int) {
    _mm512_mask_cvtepi16_storeu_epi8(out, mask, x);
  }
  static __m512i load(const std::uint8_t* in, Mask mask, int) {
    return _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, in));
  }
};
template <>
struct Lanes<std::uint32_t> {
  static constexpr int kCount = 16;
  using Mask = __mmask16;
  static Mask at_least(__m512i x, __m512i least) { return _mm512_cmpge_epu32_mask(x, least); }
  static Mask differ(__m512i a, __m512i b) { return _mm512_cmpneq_epi32_mask(a, b); }
  static __m512i all(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static __m512i subtract(__m512i a, __m512i b) { return _mm512_sub_epi32(a, b); }
  static __m512i add(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
  static __m512i keep(Mask mask, __m512i x) { return _mm512_maskz_compress_epi32(mask, x); }
  static __m512i spread(Mask mask, __m512i x) { return _mm512_maskz_expand_epi32(mask, x); }
  static __m512i masked(Mask mask, __m512i x) { return _mm512_maskz_mov_epi32(mask, x); }
  static __m512i at_most(__m512i x, __m512i most) { return _mm512_min_epu32(x, most); }
  static __m512i larger(__m512i a, __m512i b) { return _mm512_max_epu32(a, b); }
  static __m512i signs(__m512i x) { return _mm512_srai_epi32(x, 31); }
  static __m512i shift_left(__m512i x, unsigned by) { return _mm512_slli_epi32(x, by); }
  static __m512i shift_right(__m512i x, unsigned by) { return _mm512_srli_epi32(x, by); }
  // For codes of at most 16 bits.
  static void store(std::uint8_t* out, Mask mask, __m512i x, int width) {
    if (width > 8) {
      _mm512_mask_cvtepi32_storeu_epi16(out, mask, x);
    } else {
      _mm512_mask_cvtepi32_storeu_epi8(out, mask, x);
    }
  }
  static __m512i load(const std::uint8_t* in, Mask mask, int width) {
    return width > 8 ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, in))
                     : _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, in));
  }
};

// `ordered` and `difference` of every lane.
template <class T>
ZERO_COMM_INLINE __m512i ordered_lanes(__m512i bits) {
  using L = Lanes<T>;
  const __m512i top = L::all(static_cast<T>(T{1} << (Word<T>::kBits - 1)));
  return _mm512_xor_si512(bits, _mm512_or_si512(L::signs(bits), top));
}

template <class T>
ZERO_COMM_INLINE __m512i difference_lanes(__m512i old, __m512i now) {
  using L = Lanes<T>;
  const __m512i d = L::subtract(ordered_lanes<T>(now), ordered_lanes<T>(old));
  return _mm512_xor_si512(L::shift_left(d, 1), L::signs(d));
}

// Counts the values that are at least kBounds[k] - offset, for each k. Zeros follow the n values in
// memory. Bounds from 255 on are compared only for the few blocks with such a large value.
template <class T>
ZERO_COMM_INLINE void count_longer(const T* values, int n, int offset, int* counts) {
  using L = Lanes<T>;
  constexpr int kNumBounds = Word<T>::kNumBounds;
  constexpr std::uint32_t kLong = 255;
  __m512i least[kNumBounds];
  for (int k = 0; k < kNumBounds; ++k) {
    least[k] = L::all(static_cast<T>(Word<T>::kBounds[k] - static_cast<std::uint32_t>(offset)));
    counts[k] = 0;
  }
  const auto count = [&](bool is_long) {
    __m512i largest = _mm512_setzero_si512();
    for (int i = 0; i < n; i += L::kCount) {
      const __m512i x = _mm512_loadu_si512(values + i);
      largest = L::larger(largest, x);
      for (int k = 0; k < kNumBounds; ++k) {
        if ((Word<T>::kBounds[k] >= kLong) == is_long) {
          counts[k] += count_bits(L::at_least(x, least[k]));
        }
      }
    }
    return largest;
  };
  const __m512i largest = count(false);
  if (L::at_least(largest, L::all(static_cast<T>(kLong - static_cast<std::uint32_t>(offset))))) {
    count(true);
  }
}

// Writes the positions of the set bits. Returns the end of the written bytes.
ZERO_COMM_INLINE std::uint8_t* write_positions(const std::uint8_t* bitmap, std::uint8_t* out) {
  alignas(64) std::uint8_t first[64];
  for (int k = 0; k < 64; ++k) first[k] = static_cast<std::uint8_t>(k);
  const __m512i numbers = _mm512_load_si512(first);
  for (int i = 0; i < kBlock; i += 64) {
    std::uint64_t word;
    std::memcpy(&word, bitmap + i / 8, sizeof word);
    const int found = count_bits(word);
    const __m512i at = _mm512_add_epi8(numbers, _mm512_set1_epi8(static_cast<char>(i)));
    const __mmask64 mask = found == 64 ? ~0ull : (1ull << found) - 1;
    _mm512_mask_storeu_epi8(out, mask, _mm512_maskz_compress_epi8(word, at));
    out += found;
  }
  return out;
}

// Fills `kept` with x - least for the elements that are at least `least`. `kept` may be `x`.
// Returns the number of these elements.
template <class T>
ZERO_COMM_INLINE int keep_from(const T* x, int n, T least, T* kept) {
  using L = Lanes<T>;
  const __m512i bound = L::all(least);
  int found = 0;
  for (int i = 0; i < n; i += L::kCount) {
    const __m512i values = _mm512_loadu_si512(x + i);
    auto mask = L::at_least(values, bound);
    if (n - i < L::kCount) mask &= static_cast<typename L::Mask>((1u << (n - i)) - 1u);
    _mm512_storeu_si512(kept + found, L::keep(mask, L::subtract(values, bound)));
    found += count_bits(mask);
  }
  return found;
}

// Sets the bits of changed elements, and fills `values` with their z - 1. Fills `z` only if more
// than kMostListed elements changed. Returns the number of changed elements.
template <class T>
ZERO_COMM_INLINE int collect(const T* old, const T* now, std::uint8_t* bitmap, T* values, T* z) {
  using L = Lanes<T>;
  constexpr int kNumVectors = kBlock / L::kCount;
  typename L::Mask masks[kNumVectors];
  int changed = 0;
  for (int k = 0; k < kNumVectors; ++k) {
    masks[k] =
        L::differ(_mm512_loadu_si512(old + k * L::kCount), _mm512_loadu_si512(now + k * L::kCount));
    changed += count_bits(masks[k]);
  }
  if (changed == 0) return 0;
  std::memcpy(bitmap, masks, sizeof masks);
  int found = 0;
  for (int k = 0; k < kNumVectors; ++k) {
    const __m512i x = difference_lanes<T>(_mm512_loadu_si512(old + k * L::kCount),
                                          _mm512_loadu_si512(now + k * L::kCount));
    if (changed > kMostListed) _mm512_storeu_si512(z + k * L::kCount, x);
    _mm512_storeu_si512(values + found, L::keep(masks[k], L::subtract(x, L::all(1))));
    found += count_bits(masks[k]);
  }
  return changed;
}

// Adds the k-th element of `more` to the k-th element that equals `top`. Returns their number.
template <class T>
ZERO_COMM_INLINE int add_to_top(T* x, int n, T top, const T* more) {
  using L = Lanes<T>;
  const __m512i bound = L::all(top);
  int found = 0;
  for (int i = 0; i < n; i += L::kCount) {
    const __m512i values = _mm512_loadu_si512(x + i);
    auto mask = L::at_least(values, bound);
    if (n - i < L::kCount) mask &= static_cast<typename L::Mask>((1u << (n - i)) - 1u);
    const __m512i added = L::spread(mask, _mm512_loadu_si512(more + found));
    _mm512_storeu_si512(x + i, L::add(values, added));
    found += count_bits(mask);
  }
  return found;
}

// Fills elements of `z` whose bit is set with 1 + the next element of `values`, and others with 0.
template <class T>
ZERO_COMM_INLINE void spread(const std::uint8_t* bitmap, const T* values, T* z) {
  using L = Lanes<T>;
  const __m512i one = L::all(1);
  int found = 0;
  for (int i = 0; i < kBlock; i += L::kCount) {
    typename L::Mask mask;
    std::memcpy(&mask, bitmap + i / 8, L::kCount / 8);
    const __m512i placed = L::spread(mask, _mm512_loadu_si512(values + found));
    _mm512_storeu_si512(z + i, L::masked(mask, L::add(placed, one)));
    found += count_bits(mask);
  }
}

#else

template <class T>
ZERO_COMM_INLINE void count_longer(const T* ZERO_COMM_RESTRICT values, int n, int offset,
                                   int* ZERO_COMM_RESTRICT counts) {
  T largest = 0;
  for (int i = 0; i < n; i += kVector) {
    for (int k = i; k < i + kVector; ++k) largest = values[k] > largest ? values[k] : largest;
  }
  for (int number = 0; number < Word<T>::kNumBounds; ++number) {
    const T least = static_cast<T>(Word<T>::kBounds[number] - static_cast<std::uint32_t>(offset));
    T found = 0;  // a count of at most 256 fits into 16 bits
    for (int i = 0; i < n && largest >= least; i += kVector) {
      for (int k = i; k < i + kVector; ++k) found = static_cast<T>(found + (values[k] >= least));
    }
    counts[number] = static_cast<int>(found);
  }
}

ZERO_COMM_INLINE std::uint8_t* write_positions(const std::uint8_t* bitmap, std::uint8_t* out) {
  for (int i = 0; i < kBlock; i += 64) {
    std::uint64_t word;
    std::memcpy(&word, bitmap + i / 8, sizeof word);
    for (; word != 0; word &= word - 1) *out++ = static_cast<std::uint8_t>(i + lowest_bit(word));
  }
  return out;
}

template <class T>
ZERO_COMM_INLINE int keep_from(const T* x, int n, T least, T* kept) {
  int found = 0;
  for (int i = 0; i < n; ++i) {
    const T value = x[i];
    kept[found] = static_cast<T>(value - least);
    found += value >= least ? 1 : 0;
  }
  return found;
}

template <class T>
ZERO_COMM_INLINE int collect(const T* ZERO_COMM_RESTRICT old, const T* ZERO_COMM_RESTRICT now,
                             std::uint8_t* ZERO_COMM_RESTRICT bitmap, T* ZERO_COMM_RESTRICT values,
                             T* ZERO_COMM_RESTRICT z) {
  for (int i = 0; i < kBlock; ++i) z[i] = difference<T>(old[i], now[i]);
  for (int i = 0; i < kBlock; i += 8) {
    int bits = 0;
    for (int k = 0; k < 8; ++k) bits |= (z[i + k] != 0 ? 1 : 0) << k;
    bitmap[i / 8] = static_cast<std::uint8_t>(bits);
  }
  return keep_from<T>(z, kBlock, 1, values);
}

template <class T>
ZERO_COMM_INLINE int add_to_top(T* x, int n, T top, const T* more) {
  int found = 0;
  for (int i = 0; i < n; ++i) {
    const bool is_top = x[i] == top;
    x[i] = static_cast<T>(x[i] + (is_top ? more[found] : T{0}));
    found += is_top ? 1 : 0;
  }
  return found;
}

template <class T>
ZERO_COMM_INLINE void spread(const std::uint8_t* bitmap, const T* values, T* z) {
  std::memset(z, 0, kBlock * sizeof(T));
  for (int i = 0; i < kBlock; i += 64) {
    std::uint64_t word;
    std::memcpy(&word, bitmap + i / 8, sizeof word);
    for (; word != 0; word &= word - 1) {
      z[i + lowest_bit(word)] = static_cast<T>(1 + *values++);
    }
  }
}

#endif

// ---- levels: codes of fixed widths -----------------------------------------------------------

ZERO_COMM_INLINE int packed_nbytes(int n, int width) { return (n * width + 7) / 8; }

template <class T, int kWidth>
constexpr T top_code() {
  return static_cast<T>((std::uint64_t{1} << kWidth) - 1);
}

// In a level of 2-bit or 4-bit codes with q bytes, byte j has the codes of elements j, j + q, ...,
// so that whole vectors are loaded. Codes after n elements are zero.
#if defined(ZERO_COMM_VBMI2)

template <class T>
ZERO_COMM_INLINE typename Lanes<T>::Mask first_lanes(int n) {
  using Mask = typename Lanes<T>::Mask;
  return n < Lanes<T>::kCount ? static_cast<Mask>((1u << n) - 1u) : static_cast<Mask>(~0u);
}

template <class T, int kWidth>
ZERO_COMM_INLINE void pack(const T* x, int n, std::uint8_t* out) {
  using L = Lanes<T>;
  if constexpr (kWidth == Word<T>::kBits) {
    std::memcpy(out, x, static_cast<std::size_t>(n) * sizeof(T));
    return;
  }
  constexpr int kNumParts = kWidth < 8 ? 8 / kWidth : 1;
  const int q = packed_nbytes(n, kWidth < 8 ? kWidth : 8);
  const __m512i top = L::all(top_code<T, kWidth>());
  for (int j = 0; j < q; j += L::kCount) {
    __m512i bytes = L::at_most(_mm512_loadu_si512(x + j), top);
    for (int part = 1; part < kNumParts; ++part) {
      const __m512i codes = L::at_most(_mm512_loadu_si512(x + j + part * q), top);
      bytes = _mm512_or_si512(bytes, L::shift_left(codes, part * kWidth));
    }
    L::store(out + j * (kWidth > 8 ? 2 : 1), first_lanes<T>(q - j), bytes, kWidth);
  }
}

// The last vector of a part may reach into the next part, which is written later.
template <class T, int kWidth>
ZERO_COMM_INLINE void unpack(const std::uint8_t* codes, int n, T* x) {
  using L = Lanes<T>;
  if constexpr (kWidth == Word<T>::kBits) {
    std::memcpy(x, codes, static_cast<std::size_t>(n) * sizeof(T));
    return;
  }
  constexpr int kNumParts = kWidth < 8 ? 8 / kWidth : 1;
  const int q = packed_nbytes(n, kWidth < 8 ? kWidth : 8);
  const __m512i top = L::all(top_code<T, kWidth>());
  for (int part = 0; part < kNumParts; ++part) {
    for (int j = 0; j < q; j += L::kCount) {
      const __m512i bytes =
          L::load(codes + j * (kWidth > 8 ? 2 : 1), first_lanes<T>(q - j), kWidth);
      _mm512_storeu_si512(x + part * q + j,
                          _mm512_and_si512(L::shift_right(bytes, part * kWidth), top));
    }
  }
}

#else

template <class T, int kWidth>
ZERO_COMM_INLINE void pack(const T* ZERO_COMM_RESTRICT x, int n,
                           std::uint8_t* ZERO_COMM_RESTRICT out) {
  const int q = packed_nbytes(n, kWidth);
  const T top = top_code<T, kWidth>();
  if constexpr (kWidth == 2) {
    for (int j = 0; j < q; ++j) {
      const T a = x[j] < top ? x[j] : top, b = x[j + q] < top ? x[j + q] : top;
      const T c = x[j + 2 * q] < top ? x[j + 2 * q] : top;
      const T d = x[j + 3 * q] < top ? x[j + 3 * q] : top;
      out[j] = static_cast<std::uint8_t>(a | (b << 2) | (c << 4) | (d << 6));
    }
  } else if constexpr (kWidth == 4) {
    for (int j = 0; j < q; ++j) {
      const T a = x[j] < top ? x[j] : top, b = x[j + q] < top ? x[j + q] : top;
      out[j] = static_cast<std::uint8_t>(a | (b << 4));
    }
  } else if constexpr (kWidth == 8) {
    for (int j = 0; j < n; ++j) out[j] = static_cast<std::uint8_t>(x[j] < top ? x[j] : top);
  } else if constexpr (kWidth < Word<T>::kBits) {
    for (int j = 0; j < n; ++j) {
      const std::uint16_t code = static_cast<std::uint16_t>(x[j] < top ? x[j] : top);
      std::memcpy(out + 2 * j, &code, 2);
    }
  } else {
    std::memcpy(out, x, static_cast<std::size_t>(n) * sizeof(T));
  }
}

template <class T, int kWidth>
ZERO_COMM_INLINE void unpack(const std::uint8_t* ZERO_COMM_RESTRICT codes, int n,
                             T* ZERO_COMM_RESTRICT x) {
  const int q = packed_nbytes(n, kWidth);
  if constexpr (kWidth == 2) {
    for (int j = 0; j < q; ++j) x[j] = codes[j] & 3;
    for (int j = 0; j < q; ++j) x[j + q] = (codes[j] >> 2) & 3;
    for (int j = 0; j < q; ++j) x[j + 2 * q] = (codes[j] >> 4) & 3;
    for (int j = 0; j < q; ++j) x[j + 3 * q] = codes[j] >> 6;
  } else if constexpr (kWidth == 4) {
    for (int j = 0; j < q; ++j) x[j] = codes[j] & 15;
    for (int j = 0; j < q; ++j) x[j + q] = codes[j] >> 4;
  } else if constexpr (kWidth == 8) {
    for (int j = 0; j < n; ++j) x[j] = codes[j];
  } else if constexpr (kWidth < Word<T>::kBits) {
    for (int j = 0; j < n; ++j) {
      std::uint16_t code;
      std::memcpy(&code, codes + 2 * j, 2);
      x[j] = code;
    }
  } else {
    std::memcpy(x, codes, static_cast<std::size_t>(n) * sizeof(T));
  }
}

#endif

// Writes a level of n codes of `kWidth` bits. Replaces `values` by the excess of the values with
// the largest code, and returns the number of these values.
template <class T, int kWidth>
ZERO_COMM_INLINE int write_level(T* values, int n, std::uint8_t* out) {
  clear_past<T>(values, n);  // absent codes of the last byte are zero
  pack<T, kWidth>(values, n, out);
  if constexpr (kWidth == Word<T>::kBits) return 0;
  return keep_from<T>(values, n, top_code<T, kWidth>(), values);
}

// Writes the levels of n values and overwrites `values`. One loop serves all starts. Separate code
// for each start makes reading faster, but made writing 5% slower.
template <class T>
ZERO_COMM_INLINE void write_levels(T* values, int n, int start, std::uint8_t* out) {
  for (int width = 2 << start; n > 0; width *= 2) {
    std::uint8_t* const next = out + packed_nbytes(n, width);
    if (width == 2) {
      n = write_level<T, 2>(values, n, out);
    } else if (width == 4) {
      n = write_level<T, 4>(values, n, out);
    } else if (width == 8) {
      n = write_level<T, 8>(values, n, out);
    } else if (width == 16) {
      n = write_level<T, 16>(values, n, out);
    } else {
      n = write_level<T, Word<T>::kBits>(values, n, out);
    }
    out = next;
  }
}

// Reads the levels of n values, the first with `kWidth` bits. Returns whether they end at `end`.
template <class T, int kWidth>
ZERO_COMM_INLINE bool read_levels_from(const std::uint8_t* codes, const std::uint8_t* end, int n,
                                       T* values) {
  const int nbytes = packed_nbytes(n, kWidth);
  if (end - codes < nbytes) return false;
  unpack<T, kWidth>(codes, n, values);
  if constexpr (kWidth < Word<T>::kBits) {
    constexpr T kTop = top_code<T, kWidth>();
    int longer = 0;
    for (int i = 0; i < n; ++i) longer += values[i] == kTop ? 1 : 0;
    if (longer > 0) {
      T more[kRoom];
      if (!read_levels_from<T, 2 * kWidth>(codes + nbytes, end, longer, more)) return false;
      add_to_top<T>(values, n, kTop, more);
      return true;
    }
  }
  return codes + nbytes == end;
}

template <class T>
ZERO_COMM_INLINE bool read_levels(const std::uint8_t* codes, const std::uint8_t* end, int n,
                                  int start, T* values) {
  if (start == 0) return read_levels_from<T, 2>(codes, end, n, values);
  if (start == 1) return read_levels_from<T, 4>(codes, end, n, values);
  if (start == 2 || Word<T>::kBits == 16) return read_levels_from<T, 8>(codes, end, n, values);
  return read_levels_from<T, 16>(codes, end, n, values);
}

// ---- blocks ----------------------------------------------------------------------------------

// Returns the minimum of `best` and the sizes of the modes first_mode + s, as bytes << 4 | mode. A
// mode takes `prefix` bytes and levels of n integers, of which counts[k] are >= kBounds[k].
template <class T>
ZERO_COMM_INLINE int smallest(int n, const int* counts, int prefix, int first_mode, int best) {
  for (int start = 0; start < Word<T>::kNumStarts; ++start) {
    int nbytes = prefix + packed_nbytes(n, 2 << start);
    for (int width = 4 << start; width <= Word<T>::kBits; width *= 2) {
      nbytes += packed_nbytes(*counts++, width);
    }
    const int found = nbytes << 4 | (first_mode + start);
    best = found < best ? found : best;
  }
  return best;
}

// Encodes one block of `size` elements and returns its descriptor. The inputs have 256 elements.
template <class T>
ZERO_COMM_INLINE std::uint16_t encode_block(DifferenceCoding, const T* old, const T* now, int size,
                                            std::uint8_t* out) {
  alignas(64) T values[kRoom];
  alignas(64) T z[kRoom];
  std::uint8_t bitmap[kBitmapNbytes];
  const int changed = collect<T>(old, now, bitmap, values, z);
  if (changed == 0) return 0;
  clear_past<T>(values, changed);
  int counts[Word<T>::kNumBounds];
  count_longer<T>(values, changed, 0, counts);
  int best = size * static_cast<int>(sizeof(T)) << 4 | kRaw;
  if (changed <= kMostListed) best = smallest<T>(changed, counts, 1 + changed, kList, best);
  best = smallest<T>(changed, counts, kBitmapNbytes, kBitmap, best);
  if (changed > kMostListed) {  // a list of fewer changes is always shorter
    count_longer<T>(values, changed, 1, counts);
    best = smallest<T>(kBlock, counts, 0, kDense, best);
  }
  const int mode = best & 15, nbytes = best >> 4;
  if (mode == kRaw) {
    std::memcpy(out, now, static_cast<std::size_t>(nbytes));
  } else if (mode >= kDense) {
    write_levels<T>(z, kBlock, mode - kDense, out);
  } else if (mode >= kBitmap) {
    std::memcpy(out, bitmap, kBitmapNbytes);
    write_levels<T>(values, changed, mode - kBitmap, out + kBitmapNbytes);
  } else {
    *out = static_cast<std::uint8_t>(changed);
    write_levels<T>(values, changed, mode - kList, write_positions(bitmap, out + 1));
  }
  return static_cast<std::uint16_t>((mode << kModeShift) | nbytes);
}

// Decodes one block of `size` elements into `x`, which has room for 256. Returns false if no
// encoder can have written the block.
template <class T>
ZERO_COMM_INLINE bool decode_block(DifferenceCoding, std::uint16_t descriptor,
                                   const std::uint8_t* codes, int size, T* x) {
  const int mode = descriptor >> kModeShift;
  const int nbytes = descriptor & ((1 << kModeShift) - 1);
  if (mode == kEmpty) return nbytes == 0;
  if (mode == kRaw) {
    if (nbytes != size * static_cast<int>(sizeof(T))) return false;
    std::memcpy(x, codes, static_cast<std::size_t>(nbytes));
    return true;
  }
  alignas(64) T z[kRoom];
  const std::uint8_t* const end = codes + nbytes;
  if (mode >= kDense) {
    const int start = mode - kDense;
    if (start >= Word<T>::kNumStarts) return false;
    if (!read_levels<T>(codes, end, kBlock, start, z)) return false;
    apply_differences<T>(z, x);
    return true;
  }
  const int start = mode - (mode >= kBitmap ? kBitmap : kList);
  if (start >= Word<T>::kNumStarts) return false;
  std::uint8_t bitmap[kBitmapNbytes] = {};
  int changed = 0;
  if (mode >= kBitmap) {
    if (nbytes < kBitmapNbytes) return false;
    std::memcpy(bitmap, codes, kBitmapNbytes);
    codes += kBitmapNbytes;
    for (int i = 0; i < kBitmapNbytes; i += 8) {
      std::uint64_t word;
      std::memcpy(&word, bitmap + i, sizeof word);
      changed += count_bits(word);
    }
  } else {
    if (nbytes < 1 || nbytes < 1 + codes[0]) return false;
    changed = *codes++;
    int previous = -1;
    for (int i = 0; i < changed; ++i) {
      const int at = *codes++;
      if (at <= previous) return false;
      bitmap[at / 8] = static_cast<std::uint8_t>(bitmap[at / 8] | (1 << (at % 8)));
      previous = at;
    }
  }
  if (changed == 0) return false;
  alignas(64) T values[kRoom];
  if (!read_levels<T>(codes, end, changed, start, values)) return false;
  spread<T>(bitmap, values, z);
  apply_differences<T>(z, x);
  return true;
}

// ---- checksums -------------------------------------------------------------------------------

std::uint64_t sum_words(const std::uint64_t* ZERO_COMM_RESTRICT words, std::int64_t count,
                        const std::uint64_t* ZERO_COMM_RESTRICT odd) {
  constexpr std::int64_t kRun = 1024;
  std::uint64_t total = 0;
  for (std::int64_t start = 0, run = 0; start < count; start += kRun, ++run) {
    const std::int64_t size = count - start < kRun ? count - start : kRun;
    std::uint64_t sum = 0;
    for (std::int64_t i = 0; i < size; ++i) {
      std::uint64_t word = words[start + i];
      word = (word ^ (word >> 32)) * 0xd6e8feb86659fd93ull;
      sum += (word ^ (word >> 32)) * odd[i];
    }
    total += sum * static_cast<std::uint64_t>(2 * run + 1);
  }
  return total;
}
