// Products in bfloat16 with sums in float32, of pairs of numbers.
//
// A product takes its left factor as rows of numbers, and its right factor as rows of pairs, two neighbouring numbers
// of a column. So keys are left factors where they lie, and queries become pairs of features once for each block.
#pragma once
#include "block.h"

namespace headwise::HEADWISE_ISA {

constexpr int kPairTile = 32;  // rows and columns of a tile of sums, and numbers of one step of the depth

// Left factor: rows are `row` numbers apart, and blocks of 32 columns `step`.
struct NumberRows {
  const uint16_t* data;
  int64_t row, step;
};

// Right factor: rows of pairs are `row` pairs apart.
struct PairRows {
  const uint32_t* data;
  int64_t row;
};

}  // namespace headwise::HEADWISE_ISA

#include HEADWISE_PAIRS  // the register tiles of the instruction set

namespace headwise::HEADWISE_ISA {

// C (height x width) = left (height x depth) times right (depth / 2 pairs x width), or C + it. All sizes are multiples
// of 32.
template <bool kAdd>
inline void multiply_pairs(NumberRows left, int64_t height, PairRows right, int64_t width, int64_t depth, float* c,
                           int64_t c_row) {
  for (int64_t m = 0; m < height; m += kPairTile, left.data += kPairTile * left.row)
    for (int64_t n = 0; n < width; n += kPairTile)
      multiply_pair_tile<kAdd>(left, {right.data + n, right.row}, depth / kPairTile, c + m * c_row + n, c_row);
}

// Rows of a block, filled up with zeros: `to (width x features)`, with `width` rows and a multiple of 32 features.
inline void copy_rows(const RowBlock& block, const void* data, const Strides& strides, int64_t size, int64_t width,
                      int64_t features, uint16_t* to) {
  for (int r = 0; r < width; ++r, to += features) {
    const bool exists = r < block.rows;
    const uint16_t* from =
        row_of(static_cast<const uint16_t*>(data), strides, block.batch, block.head[r], block.query[r]);
    if (exists) __builtin_memcpy(to, from, size_t(size) * 2);
    for (int64_t d = exists ? size : 0; d < features; ++d) to[d] = 0;
  }
}

// Pairs of features `to (features / 2 x kRows)` of the rows `from (width x features)`: a pair is one number of 32 bits.
inline void feature_pairs(const uint16_t* from, int64_t width, int64_t features, uint32_t* to) {
  transpose(reinterpret_cast<const float*>(from), features / 2, width, features / 2, reinterpret_cast<float*>(to),
            kRows);
}

// Pairs of rows `to (width / 2 x features)` of the rows `from (width x features)`.
inline void row_pairs(const uint16_t* from, int64_t width, int64_t features, uint32_t* to) {
  for (int64_t r = 0; r < width; r += 2, from += 2 * features, to += features)
    for (int64_t d = 0; d < features; ++d) to[d] = from[d] | uint32_t(from[features + d]) << 16;
}

}  // namespace headwise::HEADWISE_ISA
