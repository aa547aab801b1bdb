// The loops of reduce.cpp for one instruction set; reduce.cpp includes this once for each of them.
//
//   needs         MIRROR_LEVEL, the namespace; MIRROR_VECTOR_BYTES, the width of a register; and,
//                 around the #include, the #pragma GCC target that goes with them
//   traffic       reads every input once, writes every output once
//   determinism   element i is op(... op(op(in[0][i], in[1][i]), in[2][i]) ...), then scaled,
//                 then rounded, wherever the loops begin and end: all levels give equal bits
//
// No include guard, on purpose. Nothing here may be called on a CPU that lacks the instructions.

namespace MIRROR_LEVEL {

#define MIRROR_INLINE [[gnu::always_inline]] inline

// Four registers per replica and step. Measured with n = 2, 4, 8 and AVX-512: 4, 8 and 16 are
// equally fast, and twice as fast as sums kept in a block in the L1 cache.
constexpr int kTile = 4;
// How far ahead of its loads a tile asks for memory, in bytes, replica by replica: the hardware
// follows each stream by itself, but starts late on every page. Measured: 0 to 11 % less time.
constexpr int kAhead = 1024;

template <class T, int lanes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(lanes * sizeof(T))));
};
template <class T, int lanes>
using Vector = typename VectorOf<T, lanes>::Type;

template <class To, class From>
MIRROR_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

template <int lanes>
struct Half {
  using Narrow = Vector<std::uint16_t, lanes>;
  using Bits = Vector<std::uint32_t, lanes>;
  using Ints = Vector<std::int32_t, lanes>;
  using Floats = Vector<float, lanes>;
};

// A type has a format in memory (Stored), one for sums (Sum), and conversions between them.
template <class T>
struct Plain {
  using Stored = T;
  using Sum = T;
  template <int lanes>
  MIRROR_INLINE static Vector<T, lanes> widen(Vector<T, lanes> x) { return x; }
  template <int lanes>
  MIRROR_INLINE static Vector<T, lanes> narrow(Vector<T, lanes> x) { return x; }
};

struct BFloat16 {
  using Stored = std::uint16_t;
  using Sum = float;

  template <int lanes>
  MIRROR_INLINE static Vector<float, lanes> widen(Vector<std::uint16_t, lanes> x) {
    return bits_as<Vector<float, lanes>>(
        __builtin_convertvector(x, typename Half<lanes>::Bits) << 16);
  }

  // To nearest, ties to even; a NaN stays one, quiet, with the upper bits of its payload.
  template <int lanes>
  MIRROR_INLINE static Vector<std::uint16_t, lanes> narrow(Vector<float, lanes> x) {
    using Bits = typename Half<lanes>::Bits;
    const Bits u = bits_as<Bits>(x);
    const Bits rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const Bits nan = (u >> 16) | 0x40u;
    return __builtin_convertvector((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded,
                                   typename Half<lanes>::Narrow);
  }
};

struct Float16 {
  using Stored = std::uint16_t;
  using Sum = float;

  // Neither way makes a subnormal float, so that flush-to-zero cannot change the result: a
  // subnormal half is m * 2^-24, and a float below 2^-14 is rounded by adding 0.5, whose last
  // place is 2^-24. The instructions behave like that by definition.
  template <int lanes>
  MIRROR_INLINE static Vector<float, lanes> widen(Vector<std::uint16_t, lanes> x) {
#if defined(__AVX512F__)
    if constexpr (lanes == 16) {
      return bits_as<Vector<float, lanes>>(_mm512_cvtph_ps(bits_as<__m256i>(x)));
    }
#endif
#if defined(__F16C__)
    if constexpr (lanes == 8) {
      return bits_as<Vector<float, lanes>>(_mm256_cvtph_ps(bits_as<__m128i>(x)));
    }
#endif
    using Bits = typename Half<lanes>::Bits;
    using Ints = typename Half<lanes>::Ints;
    using Floats = typename Half<lanes>::Floats;
    const Bits wide = __builtin_convertvector(x, Bits);
    const Bits sign = (wide & 0x8000u) << 16;
    const Bits m = wide & 0x7fffu;
    const Bits shifted = (m << 13) + (112u << 23);
    const Bits special = (shifted + (112u << 23)) | (m > 0x7c00u ? Bits{} + 0x400000u : Bits{});
    const Bits subnormal =
        bits_as<Bits>(__builtin_convertvector(bits_as<Ints>(m), Floats) * 0x1p-24f);
    return bits_as<Floats>(sign |
                           (m < 0x400u ? subnormal : (m >= 0x7c00u ? special : shifted)));
  }

  template <int lanes>
  MIRROR_INLINE static Vector<std::uint16_t, lanes> narrow(Vector<float, lanes> x) {
#if defined(__AVX512F__)
    if constexpr (lanes == 16) {
      return bits_as<Vector<std::uint16_t, lanes>>(
          _mm512_cvtps_ph(bits_as<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
#endif
#if defined(__F16C__)
    if constexpr (lanes == 8) {
      return bits_as<Vector<std::uint16_t, lanes>>(
          _mm256_cvtps_ph(bits_as<__m256>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
#endif
    using Bits = typename Half<lanes>::Bits;
    using Floats = typename Half<lanes>::Floats;
    const Bits u = bits_as<Bits>(x);
    const Bits sign = (u >> 16) & 0x8000u;
    const Bits a = u & 0x7fffffffu;
    const Bits rounded = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;
    const Bits subnormal = bits_as<Bits>(bits_as<Floats>(a) + 0.5f) - 0x3f000000u;
    const Bits nan = ((a >> 13) & 0x3ffu) | 0x7e00u;
    const Bits special = a > 0x7f800000u ? nan : Bits{} + 0x7c00u;
    return __builtin_convertvector(
        sign | (a < 0x38800000u ? subnormal : (a >= 0x47800000u ? special : rounded)),
        typename Half<lanes>::Narrow);
  }
};

// Integers wrap around. A NaN of any replica stays; as x < NaN is false, only a NaN in x needs
// care. Of zeros of both signs the earlier one is kept.
template <class T, Op op, class V>
MIRROR_INLINE V combine(V total, V x) {
  if constexpr (op == Op::kSum || op == Op::kProd) {
    if constexpr (std::is_integral_v<T>) {
      using Bits = Vector<std::make_unsigned_t<T>, sizeof(V) / sizeof(T)>;
      const Bits a = bits_as<Bits>(total), b = bits_as<Bits>(x);
      return bits_as<V>(op == Op::kSum ? a + b : a * b);
    } else {
      return op == Op::kSum ? total + x : total * x;
    }
  } else {
    const V chosen = op == Op::kMin ? (x < total ? x : total) : (x > total ? x : total);
    if constexpr (std::is_floating_point_v<T>) return x != x ? x : chosen;
    return chosen;
  }
}

// Reduces `lanes * vectors` elements, which stay in registers, from element `i` on.
template <class Type, Op op, int lanes, int vectors>
MIRROR_INLINE void reduce_tile(const Pointers& to, std::int64_t i) {
  using Stored = typename Type::Stored;
  using Sum = typename Type::Sum;
  using Narrow = Vector<Stored, lanes>;
  using Wide = Vector<Sum, lanes>;
  const auto load = [](const void* base, std::int64_t at) __attribute__((always_inline)) {
    Narrow x;
    __builtin_memcpy(&x, static_cast<const Stored*>(base) + at, sizeof(x));
    return Type::template widen<lanes>(x);
  };
  const auto ask_ahead = [](const void* base, std::int64_t at) __attribute__((always_inline)) {
    constexpr std::size_t kLine = 64;
    const char* const from = static_cast<const char*>(base) + at * sizeof(Stored);
    if constexpr (vectors == kTile) {
#pragma GCC unroll 4
      for (std::size_t b = 0; b < kTile * sizeof(Narrow); b += kLine) {
        __builtin_prefetch(from + kAhead + b);
      }
    }
  };
  Wide total[vectors];
  ask_ahead(to.inputs[0], i);
#pragma GCC unroll 4
  for (int v = 0; v < vectors; ++v) total[v] = load(to.inputs[0], i + v * lanes);
  for (int r = 1; r < to.num_inputs; ++r) {
    ask_ahead(to.inputs[r], i);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      total[v] = combine<Sum, op>(total[v], load(to.inputs[r], i + v * lanes));
    }
  }
  if constexpr (std::is_floating_point_v<Sum>) {
    if (to.scale != 1.0) {  // by 1 would be exact, but would flush subnormals where that is on
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) total[v] = total[v] * static_cast<Sum>(to.scale);
    }
  }
  Narrow result[vectors];
#pragma GCC unroll 4
  for (int v = 0; v < vectors; ++v) result[v] = Type::template narrow<lanes>(total[v]);
  for (int r = 0; r < to.num_outputs; ++r) {
    Stored* const output = static_cast<Stored*>(to.outputs[r]) + i;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      __builtin_memcpy(output + v * lanes, &result[v], sizeof(Narrow));
    }
  }
}

template <class Type, Op op>
void reduce(const Pointers& to, std::int64_t begin, std::int64_t end) {
  constexpr int kLanes = MIRROR_VECTOR_BYTES / sizeof(typename Type::Sum);
  std::int64_t i = begin;
  for (; i + kTile * kLanes <= end; i += kTile * kLanes) {
    reduce_tile<Type, op, kLanes, kTile>(to, i);
  }
  for (; i + kLanes <= end; i += kLanes) reduce_tile<Type, op, kLanes, 1>(to, i);
  for (; i < end; ++i) reduce_tile<Type, op, 1, 1>(to, i);
}

template <class Type>
constexpr std::array<Reducer, kNumOps> reducers() {
  return {reduce<Type, Op::kSum>, reduce<Type, Op::kMin>, reduce<Type, Op::kMax>,
          reduce<Type, Op::kProd>};
}

// In the order of DType.
constexpr std::array<std::array<Reducer, kNumOps>, kNumDTypes> kReducers = {
    reducers<Plain<float>>(),
    reducers<Plain<double>>(),
    reducers<Float16>(),
    reducers<BFloat16>(),
    reducers<Plain<std::int32_t>>(),
    reducers<Plain<std::int64_t>>(),
    reducers<Plain<std::uint8_t>>(),
};

#undef MIRROR_INLINE

}  // namespace MIRROR_LEVEL
