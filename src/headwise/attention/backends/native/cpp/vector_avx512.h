// Vectors of 16 floats in AVX-512 registers.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace headwise::HEADWISE_ISA {

using Floats = __m512;
using Ints = __m512i;
using Mask = __mmask16;
constexpr int kLanes = 16;
constexpr int kTileRows = 6, kTileVectors = 4;  // register tile of a product: 24 of 32 registers hold its sums

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b if one of the two is NaN
inline Floats absolute(Floats x) { return _mm512_abs_ps(x); }
inline Floats round_to_integer(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// x * 2^n for an integral n in the lanes of `mask`, and 0 in the others.
inline Floats scale_by_power(Mask mask, Floats x, Floats n) { return _mm512_maskz_scalef_ps(mask, x, n); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }

inline Ints load(const int32_t* from) { return _mm512_loadu_si512(from); }
inline Ints all(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }

// Products of words, numbers of 32 bits: a vector has kLanes / 2 pairs of words, each a number of 64 bits.
inline Ints product_of_lower_words(Ints a, Ints b) { return _mm512_mul_epu32(a, b); }
inline Ints upper_words(Ints pairs) { return _mm512_shuffle_epi32(pairs, _MM_PERM_DDBB); }
inline Ints pairs_of_lower_words(Ints lower, Ints upper) {
  return _mm512_mask_shuffle_epi32(lower, 0xaaaa, upper, _MM_PERM_CCAA);
}
inline Ints exclusive_or(Ints a, Ints b, Ints c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
inline Ints lower_half_moved_up(Ints words) { return _mm512_slli_epi32(words, 16); }
inline bool has_equal_half(Ints a, Ints b) { return _mm512_cmpeq_epi16_mask(a, b) != 0; }

inline Mask greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }  // true for NaN
inline Mask equal(Ints a, Ints b) { return _mm512_cmpeq_epi32_mask(a, b); }
inline Mask less_unsigned(Ints a, Ints b) { return _mm512_cmplt_epu32_mask(a, b); }
inline Mask both(Mask a, Mask b) { return Mask(a & b); }
inline Mask either(Mask a, Mask b) { return Mask(a | b); }
inline Mask no_lanes() { return 0; }
inline bool any(Mask mask) { return mask != 0; }
inline int count(Mask mask) { return __builtin_popcount(mask); }
inline Floats select(Mask mask, Floats yes, Floats no) { return _mm512_mask_blend_ps(mask, no, yes); }

// Read 16 bfloat16 numbers as floats: their bits are the upper half of the bits of a float.
inline Floats load(const uint16_t* from) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

// Read the first `bytes` bytes of a vector, fewer than it has, and zeros.
inline Ints load_part(const void* from, int64_t bytes) {
  return _mm512_maskz_loadu_epi8((uint64_t(1) << bytes) - 1, from);
}
inline Floats as_floats(Ints bits) { return _mm512_castsi512_ps(bits); }

// A vector of 32 bfloat16 numbers as floats: those with an even index, and those with an odd one.
inline Floats even_numbers(Ints pairs) { return as_floats(_mm512_slli_epi32(pairs, 16)); }
inline Floats odd_numbers(Ints pairs) { return as_floats(_mm512_and_si512(pairs, all(int32_t(0xffff0000)))); }

#ifdef __AVX512BF16__
// 16 pairs of bfloat16 numbers, each of a lane of `first` and of `second`.
inline Floats narrow_pairs(Floats first, Floats second) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kOrder);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first)));
}

// The sum of `sum` and the products of pairs of bfloat16 numbers: the lanes of a and b are pairs.
inline Floats multiply_add_pairs(Floats a, Floats b, Floats sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// Round the lanes of two vectors to 32 bfloat16 numbers.
inline void store_numbers(Floats first, Floats second, uint16_t* to) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}
#endif

// Lanes 0 to 7 of both vectors, or lanes 8 to 15, alternating.
inline Floats interleave_low(Floats a, Floats b) {
  const Ints order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return _mm512_permutex2var_ps(a, order, b);
}
inline Floats interleave_high(Floats a, Floats b) {
  const Ints order = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return _mm512_permutex2var_ps(a, order, b);
}

}  // namespace headwise::HEADWISE_ISA
