// Vectors of 4 floats in NEON registers, which every 64-bit Arm processor has.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace headwise::HEADWISE_ISA {

using Floats = float32x4_t;
using Ints = int32x4_t;
using Mask = uint32x4_t;  // all bits of a lane are set, or none
constexpr int kLanes = 4;
// Register tile of a product: 20 of 32 registers hold its sums, 4 a row of the right factor, and 5 numbers of the left
// one. With 6 rows, which would also fit, GCC 12 stores some of them in memory.
constexpr int kTileRows = 5, kTileVectors = 4;

inline Floats load(const float* from) { return vld1q_f32(from); }
inline void store(float* to, Floats x) { vst1q_f32(to, x); }
inline Floats all(float x) { return vdupq_n_f32(x); }
inline Floats zero() { return vdupq_n_f32(0.0f); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Floats multiply_subtract(Floats a, Floats b, Floats c) { return vfmaq_f32(vnegq_f32(c), a, b); }
inline Floats larger(Floats a, Floats b) {  // b if one of the two is NaN, unlike in NEON's own instructions
  return vbslq_f32(vcgtq_f32(a, b), a, b);
}
inline Floats absolute(Floats x) { return vabsq_f32(x); }
inline Floats round_to_integer(Floats x) { return vrndnq_f32(x); }

// x * 2^n for an integral n from -126 to 127 in the lanes of `mask`, and 0 in the others.
inline Floats scale_by_power(Mask mask, Floats x, Floats n) {
  const Ints exponent = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
  const Floats scaled = vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
  return vreinterpretq_f32_u32(vandq_u32(mask, vreinterpretq_u32_f32(scaled)));
}
inline float sum(Floats x) { return vaddvq_f32(x); }

inline Ints load(const int32_t* from) { return vld1q_s32(from); }
inline Ints all(int32_t x) { return vdupq_n_s32(x); }
inline Ints subtract(Ints a, Ints b) { return vsubq_s32(a, b); }

// Products of words, numbers of 32 bits: a vector has kLanes / 2 pairs of words, each a number of 64 bits.
inline Ints product_of_lower_words(Ints a, Ints b) {
  const uint32x2_t lower_a = vmovn_u64(vreinterpretq_u64_s32(a)), lower_b = vmovn_u64(vreinterpretq_u64_s32(b));
  return vreinterpretq_s32_u64(vmull_u32(lower_a, lower_b));
}
inline Ints upper_words(Ints pairs) { return vreinterpretq_s32_u64(vshrq_n_u64(vreinterpretq_u64_s32(pairs), 32)); }
inline Ints pairs_of_lower_words(Ints lower, Ints upper) { return vtrn1q_s32(lower, upper); }
inline Ints exclusive_or(Ints a, Ints b, Ints c) { return veorq_s32(veorq_s32(a, b), c); }
inline Ints lower_half_moved_up(Ints words) { return vshlq_n_s32(words, 16); }
inline bool has_equal_half(Ints a, Ints b) {
  return vmaxvq_u16(vceqq_u16(vreinterpretq_u16_s32(a), vreinterpretq_u16_s32(b))) != 0;
}

inline Mask greater(Floats a, Floats b) { return vcgtq_f32(a, b); }
inline Mask at_least(Floats a, Floats b) { return vmvnq_u32(vcltq_f32(a, b)); }  // true for NaN
inline Mask equal(Ints a, Ints b) { return vceqq_s32(a, b); }
inline Mask less_unsigned(Ints a, Ints b) { return vcltq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b)); }
inline Mask both(Mask a, Mask b) { return vandq_u32(a, b); }
inline Mask either(Mask a, Mask b) { return vorrq_u32(a, b); }
inline Mask no_lanes() { return vdupq_n_u32(0); }
inline bool any(Mask mask) { return vmaxvq_u32(mask) != 0; }
inline int count(Mask mask) { return int(vaddvq_u32(vshrq_n_u32(mask, 31))); }
inline Floats select(Mask mask, Floats yes, Floats no) { return vbslq_f32(mask, yes, no); }

// Read 4 bfloat16 numbers as floats: their bits are the upper half of the bits of a float.
inline Floats load(const uint16_t* from) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(from)), 16)); }

// Read the first `bytes` bytes of a vector, fewer than it has, and zeros.
inline Ints load_part(const void* from, int64_t bytes) {
  int32_t part[4] = {};
  std::memcpy(part, from, size_t(bytes));
  return load(part);
}
inline Floats as_floats(Ints bits) { return vreinterpretq_f32_s32(bits); }

// A vector of 8 bfloat16 numbers as floats: those with an even index, and those with an odd one.
inline Floats even_numbers(Ints pairs) { return as_floats(vshlq_n_s32(pairs, 16)); }
inline Floats odd_numbers(Ints pairs) { return as_floats(vandq_s32(pairs, all(int32_t(0xffff0000)))); }

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
// 4 pairs of bfloat16 numbers, each of a lane of `first` and of `second`.
inline Floats narrow_pairs(Floats first, Floats second) {
  const bfloat16x8_t numbers = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second);
  const uint16x8_t bits = vreinterpretq_u16_bf16(numbers);
  return vreinterpretq_f32_u16(vzip1q_u16(bits, vextq_u16(bits, bits, 4)));
}

// Round the lanes of two vectors to 8 bfloat16 numbers.
inline void store_numbers(Floats first, Floats second, uint16_t* to) {
  vst1q_u16(to, vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second)));
}
#endif

// Lanes 0 and 1 of both vectors, or lanes 2 and 3, alternating.
inline Floats interleave_low(Floats a, Floats b) { return vzip1q_f32(a, b); }
inline Floats interleave_high(Floats a, Floats b) { return vzip2q_f32(a, b); }

}  // namespace headwise::HEADWISE_ISA
