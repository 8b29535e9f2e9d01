// Codes blocks of values without loss. Compiled once for each instruction set, in an anonymous
// namespace, after difference.inl. [Note: the value buffer] in block_frame.py defines modes and
// bytes, and torch_codec.py is the reference.

// Rotates the bits left by one, which moves the sign to the lowest bit.
template <class T>
ZERO_COMM_INLINE T turned(T bits) {
  return static_cast<T>(static_cast<T>(bits << 1) | static_cast<T>(bits >> (Word<T>::kBits - 1)));
}

template <class T>
ZERO_COMM_INLINE T turned_back(T bits) {
  return static_cast<T>(static_cast<T>(bits << (Word<T>::kBits - 1)) | static_cast<T>(bits >> 1));
}

constexpr int kMaxCodeBits = 6;

#if defined(ZERO_COMM_VBMI2)

// Counts the codes that are at least 2^w - 1, for each w of 1 to kMaxCodeBits.
ZERO_COMM_INLINE void count_escapes(const std::uint8_t* codes, int* counts) {
  for (int w = 1; w <= kMaxCodeBits; ++w) {
    const __m512i least = _mm512_set1_epi8(static_cast<char>((1 << w) - 1));
    int found = 0;
    for (int i = 0; i < kBlock; i += 64) {
      found += count_bits(_mm512_cmpge_epu8_mask(_mm512_loadu_si512(codes + i), least));
    }
    counts[w] = found;
  }
}

// Writes `width` planes with one bit of each code, and then the escapes.
ZERO_COMM_INLINE void write_planes(const std::uint8_t* codes, const std::uint8_t* tops, int width,
                                   std::uint8_t* out) {
  if (width == 0) return;  // width 0 has no escapes
  const __m512i largest = _mm512_set1_epi8(static_cast<char>((1 << width) - 1));
  std::uint8_t* escapes = out + width * kBitmapNbytes;
  for (int i = 0; i < kBlock; i += 64) {
    const __m512i all = _mm512_loadu_si512(codes + i);
    const __m512i x = _mm512_min_epu8(all, largest);
    for (int k = 0; k < width; ++k) {
      const std::uint64_t bits =
          _mm512_test_epi8_mask(x, _mm512_set1_epi8(static_cast<char>(1 << k)));
      std::memcpy(out + k * kBitmapNbytes + i / 8, &bits, 8);
    }
    const std::uint64_t mask = _mm512_cmpeq_epi8_mask(x, largest);
    const int found = count_bits(mask);
    const __mmask64 kept = found == 64 ? ~0ull : (1ull << found) - 1;
    _mm512_mask_storeu_epi8(escapes, kept,
                            _mm512_maskz_compress_epi8(mask, _mm512_loadu_si512(tops + i)));
    escapes += found;
  }
}

// Reads codes from their planes, and replaces each largest code by `base` minus its escape, so that
// `base` minus the code is the top byte. Returns whether there are `num_escapes` largest codes.
ZERO_COMM_INLINE bool read_planes(const std::uint8_t* planes, int width, int num_escapes,
                                  std::uint8_t base, std::uint8_t* codes) {
  const __m512i largest = _mm512_set1_epi8(static_cast<char>((1 << width) - 1));
  const std::uint8_t* escapes = planes + width * kBitmapNbytes;
  int left = num_escapes;
  for (int i = 0; i < kBlock; i += 64) {
    __m512i x = _mm512_setzero_si512();
    for (int k = 0; k < width; ++k) {
      std::uint64_t bits;
      std::memcpy(&bits, planes + k * kBitmapNbytes + i / 8, 8);
      x = _mm512_or_si512(x, _mm512_maskz_set1_epi8(bits, static_cast<char>(1 << k)));
    }
    const std::uint64_t mask = width == 0 ? 0 : _mm512_cmpeq_epi8_mask(x, largest);
    const int found = count_bits(mask);
    if (found > left) return false;
    const __mmask64 kept = found == 64 ? ~0ull : (1ull << found) - 1;
    const __m512i bytes = _mm512_maskz_expand_epi8(mask, _mm512_maskz_loadu_epi8(kept, escapes));
    const __m512i less = _mm512_sub_epi8(_mm512_set1_epi8(static_cast<char>(base)), bytes);
    _mm512_storeu_si512(codes + i, _mm512_mask_mov_epi8(x, mask, less));
    escapes += found;
    left -= found;
  }
  return left == 0;
}

#else

ZERO_COMM_INLINE void count_escapes(const std::uint8_t* ZERO_COMM_RESTRICT codes,
                                    int* ZERO_COMM_RESTRICT counts) {
  for (int w = 1; w <= kMaxCodeBits; ++w) {
    const std::uint8_t least = static_cast<std::uint8_t>((1 << w) - 1);
    std::uint8_t found[kVector] = {};
    for (int i = 0; i < kBlock; i += kVector) {
      for (int k = 0; k < kVector; ++k) {
        found[k] = static_cast<std::uint8_t>(found[k] + (codes[i + k] >= least ? 1 : 0));
      }
    }
    int total = 0;
    for (int k = 0; k < kVector; ++k) total += found[k];
    counts[w] = total;
  }
}

ZERO_COMM_INLINE void write_planes(const std::uint8_t* codes, const std::uint8_t* tops, int width,
                                   std::uint8_t* out) {
  const int largest = (1 << width) - 1;
  std::uint8_t* escapes = out + width * kBitmapNbytes;
  for (int i = 0; i < kBlock; i += 8) {
    std::uint64_t eight = 0;
    for (int j = 0; j < 8; ++j) {
      const int code = codes[i + j] < largest ? codes[i + j] : largest;
      eight |= static_cast<std::uint64_t>(code) << (8 * j);
    }
    // The multiplication gathers the lowest bits of the eight bytes in the highest byte.
    for (int k = 0; k < width; ++k) {
      const std::uint64_t bits = (eight >> k) & 0x0101010101010101ull;
      out[k * kBitmapNbytes + i / 8] =
          static_cast<std::uint8_t>((bits * 0x0102040810204080ull) >> 56);
    }
  }
  for (int i = 0; i < kBlock && width > 0; ++i) {
    if (codes[i] >= largest) *escapes++ = tops[i];
  }
}

ZERO_COMM_INLINE bool read_planes(const std::uint8_t* planes, int width, int num_escapes,
                                  std::uint8_t base, std::uint8_t* codes) {
  std::memset(codes, 0, kBlock);
  for (int k = 0; k < width; ++k) {
    for (int i = 0; i < kBlock; i += 8) {
      const std::uint64_t bits = planes[k * kBitmapNbytes + i / 8];
      // The byte is copied to all eight bytes, and byte j keeps only bit j.
      const std::uint64_t kept = (bits * 0x0101010101010101ull) & 0x8040201008040201ull;
      const std::uint64_t ones =
          ((kept + 0x7f7f7f7f7f7f7f7full) >> 7 | kept >> 7) & 0x0101010101010101ull;
      std::uint64_t eight;
      std::memcpy(&eight, codes + i, 8);
      eight |= ones << k;
      std::memcpy(codes + i, &eight, 8);
    }
  }
  if (width == 0) return num_escapes == 0;
  const int largest = (1 << width) - 1;
  int found = 0;
  for (int i = 0; i < kBlock; ++i) found += codes[i] == largest ? 1 : 0;
  if (found != num_escapes) return false;
  const std::uint8_t* escapes = planes + width * kBitmapNbytes;
  for (int i = 0; i < kBlock && found > 0; ++i) {
    if (codes[i] == largest) codes[i] = static_cast<std::uint8_t>(base - *escapes++);
  }
  return true;
}

#endif

// Encodes one block of `size` elements and returns its descriptor. `x` has 256 elements, and absent
// ones are zero.
template <class T>
ZERO_COMM_INLINE std::uint16_t encode_block(ValueCoding, const T*, const T* x, int size,
                                            std::uint8_t* out) {
  constexpr int kTopShift = Word<T>::kBits - 8;
  constexpr int kLowNbytes = static_cast<int>(sizeof(T)) - 1;
  T any = 0;
  for (int i = 0; i < kBlock; ++i) any = static_cast<T>(any | x[i]);
  if (any == 0) return kEmpty << kModeShift;
  const int raw_nbytes = size * static_cast<int>(sizeof(T));
  int best_width = -1;
  alignas(64) std::uint8_t tops[kBlock];
  alignas(64) std::uint8_t codes[kBlock];
  int counts[kMaxCodeBits + 1];
  std::uint8_t base = 0;
  if (size == kBlock) {
    for (int i = 0; i < kBlock; ++i) {
      tops[i] = static_cast<std::uint8_t>(turned<T>(x[i]) >> kTopShift);
    }
    for (int i = 0; i < kBlock; ++i) base = tops[i] > base ? tops[i] : base;
    for (int i = 0; i < kBlock; ++i) codes[i] = static_cast<std::uint8_t>(base - tops[i]);
    count_escapes(codes, counts);
    int least = kBlock - 1;  // bytes of raw top bytes, minus the base
    if (counts[1] == 0) {
      best_width = 0;
    } else {
      for (int w = 1; w <= kMaxCodeBits; ++w) {
        const int nbytes = w * kBitmapNbytes + counts[w];
        if (nbytes < least) {
          least = nbytes;
          best_width = w;
        }
      }
    }
  }
  if (best_width < 0) {
    std::memcpy(out, x, static_cast<std::size_t>(raw_nbytes));
    return static_cast<std::uint16_t>((kRaw << kModeShift) | raw_nbytes);
  }
  *out++ = base;
  for (int k = 0; k < kLowNbytes; ++k) {
    for (int i = 0; i < kBlock; ++i) {
      out[i] = static_cast<std::uint8_t>(turned<T>(x[i]) >> (8 * k));
    }
    out += kBlock;
  }
  write_planes(codes, tops, best_width, out);
  const int escaped = best_width == 0 ? 0 : counts[best_width];
  const int nbytes = 1 + kLowNbytes * kBlock + best_width * kBitmapNbytes + escaped;
  return static_cast<std::uint16_t>(((kCoded + best_width) << kModeShift) | nbytes);
}

// Decodes one block of `size` elements into `x`, which has room for 256. Returns false if no
// encoder can have written the block.
template <class T>
ZERO_COMM_INLINE bool decode_block(ValueCoding, std::uint16_t descriptor, const std::uint8_t* codes,
                                   int size, T* x) {
  constexpr int kTopShift = Word<T>::kBits - 8;
  constexpr int kLowNbytes = static_cast<int>(sizeof(T)) - 1;
  const int mode = descriptor >> kModeShift;
  const int nbytes = descriptor & ((1 << kModeShift) - 1);
  if (mode == kEmpty) {
    std::memset(x, 0, kBlock * sizeof(T));
    return nbytes == 0;
  }
  if (mode == kRaw) {
    if (nbytes != size * static_cast<int>(sizeof(T))) return false;
    std::memcpy(x, codes, static_cast<std::size_t>(nbytes));
    return true;
  }
  const int width = mode - kCoded;
  const int num_escapes = nbytes - 1 - kLowNbytes * kBlock - width * kBitmapNbytes;
  if (width > kMaxCodeBits || size != kBlock || num_escapes < 0) return false;
  const std::uint8_t base = *codes;
  const std::uint8_t* const low = codes + 1;
  alignas(64) std::uint8_t less[kBlock];
  if (!read_planes(low + kLowNbytes * kBlock, width, num_escapes, base, less)) return false;
  for (int i = 0; i < kBlock; ++i) {
    T bits = static_cast<T>(static_cast<T>(static_cast<std::uint8_t>(base - less[i])) << kTopShift);
    for (int k = 0; k < kLowNbytes; ++k) {
      bits = static_cast<T>(bits | static_cast<T>(static_cast<T>(low[k * kBlock + i]) << (8 * k)));
    }
    x[i] = turned_back<T>(bits);
  }
  return true;
}
