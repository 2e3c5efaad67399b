// Vectors of 8 floats in AVX2 registers.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace headwise::HEADWISE_ISA {

using Floats = __m256;
using Ints = __m256i;
using Mask = __m256;  // the sign bit of each lane counts
constexpr int kLanes = 8;
constexpr int kTileRows = 6, kTileVectors = 2;  // register tile of a product: 12 of 16 registers hold its sums

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm256_fmsub_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }  // b if one of the two is NaN
inline Floats absolute(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline Floats round_to_integer(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// x * 2^n for an integral n from -126 to 127 in the lanes of `mask`, and 0 in the others.
inline Floats scale_by_power(Mask mask, Floats x, Floats n) {
  const Ints exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_and_ps(mask, _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23))));
}
inline float sum(Floats x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline Ints load(const int32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Ints all(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }

// Products of words, numbers of 32 bits: a vector has kLanes / 2 pairs of words, each a number of 64 bits.
inline Ints product_of_lower_words(Ints a, Ints b) { return _mm256_mul_epu32(a, b); }
inline Ints upper_words(Ints pairs) { return _mm256_srli_epi64(pairs, 32); }
inline Ints pairs_of_lower_words(Ints lower, Ints upper) {
  return _mm256_blend_epi32(lower, _mm256_slli_epi64(upper, 32), 0xaa);
}
inline Ints exclusive_or(Ints a, Ints b, Ints c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
inline Ints lower_half_moved_up(Ints words) { return _mm256_slli_epi32(words, 16); }
inline bool has_equal_half(Ints a, Ints b) { return _mm256_movemask_epi8(_mm256_cmpeq_epi16(a, b)) != 0; }

inline Mask greater(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline Mask at_least(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_NLT_UQ); }  // true for NaN
inline Mask equal(Ints a, Ints b) { return _mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b)); }
inline Mask less_unsigned(Ints a, Ints b) {  // AVX2 compares signed numbers only: subtract 2^31 from both
  const Ints sign = _mm256_set1_epi32(INT32_MIN);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_xor_si256(b, sign), _mm256_xor_si256(a, sign)));
}
inline Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
inline Mask either(Mask a, Mask b) { return _mm256_or_ps(a, b); }
inline Mask no_lanes() { return _mm256_setzero_ps(); }
inline bool any(Mask mask) { return _mm256_movemask_ps(mask) != 0; }
inline int count(Mask mask) { return __builtin_popcount(unsigned(_mm256_movemask_ps(mask))); }
inline Floats select(Mask mask, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, mask); }

// Read 8 bfloat16 numbers as floats: their bits are the upper half of the bits of a float.
inline Floats load(const uint16_t* from) {
  const Ints bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

// Read the first `bytes` bytes of a vector, fewer than it has, and zeros.
inline Ints load_part(const void* from, int64_t bytes) {
  int32_t part[8] = {};
  std::memcpy(part, from, size_t(bytes));
  return load(part);
}
inline Floats as_floats(Ints bits) { return _mm256_castsi256_ps(bits); }

// A vector of 16 bfloat16 numbers as floats: those with an even index, and those with an odd one.
inline Floats even_numbers(Ints pairs) { return as_floats(_mm256_slli_epi32(pairs, 16)); }
inline Floats odd_numbers(Ints pairs) { return as_floats(_mm256_and_si256(pairs, all(int32_t(0xffff0000)))); }

// Read 4 numbers of each of two rows.
inline Floats load_halves(const float* low, const float* high) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}
inline Floats load_halves(const uint16_t* low, const uint16_t* high) {
  const __m128i bits = _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(low)),
                                          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(high)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// 8 numbers of each of 8 rows, from a column on, transposed. Rows are loaded in halves, so that no number moves between
// the halves of a vector: that would take twice as many shuffles.
template <class T>
inline void load_transposed(const T* const* rows, int64_t column, Floats (&to)[8]) {
#pragma GCC unroll 2
  for (int n = 0; n < 8; n += 4) {
    const int64_t at = column + n;
    const Floats row0 = load_halves(rows[0] + at, rows[4] + at), row1 = load_halves(rows[1] + at, rows[5] + at);
    const Floats row2 = load_halves(rows[2] + at, rows[6] + at), row3 = load_halves(rows[3] + at, rows[7] + at);
    const __m256d low01 = _mm256_castps_pd(_mm256_unpacklo_ps(row0, row1));
    const __m256d low23 = _mm256_castps_pd(_mm256_unpacklo_ps(row2, row3));
    const __m256d high01 = _mm256_castps_pd(_mm256_unpackhi_ps(row0, row1));
    const __m256d high23 = _mm256_castps_pd(_mm256_unpackhi_ps(row2, row3));
    to[n] = _mm256_castpd_ps(_mm256_unpacklo_pd(low01, low23));
    to[n + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low01, low23));
    to[n + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high01, high23));
    to[n + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high01, high23));
  }
}

// Lanes 0 to 3 of both vectors, or lanes 4 to 7, alternating.
inline Floats interleave_low(Floats a, Floats b) {
  return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20);
}
inline Floats interleave_high(Floats a, Floats b) {
  return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31);
}

}  // namespace headwise::HEADWISE_ISA
