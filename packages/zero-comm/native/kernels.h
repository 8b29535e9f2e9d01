// Interface between the kernels of each instruction set and other code: plain structs and a table
// of function pointers. Files with instruction-set flags include this header, so it contains no
// function and no standard template. The linker could otherwise use their AVX code everywhere.
#pragma once

#include <cstdint>

#if defined(_MSC_VER)
#define ZERO_COMM_INLINE __forceinline
#define ZERO_COMM_RESTRICT __restrict
#else
#define ZERO_COMM_INLINE inline __attribute__((always_inline))
#define ZERO_COMM_RESTRICT __restrict__
#endif

namespace zero_comm {

// native_backend.py uses the same numbers.
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum Kind : int { kInt8 = 0, kInt4 = 1, kE4M3 = 2, kE5M2 = 3 };

struct Format {
  int kind;
  bool is_symmetric;
  bool has_rotation;
  std::int64_t block_size;
};

constexpr std::int64_t kRotationSize = 64;

// Size of a function's `scratch` in blocks of floats.
constexpr std::int64_t kScratchBlocks = 4;

// One row to quantize. [Note: the quantized buffer] in block_format.py defines the bytes.
struct EncodeRow {
  const void* x;
  std::uint8_t* codes;
  std::uint8_t* scales;
  std::int64_t numel;
  bool has_noise;
  std::uint32_t seed;  // mix(s) of [Note: stochastic rounding]
};

// One row to dequantize.
struct DecodeRow {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  std::int64_t numel;
};

// Quantizes blocks [first, last) of a row. Returns whether a block has NaN or Inf.
using EncodeFunction = bool (*)(const Format& format, int dtype, const EncodeRow& row,
                                std::int64_t first, std::int64_t last, float* scratch);

// Dequantizes blocks [first, last) of a row into their part of `out`, the values of the row.
using DecodeFunction = void (*)(const Format& format, int dtype, const DecodeRow& row, void* out,
                                std::int64_t first, std::int64_t last, float* scratch);

// Sums blocks [first, last) of all rows in fp32, in row order.
using SumFunction = void (*)(const Format& format, const DecodeRow* rows, std::int64_t num_rows,
                             float* out, std::int64_t first, std::int64_t last, float* scratch);

// ---- lossless codings: [Note: the block frame] in block_frame.py ----

constexpr int kFrameBlock = 256;  // elements
constexpr int kModeShift = 11;    // a descriptor is mode << 11 | number of bytes
enum Coding : int { kDifferences = 0, kValues = 1, kNumCodings = 2 };  // native_codec.py uses these
enum FrameMode : int { kEmpty = 0, kRaw = 1 };
enum DifferenceMode : int { kList = 2, kBitmap = 6, kDense = 10 };
enum ValueMode : int { kCoded = 2 };  // plus the bits of a code

// Encodes `numel` elements of `now`, as differences from `old` or as values. Writes one descriptor
// per block, and the bytes of all blocks without gaps. Returns the number of bytes.
using EncodeBlocksFunction = std::int64_t (*)(const void* old, const void* now, std::int64_t numel,
                                              std::uint16_t* descriptors, std::uint8_t* out);

// Decodes `numel` elements in place. Returns false if no encoder can have written the bytes. Some
// elements may have changed then. The caller has checked that the lengths of all blocks fit.
using DecodeBlocksFunction = bool (*)(const std::uint16_t* descriptors, const std::uint8_t* codes,
                                      std::int64_t numel, void* values);

// Functions of one coding for elements of one size.
struct CodingTable {
  EncodeBlocksFunction encode;
  DecodeBlocksFunction decode;
};

// Checksum of 64-bit words, defined in checksum.py. `odd` has the 1,024 factors of a turn.
using ChecksumFunction = std::uint64_t (*)(const std::uint64_t* words, std::int64_t count,
                                           const std::uint64_t* odd);

// All functions compiled for one instruction set.
struct KernelTable {
  const char* name;
  EncodeFunction encode;
  DecodeFunction decode;
  SumFunction decode_sum;
  CodingTable codings[kNumCodings][2];  // 16-bit and 32-bit elements
  ChecksumFunction checksum;
};

extern const KernelTable kGenericTable;
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
extern const KernelTable kAvx512Vbmi2Table;

}  // namespace zero_comm
