// Part of kernel.inl: how weights, copies and states lie in memory.

CPU_ADAM_INLINE void copy_bytes(char* to, const char* from, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// The absent copy: nothing is stored.
struct NoOut {
  static constexpr int kBytes = 0;
  static CPU_ADAM_INLINE void store(char*, Vec) {}
};

// [Note: streaming the copy]
// The copy is only written. An ordinary store first reads the cache line: 30 bytes of traffic per
// element where 28 would do (16-bit). A streamed store does not. It pays if the memory of the call
// exceeds the caches, so that the copy would be evicted anyway; the driver decides that.
template <class Out>
struct Streamed {
  static constexpr int kBytes = Out::kBytes;
  static CPU_ADAM_INLINE void store(char* to, Vec x) { Out::stream(to, x); }
};

// [Note: targets]
// Where a rule's master weight is: Whole<Out> is an fp32 master with a copy of type Out; Split is
// the bf16 parameter and its remainder, see [Note: a split master] in kernels.h.
template <class Out>
struct Whole {
  static constexpr int kMasterBytes = 4;
  static constexpr int kOutBytes = Out::kBytes;
  static constexpr bool kReadsOut = false;
  static CPU_ADAM_INLINE Vec load(const char* master, const char*, std::int64_t index) {
    return F32::load(master + index * kMasterBytes);
  }
  static CPU_ADAM_INLINE void store(char* master, char* out, std::int64_t index, Vec x) {
    F32::store(master + index * kMasterBytes, x);
    Out::store(out + index * kOutBytes, x);
  }
};

CPU_ADAM_INLINE UInt magnitude_bits(Vec x) { return uand(as_bits(x), uset1(0x7fffffffu)); }

struct Split {
  static constexpr int kMasterBytes = 2;
  static constexpr int kOutBytes = 2;
  static constexpr bool kReadsOut = true;
  static CPU_ADAM_INLINE Vec load(const char* master, const char* out, std::int64_t index) {
    const UInt upper = load_upper_16(master + index * 2);
    // A parameter that is zero is so by the user's hand (or less than 2**-133): a remainder from
    // before could wrap around to a NaN.
    return as_float(if_nonzero(upper, uadd(upper, load_i16(out + index * 2)), upper));
  }
  static CPU_ADAM_INLINE void store(char* master, char* out, std::int64_t index, Vec x) {
    const UInt bits = as_bits(x);
    // A NaN is not rounded: it comes out of arithmetic, so it is quiet, and stays a NaN.
    store_upper_16(master + index * 2, if_ordered(x, uadd(bits, uset1(0x8000)), bits));
    store_16(out + index * 2, bits);
  }
};

// [Note: states]
// How a rule's states lie in memory: kStates, kStateBytes, load, store. `index` says where the
// vector is in memory, `position` which elements of the tensor it holds.
template <int kCount>
struct Float32States {
  static constexpr int kStates = kCount;
  static constexpr int kStateBytes = 4;
  // No array is empty.
  using Values = Vec[kCount > 0 ? kCount : 1];
  static CPU_ADAM_INLINE void load(char* const* state, std::int64_t index, Values& values) {
    for (int k = 0; k < kCount; ++k) values[k] = F32::load(state[k] + index * kStateBytes);
  }
  CPU_ADAM_INLINE void store(char* const* state, std::int64_t index, std::int64_t,
                             const Values& values) const {
    for (int k = 0; k < kCount; ++k) F32::store(state[k] + index * kStateBytes, values[k]);
  }
};

// [Note: stochastic rounding]
// A state is rounded up with the probability of its distance from the value below, so that on
// average small changes are not lost. The random numbers are a function of (key, stream, element)
// alone: a counter, scrambled by two rounds of multiply and xor-shift with the multipliers of
// MurmurHash3's finalizer (Appleby, public domain). The key comes from the seed and the step.
CPU_ADAM_INLINE UInt random_bits(const std::uint32_t (&key)[2], std::int64_t position) {
  const auto wide = static_cast<std::uint64_t>(position);
  const auto low = static_cast<std::uint32_t>(wide);
  const auto high = static_cast<std::uint32_t>(wide >> 32);
  UInt x = uadd(lanes(), uset1(low + key[0]));
  x = umul(uxor(x, ushr<16>(x)), uset1(0x85ebca6bu));
  x = uxor(x, uset1(key[1] ^ (high * 0x9e3779b9u)));
  x = umul(uxor(x, ushr<13>(x)), uset1(0xc2b2ae35u));
  return uxor(x, ushr<16>(x));
}

// The bf16 number above or below, in the upper half of each lane. Infinities stay; so do NaNs.
CPU_ADAM_INLINE UInt round_stochastically(Vec x, UInt random16) {
  return if_ordered(x, uadd(as_bits(x), random16), as_bits(x));
}

struct RandomBF16States {
  static constexpr int kStates = 2;
  static constexpr int kStateBytes = 2;
  using Values = Vec[kStates];
  std::uint32_t key[2];
  static CPU_ADAM_INLINE void load(char* const* state, std::int64_t index, Values& values) {
    for (int k = 0; k < kStates; ++k) values[k] = BF16::load(state[k] + index * kStateBytes);
  }
  CPU_ADAM_INLINE void store(char* const* state, std::int64_t index, std::int64_t position,
                             const Values& values) const {
    const UInt random = random_bits(key, position);
    store_upper_16(state[0] + index * 2,
                   round_stochastically(values[0], uand(random, uset1(0xffff))));
    store_upper_16(state[1] + index * 2, round_stochastically(values[1], ushr<16>(random)));
  }
};
