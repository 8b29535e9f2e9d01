// Part of kernel.inl: memory layout of weights, copies and states.

CPU_ADAM_INLINE void copy_bytes(char* to, const char* from, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// Element type of the copy for master weights without a copy. Stores nothing.
struct NoOut {
  static constexpr int kBytes = 0;
  static CPU_ADAM_INLINE void store(char*, Vec) {}
};

// [Note: streaming the copy]
// The copy is only written. An ordinary store first reads the cache line, which adds 2 bytes of
// traffic to the 28 bytes per element with a 16-bit copy. A non-temporal ("streamed") store does
// not. It is faster if the memory of the call exceeds the caches, so that the copy would be evicted
// anyway. The driver decides.
template <class Out>
struct Streamed {
  static constexpr int kBytes = Out::kBytes;
  static CPU_ADAM_INLINE void store(char* to, Vec x) { Out::stream(to, x); }
};

// [Note: targets]
// Storage formats of master weights. Whole<Out> is an fp32 master with a copy of type Out. Split is
// a bf16 parameter and its remainder: see [Note: a split master] in kernels.h.
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
    // If the parameter is zero, the user has set it to zero (or it is below 2**-133). Ignore the
    // old remainder then, because adding it could give a NaN.
    return as_float(if_nonzero(upper, uadd(upper, load_i16(out + index * 2)), upper));
  }
  static CPU_ADAM_INLINE void store(char* master, char* out, std::int64_t index, Vec x) {
    const UInt bits = as_bits(x);
    // A NaN is not rounded. Arithmetic results are quiet NaNs, which remain NaNs.
    store_upper_16(master + index * 2, if_ordered(x, uadd(bits, uset1(0x8000)), bits));
    store_16(out + index * 2, bits);
  }
};

// [Note: states]
// A states class describes how a rule's states are stored: kStates, kStateBytes, load, store.
// `index` is the position of the vector in memory, and `position` the index of its first element in
// the tensor. They differ in padded copies.
template <int kCount>
struct Float32States {
  static constexpr int kStates = kCount;
  static constexpr int kStateBytes = 4;
  // C++ has no empty arrays.
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
// A state is rounded up with a probability equal to its distance from the bf16 value below, so that
// small changes survive on average. Random numbers depend only on (key, stream, element). They are
// a counter, scrambled by two rounds of multiply and xor-shift with the multipliers of
// MurmurHash3's finalizer (Appleby, public domain). The key is derived from seed and step.
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

// Returns an adjacent bf16 number in the upper half of each lane. Infinities and NaNs are
// unchanged.
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
