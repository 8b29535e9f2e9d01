// Loops over the blocks of both codings. An incomplete last block is coded in a padded copy.

template <class Coding, class T>
std::int64_t encode_blocks(const void* old, const void* now, std::int64_t numel,
                           std::uint16_t* descriptors, std::uint8_t* out) {
  const std::uint8_t* const begin = out;
  for (std::int64_t start = 0; start < numel; start += kBlock) {
    const T* const a = static_cast<const T*>(old) + start;
    const T* const b = static_cast<const T*>(now) + start;
    const int size = static_cast<int>(numel - start < kBlock ? numel - start : kBlock);
    std::uint16_t descriptor;
    if (size == kBlock) {
      descriptor = encode_block<T>(Coding{}, a, b, size, out);
    } else {
      T padded[2][kBlock] = {};
      std::memcpy(padded[0], a, static_cast<std::size_t>(size) * sizeof(T));
      std::memcpy(padded[1], b, static_cast<std::size_t>(size) * sizeof(T));
      descriptor = encode_block<T>(Coding{}, padded[0], padded[1], size, out);
    }
    *descriptors++ = descriptor;
    out += descriptor & ((1 << kModeShift) - 1);
  }
  return out - begin;
}

template <class Coding, class T>
bool decode_blocks(const std::uint16_t* descriptors, const std::uint8_t* codes, std::int64_t numel,
                   void* values) {
  for (std::int64_t start = 0; start < numel; start += kBlock) {
    T* const x = static_cast<T*>(values) + start;
    const int size = static_cast<int>(numel - start < kBlock ? numel - start : kBlock);
    const std::uint16_t descriptor = *descriptors++;
    if (size == kBlock) {
      if (!decode_block<T>(Coding{}, descriptor, codes, size, x)) return false;
    } else {
      T padded[kBlock] = {};
      const std::size_t nbytes = static_cast<std::size_t>(size) * sizeof(T);
      std::memcpy(padded, x, nbytes);
      if (!decode_block<T>(Coding{}, descriptor, codes, size, padded)) return false;
      std::memcpy(x, padded, nbytes);
    }
    codes += descriptor & ((1 << kModeShift) - 1);
  }
  return true;
}
