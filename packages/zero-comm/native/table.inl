// Table of the kernels of one instruction set. Included in the anonymous namespace of its file.

// Tags that select the overloads of encode_block and decode_block.
struct DifferenceCoding {};
struct ValueCoding {};

#include "codec.inl"
#include "difference.inl"
#include "frame.inl"
#include "values.inl"

template <class Coding, class T>
constexpr zero_comm::CodingTable kCoding = {encode_blocks<Coding, T>, decode_blocks<Coding, T>};

constexpr zero_comm::KernelTable table(const char* name) {
  return {name,
          encode,
          decode,
          decode_sum,
          {{kCoding<DifferenceCoding, std::uint16_t>, kCoding<DifferenceCoding, std::uint32_t>},
           {kCoding<ValueCoding, std::uint16_t>, kCoding<ValueCoding, std::uint32_t>}},
          sum_words};
}
