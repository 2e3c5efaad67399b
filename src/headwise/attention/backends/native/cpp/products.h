// Matrix products of attention, by register tiles.
//
// Rows of queries are the lanes of vectors everywhere: scores are stored as `(keys, rows)`, outputs as
// `(features, rows)`. So one product with scalars from a row-major matrix on the left gives both S^T = K Q^T and
// O^T = V^T P^T, without copies of K and V in another layout, and the softmax of a row needs no sums across lanes.
#pragma once
#include "transpose.h"

namespace headwise::HEADWISE_ISA {

// Left matrix of a product: element (m, k) is `data[m * row + k * column]`.
struct LeftMatrix {
  const float* data;
  int64_t row, column;
};

// The sum of `sum` and the products of the lanes of a and b, which are numbers.
struct OfNumbers {
  static Floats add(Floats a, Floats b, Floats sum) { return multiply_add(a, b, sum); }
};

// C (kM x kN vectors), or the sum of C and it, = left (kM x depth) times right (depth x kN vectors). The sums of a tile
// stay in registers; what C has already is added last, so that sums are blocked.
template <int kM, int kN, bool kAdd, class Product = OfNumbers>
inline void multiply_tile(LeftMatrix left, const float* right, int64_t right_row, int64_t depth, float* c,
                          int64_t c_row) {
  Floats sums[kM][kN];
#pragma GCC unroll 8
  for (int m = 0; m < kM; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kN; ++n) sums[m][n] = zero();
  const float* column = left.data;
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k, column += left.column, right += right_row) {
    Floats vectors[kN];
#pragma GCC unroll 4
    for (int n = 0; n < kN; ++n) vectors[n] = load(right + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      const Floats scalar = all(column[m * left.row]);
#pragma GCC unroll 4
      for (int n = 0; n < kN; ++n) sums[m][n] = Product::add(scalar, vectors[n], sums[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kM; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kN; ++n) {
      float* to = c + m * c_row + n * kLanes;
      store(to, kAdd ? load(to) + sums[m][n] : sums[m][n]);
    }
}

// The last `height` rows, fewer than a register tile has.
template <int kM, int kN, bool kAdd, class Product = OfNumbers>
inline void multiply_rest(int64_t height, LeftMatrix left, const float* right, int64_t right_row, int64_t depth,
                          float* c, int64_t c_row) {
  if (height == kM) multiply_tile<kM, kN, kAdd, Product>(left, right, right_row, depth, c, c_row);
  if constexpr (kM > 1)
    if (height < kM) multiply_rest<kM - 1, kN, kAdd, Product>(height, left, right, right_row, depth, c, c_row);
}

template <int kN, bool kAdd, class Product = OfNumbers>
inline void multiply_strip(LeftMatrix left, int64_t height, const float* right, int64_t right_row, int64_t depth,
                           float* c, int64_t c_row) {
  int64_t m = 0;
  for (; m + kTileRows <= height; m += kTileRows) {
    multiply_tile<kTileRows, kN, kAdd, Product>(left, right, right_row, depth, c + m * c_row, c_row);
    left.data += kTileRows * left.row;
  }
  multiply_rest<kTileRows - 1, kN, kAdd, Product>(height - m, left, right, right_row, depth, c + m * c_row, c_row);
}

// Numbers that are summed up in a register before they are added to other such sums: the error of a long sum grows with
// its length, and more so where a product is rounded before it is added. Libraries sum up a single row in many lanes,
// so that their sums are short.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
template <int kN>
constexpr int64_t kSumLength = kN == 1 ? 16 : 64;
#else
template <int kN>
constexpr int64_t kSumLength = 16;
#endif

// The same for a product of this width: few rows, which are in one vector or in two, have short sums on every
// processor.
inline int64_t most_summed(int64_t width) { return width <= 16 ? 16 : kSumLength<kTileVectors>; }

// True if each number of a product of this depth and width is one sum: then the product can be added to what the result
// has already with one rounding.
inline bool is_one_sum(int64_t depth, int64_t width) {
  const int64_t narrowest = width % (kTileVectors * kLanes) ? kSumLength<1> : kSumLength<kTileVectors>;
  return depth <= smaller(narrowest, most_summed(width));
}

// A strip of a product, in sums of at most `kSumLength` numbers, or `most` if that is less.
template <int kN, bool kAdd>
inline void multiply_in_blocks(LeftMatrix left, int64_t height, const float* right, int64_t right_row, int64_t depth,
                               float* c, int64_t c_row, int64_t most) {
  const int64_t length = smaller(kSumLength<kN>, most);
  multiply_strip<kN, kAdd>(left, height, right, right_row, smaller(depth, length), c, c_row);
  for (int64_t k = length; k < depth; k += length) {
    const LeftMatrix rest{left.data + k * left.column, left.row, left.column};
    multiply_strip<kN, true>(rest, height, right + k * right_row, right_row, smaller(depth - k, length), c, c_row);
  }
}

// C (height x width) = left (height x depth) times right (depth x width), or C + it, in sums of at most `most` numbers.
// Width is a multiple of the lanes.
template <bool kAdd>
inline void multiply_in_sums(LeftMatrix left, int64_t height, const float* right, int64_t right_row, int64_t depth,
                             float* c, int64_t c_row, int64_t width, int64_t most) {
  int64_t n = 0;
  for (; n + kTileVectors * kLanes <= width; n += kTileVectors * kLanes)
    multiply_in_blocks<kTileVectors, kAdd>(left, height, right + n, right_row, depth, c + n, c_row, most);
  if constexpr (kTileVectors > 2)  // two vectors at a time, with the sums of one
    for (; n + 2 * kLanes <= width; n += 2 * kLanes)
      multiply_in_blocks<2, kAdd>(left, height, right + n, right_row, depth, c + n, c_row,
                                  smaller(kSumLength<1>, most));
  for (; n < width; n += kLanes)
    multiply_in_blocks<1, kAdd>(left, height, right + n, right_row, depth, c + n, c_row, most);
}

template <bool kAdd>
inline void multiply(LeftMatrix left, int64_t height, const float* right, int64_t right_row, int64_t depth, float* c,
                     int64_t c_row, int64_t width) {
  multiply_in_sums<kAdd>(left, height, right, right_row, depth, c, c_row, width, most_summed(width));
}

// Product of each row of one matrix with the same row of another, both `(depth x width)` with a stride of `row`. It has
// the bits that `multiply` has for the same numbers.
inline void multiply_rows(const float* left, const float* right, int64_t row, int64_t depth, int64_t width,
                          float* products) {
  constexpr int64_t kWide = kTileVectors * kLanes;
  for (int64_t n = 0; n < width; n += kLanes) {
    const int64_t of_strip = n / kWide * kWide + kWide <= width ? kSumLength<kTileVectors> : kSumLength<1>;
    const int64_t length = smaller(of_strip, most_summed(width));
    Floats total = zero();
    for (int64_t begin = 0; begin < depth; begin += length) {
      Floats sum = zero();
      for (int64_t k = begin; k < smaller(begin + length, depth); ++k)
        sum = multiply_add(load(left + k * row + n), load(right + k * row + n), sum);
      total = begin ? total + sum : sum;
    }
    store(products + n, total);
  }
}

}  // namespace headwise::HEADWISE_ISA
