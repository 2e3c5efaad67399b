// Vectors of 4 floats in the vector types of GCC and Clang, which every 64-bit processor has registers for.
#pragma once
#include <cstdint>
#include <cstring>

namespace headwise::HEADWISE_ISA {

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t UnsignedInts __attribute__((vector_size(16)));
typedef uint64_t UnsignedPairs __attribute__((vector_size(16)));
typedef uint16_t UnsignedHalves __attribute__((vector_size(16)));
using Mask = Ints;  // -1 in the lanes that are set, 0 in the others
constexpr int kLanes = 4;
constexpr int kTileRows = 6, kTileVectors = 2;  // register tile of a product: 12 of 16 registers hold its sums

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline Floats all(float x) { return Floats{x, x, x, x}; }
inline Floats zero() { return all(0.0f); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats multiply_subtract(Floats a, Floats b, Floats c) { return a * b - c; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }  // b if one of the two is NaN
inline Floats absolute(Floats x) { return x < 0.0f ? -x : x; }

// Adding 1.5 * 2^23 leaves no bits for a fraction: the sum is rounded to the nearest integer.
inline Floats round_to_integer(Floats x) {
  const Floats shifted = x + 12582912.0f;
  return shifted - 12582912.0f;
}

// x * 2^n for an integral n from -126 to 127 in the lanes of `mask`, and 0 in the others.
inline Floats scale_by_power(Mask mask, Floats x, Floats n) {
  const Ints exponent = __builtin_convertvector(mask ? n : Floats{}, Ints) + 127;
  return mask ? x * (Floats)(exponent << 23) : Floats{};
}
inline float sum(Floats x) { return (x[0] + x[2]) + (x[1] + x[3]); }

inline Ints load(const int32_t* from) {
  Ints x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Ints all(int32_t x) { return Ints{x, x, x, x}; }
inline Ints subtract(Ints a, Ints b) { return a - b; }

// Products of words, numbers of 32 bits: a vector has kLanes / 2 pairs of words, each a number of 64 bits.
inline Ints product_of_lower_words(Ints a, Ints b) {
  return (Ints)(((UnsignedPairs)a & 0xffffffff) * ((UnsignedPairs)b & 0xffffffff));
}
inline Ints upper_words(Ints pairs) { return (Ints)((UnsignedPairs)pairs >> 32); }
inline Ints pairs_of_lower_words(Ints lower, Ints upper) {
  return (Ints)(((UnsignedPairs)lower & 0xffffffff) | ((UnsignedPairs)upper << 32));
}
inline Ints exclusive_or(Ints a, Ints b, Ints c) { return a ^ b ^ c; }
inline Ints lower_half_moved_up(Ints words) { return (Ints)((UnsignedInts)words << 16); }
inline bool has_equal_half(Ints a, Ints b) {
  const UnsignedPairs equal = (UnsignedPairs)((UnsignedHalves)a == (UnsignedHalves)b);
  return (equal[0] | equal[1]) != 0;
}

inline Mask greater(Floats a, Floats b) { return a > b; }
inline Mask at_least(Floats a, Floats b) { return ~(a < b); }  // true for NaN
inline Mask equal(Ints a, Ints b) { return a == b; }
inline Mask less_unsigned(Ints a, Ints b) { return (Mask)((UnsignedInts)a < (UnsignedInts)b); }
inline Mask both(Mask a, Mask b) { return a & b; }
inline Mask either(Mask a, Mask b) { return a | b; }
inline Mask no_lanes() { return Mask{}; }
inline int count(Mask mask) { return -(mask[0] + mask[1] + mask[2] + mask[3]); }
inline bool any(Mask mask) { return count(mask) != 0; }
inline Floats select(Mask mask, Floats yes, Floats no) { return mask ? yes : no; }

// Read 4 bfloat16 numbers as floats: their bits are the upper half of the bits of a float.
inline Floats load(const uint16_t* from) {
  const UnsignedInts bits{from[0], from[1], from[2], from[3]};
  return (Floats)(bits << 16);
}

// Read the first `bytes` bytes of a vector, fewer than it has, and zeros.
inline Ints load_part(const void* from, int64_t bytes) {
  int32_t part[4] = {};
  std::memcpy(part, from, size_t(bytes));
  return load(part);
}
inline Floats as_floats(Ints bits) { return (Floats)bits; }

// A vector of 8 bfloat16 numbers as floats: those with an even index, and those with an odd one. The first number of a
// pair is the lower half of its 32 bits.
inline Floats even_numbers(Ints pairs) { return (Floats)((UnsignedInts)pairs << 16); }
inline Floats odd_numbers(Ints pairs) { return (Floats)(pairs & all(int32_t(0xffff0000))); }

// Lanes 0 and 1 of both vectors, or lanes 2 and 3, alternating.
inline Floats interleave_low(Floats a, Floats b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline Floats interleave_high(Floats a, Floats b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }

}  // namespace headwise::HEADWISE_ISA
