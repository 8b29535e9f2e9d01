// Loops over the blocks of a row: the quantizer functions of the kernel table. Included by
// codec.inl.

// Copies the values of a block to `scratch` as fp32, pads them with zeros and rotates them.
void stage(const Format& format, int dtype, const void* x, std::int64_t offset,
           std::int64_t num_valid, float* scratch) {
  if (dtype == kFloat32) {
    std::memcpy(scratch, static_cast<const float*>(x) + offset,
                static_cast<std::size_t>(num_valid) * sizeof(float));
  } else if (dtype == kBFloat16) {
    const std::uint16_t* const from = static_cast<const std::uint16_t*>(x) + offset;
    for (std::int64_t i = 0; i < num_valid; ++i) scratch[i] = load(from + i);
  } else {
    halves_to_floats(static_cast<const std::uint16_t*>(x) + offset, scratch, num_valid);
  }
  for (std::int64_t i = num_valid; i < format.block_size; ++i) scratch[i] = 0.0f;
  if (format.has_rotation) rotate(scratch, format.block_size);
}

template <int kKind, bool kHasNoise, int kSize>
bool encode_range_sized(const Format& format, int dtype, const EncodeRow& row, std::int64_t first,
                        std::int64_t last, float* scratch) {
  const std::int64_t size = size_or<kSize>(format.block_size);
  const std::int64_t nbytes = kKind == kInt4 ? size / 2 : size;
  const float largest_max = dtype == kFloat16 && !format.has_rotation ? kFloat16Max : kBFloat16Max;
  bool is_bad = false;
  for (std::int64_t block = first; block < last; ++block) {
    const std::int64_t offset = block * size;
    const Noise noise = {static_cast<std::uint32_t>(offset), row.seed};
    std::uint8_t* const codes = row.codes + block * nbytes;
    std::uint8_t* const scale = row.scales + 2 * block;
    const bool is_whole = row.numel - offset >= size;
    if (is_whole && !format.has_rotation && dtype == kFloat32) {
      const float* const x = static_cast<const float*>(row.x) + offset;
      is_bad |=
          encode_symmetric<kKind, kHasNoise, kSize>(x, size, largest_max, noise, codes, scale);
    } else if (is_whole && !format.has_rotation && dtype == kBFloat16) {
      const std::uint16_t* const x = static_cast<const std::uint16_t*>(row.x) + offset;
      is_bad |=
          encode_symmetric<kKind, kHasNoise, kSize>(x, size, largest_max, noise, codes, scale);
    } else {
      stage(format, dtype, row.x, offset, is_whole ? size : row.numel - offset, scratch);
      is_bad |= encode_symmetric<kKind, kHasNoise, kSize>(scratch, size, largest_max, noise, codes,
                                                          scale);
    }
  }
  return is_bad;
}

template <int kKind, bool kHasNoise>
bool encode_range(const Format& format, int dtype, const EncodeRow& row, std::int64_t first,
                  std::int64_t last, float* scratch) {
  if (!kHasNoise && format.block_size == 256) {
    return encode_range_sized<kKind, kHasNoise, 256>(format, dtype, row, first, last, scratch);
  }
  if (!kHasNoise && format.block_size == 128) {
    return encode_range_sized<kKind, kHasNoise, 128>(format, dtype, row, first, last, scratch);
  }
  return encode_range_sized<kKind, kHasNoise, 0>(format, dtype, row, first, last, scratch);
}

bool encode_asymmetric_range(const Format& format, int dtype, const EncodeRow& row,
                             std::int64_t first, std::int64_t last, float* scratch) {
  const std::int64_t size = format.block_size;
  const std::int64_t nbytes = format.kind == kInt4 ? size / 2 : size;
  bool is_bad = false;
  for (std::int64_t block = first; block < last; ++block) {
    const std::int64_t offset = block * size;
    const Noise noise = {static_cast<std::uint32_t>(offset), row.seed};
    const std::int64_t rest = row.numel - offset;
    const std::int64_t num_valid = rest < size ? rest : size;
    stage(format, dtype, row.x, offset, num_valid, scratch);
    is_bad |= encode_asymmetric(format, scratch, format.has_rotation ? size : num_valid, dtype,
                                row.has_noise, noise, row.codes + block * nbytes,
                                row.scales + 8 * block, scratch + size);
  }
  return is_bad;
}

bool encode(const Format& format, int dtype, const EncodeRow& row, std::int64_t first,
            std::int64_t last, float* scratch) {
  if (!format.is_symmetric) {
    return encode_asymmetric_range(format, dtype, row, first, last, scratch);
  }
  constexpr EncodeFunction kFunctions[4][2] = {
      {encode_range<kInt8, false>, encode_range<kInt8, true>},
      {encode_range<kInt4, false>, encode_range<kInt4, true>},
      {encode_range<kE4M3, false>, encode_range<kE4M3, true>},
      {encode_range<kE5M2, false>, encode_range<kE5M2, true>},
  };
  return kFunctions[format.kind][row.has_noise ? 1 : 0](format, dtype, row, first, last, scratch);
}

void decode_symmetric_to_float(int kind, const std::uint8_t* codes, const std::uint8_t* scale,
                               std::int64_t size, float* out) {
  const float step = step_of(scale, level_of(kind));
  const ToFloat sink = {out};
  if (kind == kInt8) return decode_symmetric<kInt8, 0>(codes, step, size, sink);
  if (kind == kInt4) return decode_symmetric<kInt4, 0>(codes, step, size, sink);
  if (kind == kE4M3) return decode_symmetric<kE4M3, 0>(codes, step, size, sink);
  decode_symmetric<kE5M2, 0>(codes, step, size, sink);
}

// Decodes one block to fp32 in `scratch` and reverses the rotation.
void unstage(const Format& format, const DecodeRow& row, std::int64_t block, float* scratch) {
  const std::int64_t size = format.block_size;
  const std::uint8_t* const codes = row.codes + block * (format.kind == kInt4 ? size / 2 : size);
  if (format.is_symmetric) {
    decode_symmetric_to_float(format.kind, codes, row.scales + 2 * block, size, scratch);
  } else {
    decode_asymmetric(format, codes, row.scales + 8 * block, scratch);
  }
  if (format.has_rotation) rotate(scratch, size);
}

void put_all(const float* ZERO_COMM_RESTRICT x, std::int64_t count, const ToFloat& sink) {
  std::memcpy(sink.out, x, static_cast<std::size_t>(count) * sizeof(float));
}
void put_all(const float* ZERO_COMM_RESTRICT x, std::int64_t count, const ToSum& sink) {
  for (std::int64_t i = 0; i < count; ++i) sink.out[i] += x[i];
}
void put_all(const float* ZERO_COMM_RESTRICT x, std::int64_t count, const ToBFloat16& sink) {
  std::uint16_t* const ZERO_COMM_RESTRICT out = sink.out;
  for (std::int64_t i = 0; i < count; ++i) out[i] = to_bfloat16(x[i]);
}
struct ToFloat16 {
  std::uint16_t* out;
};
void put_all(const float* ZERO_COMM_RESTRICT x, std::int64_t count, const ToFloat16& sink) {
  floats_to_halves(x, sink.out, count);
}

// Decodes one block into `sink`. Only whole symmetric blocks without rotation avoid `scratch`.
template <int kKind, int kSize, class Sink>
ZERO_COMM_INLINE void decode_block(const Format& format, const DecodeRow& row, std::int64_t block,
                                   float* scratch, const Sink& sink) {
  const std::int64_t size = size_or<kSize>(format.block_size);
  const std::int64_t rest = row.numel - block * size;
  if (format.is_symmetric && !format.has_rotation && rest >= size) {
    const std::uint8_t* const codes = row.codes + block * (kKind == kInt4 ? size / 2 : size);
    const float step = step_of(row.scales + 2 * block, level_of(kKind));
    decode_symmetric<kKind, kSize>(codes, step, size, sink);
    return;
  }
  unstage(format, row, block, scratch);
  put_all(scratch, rest < size ? rest : size, sink);
}
template <int kKind, int kSize>
ZERO_COMM_INLINE void decode_block(const Format& format, const DecodeRow& row, std::int64_t block,
                                   float* scratch, const ToFloat16& sink) {
  const std::int64_t rest = row.numel - block * format.block_size;
  unstage(format, row, block, scratch);
  put_all(scratch, rest < format.block_size ? rest : format.block_size, sink);
}

template <int kKind, int kSize>
void decode_range_sized(const Format& format, int dtype, const DecodeRow& row, void* out,
                        std::int64_t first, std::int64_t last, float* scratch) {
  const std::int64_t size = size_or<kSize>(format.block_size);
  for (std::int64_t block = first; block < last; ++block) {
    const std::int64_t offset = block * size;
    if (dtype == kFloat32) {
      const ToFloat sink = {static_cast<float*>(out) + offset};
      decode_block<kKind, kSize>(format, row, block, scratch, sink);
    } else if (dtype == kBFloat16) {
      const ToBFloat16 sink = {static_cast<std::uint16_t*>(out) + offset};
      decode_block<kKind, kSize>(format, row, block, scratch, sink);
    } else {
      const ToFloat16 sink = {static_cast<std::uint16_t*>(out) + offset};
      decode_block<kKind, kSize>(format, row, block, scratch, sink);
    }
  }
}

template <int kKind, int kSize>
void sum_range_sized(const Format& format, const DecodeRow* rows, std::int64_t num_rows, float* out,
                     std::int64_t first, std::int64_t last, float* scratch) {
  const std::int64_t size = size_or<kSize>(format.block_size);
  for (std::int64_t block = first; block < last; ++block) {
    float* const place = out + block * size;
    decode_block<kKind, kSize>(format, rows[0], block, scratch, ToFloat{place});
    for (std::int64_t row = 1; row < num_rows; ++row) {
      decode_block<kKind, kSize>(format, rows[row], block, scratch, ToSum{place});
    }
  }
}

template <int kKind>
void decode_range(const Format& format, int dtype, const DecodeRow& row, void* out,
                  std::int64_t first, std::int64_t last, float* scratch) {
  const auto function = format.block_size == 256   ? decode_range_sized<kKind, 256>
                        : format.block_size == 128 ? decode_range_sized<kKind, 128>
                                                   : decode_range_sized<kKind, 0>;
  function(format, dtype, row, out, first, last, scratch);
}

template <int kKind>
void sum_range(const Format& format, const DecodeRow* rows, std::int64_t num_rows, float* out,
               std::int64_t first, std::int64_t last, float* scratch) {
  const auto function = format.block_size == 256   ? sum_range_sized<kKind, 256>
                        : format.block_size == 128 ? sum_range_sized<kKind, 128>
                                                   : sum_range_sized<kKind, 0>;
  function(format, rows, num_rows, out, first, last, scratch);
}

void decode(const Format& format, int dtype, const DecodeRow& row, void* out, std::int64_t first,
            std::int64_t last, float* scratch) {
  constexpr DecodeFunction kFunctions[4] = {decode_range<kInt8>, decode_range<kInt4>,
                                            decode_range<kE4M3>, decode_range<kE5M2>};
  kFunctions[format.kind](format, dtype, row, out, first, last, scratch);
}

void decode_sum(const Format& format, const DecodeRow* rows, std::int64_t num_rows, float* out,
                std::int64_t first, std::int64_t last, float* scratch) {
  constexpr SumFunction kFunctions[4] = {sum_range<kInt8>, sum_range<kInt4>, sum_range<kE4M3>,
                                         sum_range<kE5M2>};
  kFunctions[format.kind](format, rows, num_rows, out, first, last, scratch);
}
