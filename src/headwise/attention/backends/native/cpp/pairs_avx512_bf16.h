// Products of bfloat16 pairs in AVX-512 registers, by the instruction VDPBF16PS.
#pragma once

namespace headwise::HEADWISE_ISA {

// Does nothing: other units need their registers turned on.
struct PairRegisters {
  PairRegisters() {}
};

// C (32 x 32) = left (32 x 32 depth) times right (16 depth pairs x 32), or C + it.
template <bool kAdd>
inline void multiply_pair_tile(NumberRows left, PairRows right, int64_t depth, float* c, int64_t c_row) {
  constexpr int kHeight = 8, kPairs = 16;
  for (int first = 0; first < 32; first += kHeight, left.data += kHeight * left.row, c += kHeight * c_row) {
    Floats sums[kHeight][2];
#pragma GCC unroll 8
    for (int m = 0; m < kHeight; ++m)
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n) sums[m][n] = kAdd ? load(c + m * c_row + n * kLanes) : zero();
    for (int64_t k = 0; k < depth; ++k)
      for (int pair = 0; pair < kPairs; ++pair) {
        const uint32_t* row = right.data + (k * kPairs + pair) * right.row;
        const __m512bh vectors[2] = {(__m512bh)_mm512_loadu_si512(row), (__m512bh)_mm512_loadu_si512(row + kLanes)};
#pragma GCC unroll 8
        for (int m = 0; m < kHeight; ++m) {
          int32_t both;
          __builtin_memcpy(&both, left.data + m * left.row + k * left.step + 2 * pair, sizeof both);
          const __m512bh numbers = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 2
          for (int n = 0; n < 2; ++n) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], numbers, vectors[n]);
        }
      }
#pragma GCC unroll 8
    for (int m = 0; m < kHeight; ++m)
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n) store(c + m * c_row + n * kLanes, sums[m][n]);
  }
}

}  // namespace headwise::HEADWISE_ISA
