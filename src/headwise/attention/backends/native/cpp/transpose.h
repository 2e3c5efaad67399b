// Transposition of matrices of floats.
#pragma once

namespace headwise::HEADWISE_ISA {

// Transpose a square of `kLanes` vectors: log2(kLanes) rounds, each of which interleaves the two halves of the list.
inline void transpose_square(Floats (&rows)[kLanes]) {
  for (int round = 1; round < kLanes; round *= 2) {
    Floats mixed[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      mixed[2 * i] = interleave_low(rows[i], rows[i + kLanes / 2]);
      mixed[2 * i + 1] = interleave_high(rows[i], rows[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = mixed[i];
  }
}

#if !defined(__AVX2__) || defined(__AVX512F__)
// `kLanes` numbers of each of `kLanes` rows, from a column on, transposed.
template <class T>
inline void load_transposed(const T* const* rows, int64_t column, Floats (&to)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) to[i] = load(rows[i] + column);
  transpose_square(to);
}
#endif

// The sums of the lanes of `kLanes` vectors, as one vector. Each round interleaves the two halves of the list as in a
// transposition, and adds the results, so that half as many vectors are left.
inline Floats sums_of_vectors(Floats (&vectors)[kLanes]) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i)
      vectors[i] = interleave_low(vectors[i], vectors[i + half]) + interleave_high(vectors[i], vectors[i + half]);
  return vectors[0];
}

// to (columns x rows) = from (rows x columns), transposed. Both sizes are multiples of `kLanes`.
inline void transpose(const float* from, int64_t from_row, int64_t rows, int64_t columns, float* to, int64_t to_row) {
  for (int64_t r = 0; r < rows; r += kLanes)
    for (int64_t c = 0; c < columns; c += kLanes) {
      Floats square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = load(from + (r + i) * from_row + c);
      transpose_square(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(to + (c + i) * to_row + r, square[i]);
    }
}

}  // namespace headwise::HEADWISE_ISA
