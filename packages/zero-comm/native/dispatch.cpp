#include "dispatch.h"

#include <initializer_list>

#if defined(ZERO_COMM_HAVE_X86)
#if defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif

namespace zero_comm {
namespace {

#if defined(ZERO_COMM_HAVE_X86)

struct Registers {
  unsigned eax, ebx, ecx, edx;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r = {0, 0, 0, 0};
#if defined(_MSC_VER)
  int values[4];
  __cpuidex(values, static_cast<int>(leaf), static_cast<int>(subleaf));
  r = {static_cast<unsigned>(values[0]), static_cast<unsigned>(values[1]),
       static_cast<unsigned>(values[2]), static_cast<unsigned>(values[3])};
#else
  if (__get_cpuid_max(leaf & 0x80000000u, nullptr) >= leaf) {
    __cpuid_count(leaf, subleaf, r.eax, r.ebx, r.ecx, r.edx);
  }
#endif
  return r;
}

// Registers that the operating system saves at a task switch (XCR0).
unsigned long long saved_register_state() {
#if defined(_MSC_VER)
  return _xgetbv(0);
#else
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
#endif
}

bool has_bits(unsigned word, std::initializer_list<int> bits) {
  for (const int bit : bits) {
    if (((word >> bit) & 1u) == 0) return false;
  }
  return true;
}

struct Support {
  bool avx2;
  bool avx512;
  bool avx512_vbmi2;
};

// Bit numbers from Intel's Software Developer's Manual: volume 2A (CPUID), volume 1, 13.3 (XCR0).
Support detect() {
  const Registers basic = cpuid(1, 0);
  if (!has_bits(basic.ecx, {27})) return {false, false, false};  // OSXSAVE
  const unsigned long long saved = saved_register_state();
  const bool saves_ymm = (saved & 0x6u) == 0x6u;
  const bool saves_zmm = (saved & 0xe6u) == 0xe6u;
  const Registers extended = cpuid(7, 0);
  const bool avx2 = saves_ymm && has_bits(basic.ecx, {28, 29}) &&  // AVX, F16C
                    has_bits(extended.ebx, {5});
  // AVX-512 F, DQ, BW and VL
  const bool avx512 = avx2 && saves_zmm && has_bits(extended.ebx, {16, 17, 30, 31});
  return {avx2, avx512, avx512 && has_bits(extended.ecx, {6})};
}

#endif  // ZERO_COMM_HAVE_X86

std::vector<const KernelTable*> find_tables() {
  std::vector<const KernelTable*> tables = {&kGenericTable};
#if defined(ZERO_COMM_HAVE_X86)
  const Support support = detect();
  if (support.avx2) tables.push_back(&kAvx2Table);
  if (support.avx512) tables.push_back(&kAvx512Table);
  if (support.avx512_vbmi2) tables.push_back(&kAvx512Vbmi2Table);
#endif
  return tables;
}

}  // namespace

const std::vector<const KernelTable*>& available_tables() {
  // Never deleted, because threads may outlive static destructors.
  static const auto* tables = new std::vector<const KernelTable*>(find_tables());
  return *tables;
}

std::vector<const char*> known_isas() { return {"generic", "avx2", "avx512", "avx512_vbmi2"}; }

}  // namespace zero_comm
