// The kernels of one instruction set as a table. Included within its unnamed namespace.

#include "codec.inl"
#include "difference.inl"
#include "values.inl"

constexpr zero_comm::KernelTable table(const char* name) {
  return {name,
          encode,
          decode,
          decode_sum,
          {encode_blocks<std::uint16_t>, decode_blocks<std::uint16_t>},
          {encode_blocks<std::uint32_t>, decode_blocks<std::uint32_t>},
          {encode_value_blocks<std::uint16_t>, decode_value_blocks<std::uint16_t>},
          {encode_value_blocks<std::uint32_t>, decode_value_blocks<std::uint32_t>},
          sum_words};
}
