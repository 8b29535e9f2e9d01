// Quantizes and dequantizes blocks. Compiled once for each instruction set, in an anonymous
// namespace. The notes in block_format.py define formulas and byte order, and torch_backend.py is
// the reference. Loops are plain so that compilers vectorize them.

using namespace zero_comm;

#include "numbers.inl"
#include "rotation.inl"

constexpr float kSmallestMax = 7.888609052210118e-31f;   // 2**-100
constexpr float kSmallestStep = 6.162975822039155e-33f;  // 2**-107
constexpr float kBFloat16Max = 3.3895313892515355e+38f;
constexpr float kFloat16Max = 65280.0f;  // largest bfloat16 that float16 can hold

ZERO_COMM_INLINE float level_of(int kind) {
  return kind == kInt8 ? 127.0f : kind == kInt4 ? 7.0f : kind == kE4M3 ? 448.0f : 57344.0f;
}

// With a constant block size compiled loops need no remainder. kSize is 0 for other block sizes.
template <int kSize>
ZERO_COMM_INLINE std::int64_t size_or(std::int64_t block_size) {
  return kSize != 0 ? kSize : block_size;
}

// Functions called once per block are not inline, which keeps the compile time down.

// ---- symmetric -------------------------------------------------------------------------------

// Largest magnitude of a block. The bits of magnitudes, as integers, are ordered like the numbers.
template <int kSize>
ZERO_COMM_INLINE float largest_magnitude(const float* ZERO_COMM_RESTRICT x, std::int64_t size) {
  std::int32_t largest = 0;
  for (std::int64_t i = 0; i < size_or<kSize>(size); ++i) {
    const auto magnitude = static_cast<std::int32_t>(bits_of(x[i]) & ~kSign);
    largest = magnitude > largest ? magnitude : largest;
  }
  return float_of(static_cast<std::uint32_t>(largest));
}
template <int kSize>
ZERO_COMM_INLINE float largest_magnitude(const std::uint16_t* ZERO_COMM_RESTRICT x,
                                         std::int64_t size) {
  std::int16_t largest = 0;
  for (std::int64_t i = 0; i < size_or<kSize>(size); ++i) {
    const auto magnitude = static_cast<std::int16_t>(x[i] & 0x7fff);
    largest = magnitude > largest ? magnitude : largest;
  }
  return float_of(static_cast<std::uint32_t>(largest) << 16);
}

// 1 / step, or 0 for a block with NaN or Inf, and the maximum as bfloat16.
struct Scale {
  float reciprocal;
  std::uint16_t maximum;
};
ZERO_COMM_INLINE Scale scale_of(float largest, float largest_max, float level) {
  float maximum = largest > kSmallestMax ? largest : kSmallestMax;
  maximum = maximum < largest_max ? maximum : largest_max;
  const std::uint16_t stored = to_bfloat16_unless_nan(maximum);
  const float reciprocal = 1.0f / (float_of(static_cast<std::uint32_t>(stored) << 16) / level);
  const bool is_finite = bits_of(largest) < kInfinity;
  return {is_finite ? reciprocal : 0.0f,
          is_finite ? stored : static_cast<std::uint16_t>(kNan >> 16)};
}

struct Noise {
  std::uint32_t start, seed;  // element index of the block's start, and mix(s)
  ZERO_COMM_INLINE float at(std::int64_t i) const {
    return uniform(start + static_cast<std::uint32_t>(i), seed);
  }
};

template <int kKind, bool kHasNoise>
ZERO_COMM_INLINE std::int32_t integer_code(float v, std::int64_t i, const Noise& noise) {
  if (!kHasNoise) return rounded(v);
  constexpr std::int32_t kTop = kKind == kInt8 ? 127 : 7;
  const float moved = v + noise.at(i);
  std::int32_t code = static_cast<std::int32_t>(moved);  // floor needs the next line
  code -= static_cast<float>(code) > moved ? 1 : 0;
  code = code < kTop ? code : kTop;
  return code > -kTop ? code : -kTop;
}

template <int kKind, bool kHasNoise, int kSize, class T>
ZERO_COMM_INLINE void encode_codes(const T* ZERO_COMM_RESTRICT x, std::int64_t block_size,
                                   float reciprocal, const Noise& noise,
                                   std::uint8_t* ZERO_COMM_RESTRICT codes) {
  const std::int64_t size = size_or<kSize>(block_size);
  if (kKind == kInt4) {
    const std::int64_t half = size / 2;
    for (std::int64_t i = 0; i < half; ++i) {
      const std::int32_t lo = integer_code<kKind, kHasNoise>(load(x + i) * reciprocal, i, noise);
      const std::int32_t hi =
          integer_code<kKind, kHasNoise>(load(x + half + i) * reciprocal, half + i, noise);
      codes[i] = static_cast<std::uint8_t>(lo + 16 * hi);
    }
  } else {
    for (std::int64_t i = 0; i < size; ++i) {
      const float v = load(x + i) * reciprocal;
      if (kKind == kInt8) {
        codes[i] = static_cast<std::uint8_t>(integer_code<kKind, kHasNoise>(v, i, noise));
      } else {
        codes[i] = Float8<kKind>::template encode<kHasNoise>(v, kHasNoise ? noise.at(i) : 0.0f);
      }
    }
  }
}

// Encodes a symmetric block. Returns whether it has NaN or Inf.
template <int kKind, bool kHasNoise, int kSize, class T>
bool encode_symmetric(const T* x, std::int64_t size, float largest_max, const Noise& noise,
                      std::uint8_t* codes, std::uint8_t* scale) {
  const float largest = largest_magnitude<kSize>(x, size);
  const Scale found = scale_of(largest, largest_max, level_of(kKind));
  std::memcpy(scale, &found.maximum, sizeof found.maximum);
  const bool is_bad = found.reciprocal == 0.0f;
  if (is_bad) {
    std::memset(codes, 0, static_cast<std::size_t>(kKind == kInt4 ? size / 2 : size));
  } else {
    encode_codes<kKind, kHasNoise, kSize>(x, size, found.reciprocal, noise, codes);
  }
  return is_bad;
}

// Sinks, which receive the decoded values of a block.
struct ToFloat {
  float* out;
  ZERO_COMM_INLINE void put(std::int64_t i, float x) const { out[i] = x; }
};
struct ToSum {
  float* out;
  ZERO_COMM_INLINE void put(std::int64_t i, float x) const { out[i] += x; }
};
struct ToBFloat16 {
  std::uint16_t* out;
  ZERO_COMM_INLINE void put(std::int64_t i, float x) const { out[i] = to_bfloat16_unless_nan(x); }
};

ZERO_COMM_INLINE float step_of(const std::uint8_t* scale, float level) {
  std::uint16_t maximum;
  std::memcpy(&maximum, scale, sizeof maximum);
  const float step = float_of(static_cast<std::uint32_t>(maximum) << 16) / level;
  return step == step ? step : float_of(kNan);  // canonical NaN, which ToBFloat16 requires
}

template <int kKind, int kSize, class Sink>
void decode_symmetric(const std::uint8_t* ZERO_COMM_RESTRICT codes, float step,
                      std::int64_t block_size, const Sink& sink) {
  const std::int64_t size = size_or<kSize>(block_size);
  if (kKind == kInt4) {
    const std::int64_t half = size / 2;
    for (std::int64_t i = 0; i < half; ++i) {
      const auto lo = static_cast<std::int8_t>(static_cast<std::uint8_t>(codes[i] << 4));
      sink.put(i, static_cast<float>(lo >> 4) * step);
    }
    for (std::int64_t i = 0; i < half; ++i) {
      const auto hi = static_cast<std::int8_t>(static_cast<std::uint8_t>(codes[i] + 8));
      sink.put(half + i, static_cast<float>(hi >> 4) * step);
    }
  } else {
    for (std::int64_t i = 0; i < size; ++i) {
      const float number = kKind == kInt8 ? static_cast<float>(static_cast<std::int8_t>(codes[i]))
                                          : Float8<kKind>::decode(codes[i]);
      sink.put(i, number * step);
    }
  }
}

// ---- asymmetric ------------------------------------------------------------------------------

// Maps numbers to integers of the same order, whose minimum and maximum compilers vectorize.
ZERO_COMM_INLINE std::int32_t ordered(float x) {
  const auto bits = static_cast<std::int32_t>(bits_of(x));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
ZERO_COMM_INLINE float number_of(std::int32_t key) {
  return float_of(static_cast<std::uint32_t>(key ^ ((key >> 31) & 0x7fffffff)));
}

struct Ends {
  float lo, hi, step;
};

ZERO_COMM_INLINE Ends ends_of(float lo, float hi, float top) {
  const float step = (hi * 0.5f - lo * 0.5f) / (top * 0.5f);
  return {lo, hi, step < kSmallestStep ? kSmallestStep : step};
}

ZERO_COMM_INLINE float value_of(float k, Ends ends, float top) {
  const float value = (k * (ends.step * 0.5f) + ends.lo * 0.5f) * 2.0f;
  const float above = k == top ? ends.hi : value;
  return k == 0.0f ? ends.lo : above;
}

// Computes the values of `k + shift`, limited to [0, top], rounded to the dtype.
void rounded_values(const float* ZERO_COMM_RESTRICT k, float shift, std::int64_t size, Ends ends,
                    float top, int dtype, float* ZERO_COMM_RESTRICT out) {
  for (std::int64_t i = 0; i < size; ++i) {
    float index = k[i] + shift;
    index = index < top ? index : top;
    index = index > 0.0f ? index : 0.0f;
    out[i] = value_of(index, ends, top);
  }
  if (dtype == kBFloat16) {
    for (std::int64_t i = 0; i < size; ++i) {
      out[i] = float_of(static_cast<std::uint32_t>(to_bfloat16(out[i])) << 16);
    }
  } else if (dtype == kFloat16) {
    for (std::int64_t i = 0; i < size; ++i) out[i] = half_to_float(float_to_half(out[i]));
  }
}

// Replaces `k` by a neighbour that decodes to exactly `x` if `k` does not.
void keep_exact(const float* ZERO_COMM_RESTRICT x, float* ZERO_COMM_RESTRICT k, std::int64_t size,
                Ends ends, float top, int dtype, float* ZERO_COMM_RESTRICT own,
                float* ZERO_COMM_RESTRICT other) {
  rounded_values(k, 0.0f, size, ends, top, dtype, own);
  rounded_values(k, 1.0f, size, ends, top, dtype, other);
  for (std::int64_t i = 0; i < size; ++i) {
    const bool is_up = (own[i] != x[i]) & (other[i] == x[i]);
    own[i] = is_up ? x[i] : own[i];
    k[i] = is_up ? k[i] + 1.0f : k[i];
    k[i] = k[i] < top ? k[i] : top;
  }
  rounded_values(k, -1.0f, size, ends, top, dtype, other);
  for (std::int64_t i = 0; i < size; ++i) {
    const bool is_down = (own[i] != x[i]) & (other[i] == x[i]);
    k[i] = is_down ? k[i] - 1.0f : k[i];
    k[i] = k[i] > 0.0f ? k[i] : 0.0f;
  }
}

// Encodes an asymmetric block. The first `num_valid` elements of `x` are not padding. `spare` has
// room for three blocks. Returns whether the block has NaN or Inf.
bool encode_asymmetric(const Format& format, const float* ZERO_COMM_RESTRICT x,
                       std::int64_t num_valid, int dtype, bool has_noise, const Noise& noise,
                       std::uint8_t* ZERO_COMM_RESTRICT codes, std::uint8_t* scale,
                       float* ZERO_COMM_RESTRICT spare) {
  const std::int64_t size = format.block_size, half = size / 2;
  const float top = format.kind == kInt8 ? 254.0f : 14.0f;
  std::int32_t lowest = ordered(x[0]), highest = lowest;
  for (std::int64_t i = 0; i < num_valid; ++i) {
    const std::int32_t key = ordered(x[i]);
    lowest = key < lowest ? key : lowest;
    highest = key > highest ? key : highest;
  }
  const float lo = number_of(lowest), hi = number_of(highest);
  // As an ordered integer, NaN is beyond the infinity of its sign.
  const bool is_bad = (bits_of(lo) & ~kSign) >= kInfinity || (bits_of(hi) & ~kSign) >= kInfinity;
  const float stored[2] = {is_bad ? float_of(kNan) : lo + 0.0f,
                           is_bad ? float_of(kNan) : hi + 0.0f};
  std::memcpy(scale, stored, sizeof stored);
  if (is_bad) {
    std::memset(codes, 0, static_cast<std::size_t>(format.kind == kInt4 ? half : size));
    return true;
  }
  const Ends ends = ends_of(stored[0], stored[1], top);
  const float factor = 2.0f * (1.0f / ends.step), start = ends.lo * 0.5f;
  float* const k = spare;
  for (std::int64_t i = 0; i < size; ++i) {
    float place = (x[i] * 0.5f - start) * factor;
    if (has_noise) place += noise.at(i);
    place = place < top ? place : top;
    place = place > 0.0f ? place : 0.0f;
    const std::int32_t code = has_noise ? static_cast<std::int32_t>(place) : rounded(place);
    k[i] = static_cast<float>(code);
  }
  if (!has_noise && !format.has_rotation) {
    keep_exact(x, k, size, ends, top, dtype, spare + size, spare + 2 * size);
  }
  for (std::int64_t i = 0; i < size; ++i) k[i] = x[i] == 0.0f ? 0.0f : k[i] + 1.0f;
  if (format.kind == kInt8) {
    for (std::int64_t i = 0; i < size; ++i) {
      codes[i] = static_cast<std::uint8_t>(static_cast<std::int32_t>(k[i]));
    }
  } else {
    for (std::int64_t i = 0; i < half; ++i) {
      codes[i] = static_cast<std::uint8_t>(static_cast<std::int32_t>(k[i] + 16.0f * k[half + i]));
    }
  }
  return false;
}

void decode_asymmetric(const Format& format, const std::uint8_t* ZERO_COMM_RESTRICT codes,
                       const std::uint8_t* scale, float* ZERO_COMM_RESTRICT out) {
  const std::int64_t size = format.block_size, half = size / 2;
  const float top = format.kind == kInt8 ? 254.0f : 14.0f;
  float stored[2];
  std::memcpy(stored, scale, sizeof stored);
  const Ends ends = ends_of(stored[0], stored[1], top);
  const float zero = ends.lo - ends.lo;  // NaN in a non-finite block
  if (format.kind == kInt8) {
    for (std::int64_t i = 0; i < size; ++i) {
      const float value = value_of(static_cast<float>(codes[i]) - 1.0f, ends, top);
      out[i] = codes[i] == 0 ? zero : value;
    }
    return;
  }
  for (std::int64_t i = 0; i < half; ++i) {
    const std::int32_t lo = codes[i] & 15, hi = codes[i] >> 4;
    const float low_value = value_of(static_cast<float>(lo) - 1.0f, ends, top);
    const float high_value = value_of(static_cast<float>(hi) - 1.0f, ends, top);
    out[i] = lo == 0 ? zero : low_value;
    out[half + i] = hi == 0 ? zero : high_value;
  }
}

#include "ranges.inl"
