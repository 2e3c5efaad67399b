// Products of bfloat16 pairs in NEON registers, by the instruction BFDOT. It rounds products and sums to odd, and
// replaces numbers too small for normal floats by 0. The errors are far below those of rounding to bfloat16.
#pragma once

namespace headwise::HEADWISE_ISA {

// Does nothing: other units need their registers turned on.
struct PairRegisters {
  PairRegisters() {}
};

constexpr int kPairHeight = 8;  // rows of a register tile of two vectors: 16 of 32 registers hold its sums

// Add the products of pair number `kPair` of each left vector, one for each row, with two vectors of pairs.
template <int kPair>
inline void add_pair(const bfloat16x8_t (&left)[kPairHeight], const uint32_t* right, Floats (&sums)[kPairHeight][2]) {
  const bfloat16x8_t vectors[2] = {vreinterpretq_bf16_u32(vld1q_u32(right)),
                                   vreinterpretq_bf16_u32(vld1q_u32(right + kLanes))};
#pragma GCC unroll 8
  for (int m = 0; m < kPairHeight; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) sums[m][n] = vbfdotq_laneq_f32(sums[m][n], vectors[n], left[m], kPair);
}

// C (8 x 8) = left (8 x 32 depth) times right (16 depth pairs x 8), or C + it.
template <bool kAdd>
inline void multiply_register_tile(NumberRows left, PairRows right, int64_t depth, float* c, int64_t c_row) {
  Floats sums[kPairHeight][2];
#pragma GCC unroll 8
  for (int m = 0; m < kPairHeight; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) sums[m][n] = kAdd ? load(c + m * c_row + n * kLanes) : zero();
  for (int64_t k = 0; k < depth; ++k, left.data += left.step)
    for (int number = 0; number < kPairTile; number += 8, right.data += 4 * right.row) {  // 4 pairs of each row
      bfloat16x8_t rows[kPairHeight];
#pragma GCC unroll 8
      for (int m = 0; m < kPairHeight; ++m)
        rows[m] = vreinterpretq_bf16_u16(vld1q_u16(left.data + m * left.row + number));
      add_pair<0>(rows, right.data, sums);
      add_pair<1>(rows, right.data + right.row, sums);
      add_pair<2>(rows, right.data + 2 * right.row, sums);
      add_pair<3>(rows, right.data + 3 * right.row, sums);
    }
#pragma GCC unroll 8
  for (int m = 0; m < kPairHeight; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) store(c + m * c_row + n * kLanes, sums[m][n]);
}

// C (32 x 32) = left (32 x 32 depth) times right (16 depth pairs x 32), or C + it.
template <bool kAdd>
inline void multiply_pair_tile(NumberRows left, PairRows right, int64_t depth, float* c, int64_t c_row) {
  for (int m = 0; m < kPairTile; m += kPairHeight)
    for (int n = 0; n < kPairTile; n += 2 * kLanes)
      multiply_register_tile<kAdd>({left.data + m * left.row, left.row, left.step}, {right.data + n, right.row}, depth,
                                   c + m * c_row + n, c_row);
}

}  // namespace headwise::HEADWISE_ISA
