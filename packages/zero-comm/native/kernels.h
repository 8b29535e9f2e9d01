// The border between the code for one instruction set and everything else: plain structs and a
// table of function pointers. Included by files with instruction-set flags, so it defines no
// function and pulls in no standard template: the linker might keep their AVX copy for all.
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

// The numbers are shared with native_backend.py.
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum Kind : int { kInt8 = 0, kInt4 = 1, kE4M3 = 2, kE5M2 = 3 };

struct Format {
  int kind;
  bool is_symmetric;
  bool has_rotation;
  std::int64_t block_size;
};

constexpr std::int64_t kRotationSize = 64;

// Floats that a function below may overwrite, for a block size: see scratch_numel.
constexpr std::int64_t kScratchBlocks = 4;

// One row to quantize: [Note: the quantized buffer] in block_format.py.
struct EncodeRow {
  const void* x;
  std::uint8_t* codes;
  std::uint8_t* scales;
  std::int64_t numel;
  bool has_noise;
  std::uint32_t seed;  // of this row, mixed already
};

// One row to dequantize.
struct DecodeRow {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  std::int64_t numel;
};

// Quantizes blocks [first, last) of a row; returns whether one has NaN or Inf.
using EncodeFunction = bool (*)(const Format& format, int dtype, const EncodeRow& row,
                                std::int64_t first, std::int64_t last, float* scratch);

// Dequantizes blocks [first, last) of a row into their place in `out`, the row's values.
using DecodeFunction = void (*)(const Format& format, int dtype, const DecodeRow& row, void* out,
                                std::int64_t first, std::int64_t last, float* scratch);

// Adds up blocks [first, last) of all rows, from the first to the last, in fp32.
using SumFunction = void (*)(const Format& format, const DecodeRow* rows, std::int64_t num_rows,
                             float* out, std::int64_t first, std::int64_t last, float* scratch);

// ---- lossless codings: [Note: the block frame] in block_frame.py ----

constexpr int kFrameBlock = 256;  // elements
constexpr int kModeShift = 11;    // a descriptor is mode << 11 | bytes
enum Coding : int { kDifferences = 0, kValues = 1, kNumCodings = 2 };  // as in native_codec.py
enum FrameMode : int { kEmpty = 0, kRaw = 1 };
enum DifferenceMode : int { kList = 2, kBitmap = 6, kDense = 10 };
enum ValueMode : int { kCoded = 2 };  // kCoded + bits of a code

// Codes `numel` elements of `now`, differences by `old`: a descriptor per block, and the blocks'
// bytes one after another. Returns the number of bytes.
using EncodeBlocksFunction = std::int64_t (*)(const void* old, const void* now, std::int64_t numel,
                                              std::uint16_t* descriptors, std::uint8_t* out);

// Changes or fills `numel` elements. Returns whether the bytes are those of blocks; some elements
// are changed even if not. Lengths have been checked.
using DecodeBlocksFunction = bool (*)(const std::uint16_t* descriptors, const std::uint8_t* codes,
                                      std::int64_t numel, void* values);

// For elements of one size.
struct CodingTable {
  EncodeBlocksFunction encode;
  DecodeBlocksFunction decode;
};

// Sums 64-bit words, each times an odd number of its place: checksum.py. `odd` has 1,024 of them.
using ChecksumFunction = std::uint64_t (*)(const std::uint64_t* words, std::int64_t count,
                                           const std::uint64_t* odd);

// Everything that one instruction set offers.
struct KernelTable {
  const char* name;
  EncodeFunction encode;
  DecodeFunction decode;
  SumFunction decode_sum;
  CodingTable codings[kNumCodings][2];  // of 16 bits, of 32 bits
  ChecksumFunction checksum;
};

extern const KernelTable kGenericTable;
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
extern const KernelTable kAvx512Vbmi2Table;

}  // namespace zero_comm
