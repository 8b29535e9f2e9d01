#include "dispatch.h"

#if defined(CPU_ADAM_HAVE_X86)
#if defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif

namespace cpu_adam {
namespace {

#if defined(CPU_ADAM_HAVE_X86)

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

// Returns the register state that the operating system saves at a context switch (XCR0).
unsigned long long saved_register_state() {
#if defined(_MSC_VER)
  return _xgetbv(0);
#else
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
#endif
}

bool has_bit(unsigned word, int bit) { return ((word >> bit) & 1u) != 0; }

struct Support {
  bool avx2;
  bool avx512;
};

// Bit numbers are from Intel's Software Developer's Manual, volume 2A (CPUID) and volume 1, section
// 13.3 (XCR0).
Support detect() {
  const Registers basic = cpuid(1, 0);
  const bool has_osxsave = has_bit(basic.ecx, 27);
  if (!has_osxsave) return {false, false};
  const unsigned long long saved = saved_register_state();
  const bool saves_ymm = (saved & 0x6u) == 0x6u;
  const bool saves_zmm = (saved & 0xe6u) == 0xe6u;
  const Registers extended = cpuid(7, 0);
  const bool has_fma = has_bit(basic.ecx, 12);
  const bool has_avx = has_bit(basic.ecx, 28);
  const bool has_f16c = has_bit(basic.ecx, 29);
  const bool has_avx2 = has_bit(extended.ebx, 5);
  const bool has_avx512f = has_bit(extended.ebx, 16);
  const bool has_avx512bw = has_bit(extended.ebx, 30);
  const bool avx2 = saves_ymm && has_avx && has_avx2 && has_fma && has_f16c;
  return {avx2, avx2 && saves_zmm && has_avx512f && has_avx512bw};
}

#endif  // CPU_ADAM_HAVE_X86

std::vector<const KernelTable*> find_tables() {
  std::vector<const KernelTable*> tables = {&kScalarTable};
#if defined(CPU_ADAM_HAVE_X86)
  const Support support = detect();
  if (support.avx2) tables.push_back(&kAvx2Table);
  if (support.avx512) tables.push_back(&kAvx512Table);
#endif
#if defined(CPU_ADAM_HAVE_NEON)
  tables.push_back(&kNeonTable);
#endif
  return tables;
}

}  // namespace

const std::vector<const KernelTable*>& available_tables() {
  // Never freed: workers may outlive static destructors.
  static const auto* tables = new std::vector<const KernelTable*>(find_tables());
  return *tables;
}

std::vector<const char*> known_isas() { return {"scalar", "avx2", "avx512", "neon"}; }

}  // namespace cpu_adam
