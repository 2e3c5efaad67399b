// A linear map y = x W^T + b of many rows of x. Blocks of W are copied in an order in which the same feature of
// neighbouring outputs is adjacent, so that the lanes of vectors are outputs, and each number of x is a scalar.
//
// In bfloat16, two neighbouring features of a row of x or W are a word of 32 bits, like one number in float32: words
// are copied in the same way, and an instruction adds the products of both. Sums are in float32.
//
// The products of each output are added in the same order, whatever the number of rows, of tasks and of threads, in
// sums of `kDepth` words, which are then added one after another. These sums are longer than those of attention:
// the errors stay near those of MKL, with whole widths of up to 131,072.
#pragma once
#include <type_traits>

#include "block.h"
#include "linear_map.h"

namespace headwise::HEADWISE_ISA {

constexpr int64_t kManyRows = 24;                  // with fewer rows, the kernel in few_rows_product.h is faster
constexpr int64_t kManyRowsOfPairs = 7;            // the same in bfloat16
constexpr int64_t kPanel = kTileVectors * kLanes;  // outputs of a block of W, whose copy is called the panel
constexpr int64_t kDepth = 128;                    // words of features of a block: 32 KiB with AVX-512
constexpr int64_t kMostRows = 768;                 // rows of a task: its sums stay in a second-level cache
constexpr int64_t kFewestRows = 96;                // with fewer rows, a task would mostly copy blocks
constexpr int64_t kLine = 16;                      // words of a cache line

#ifdef __AVX512BF16__
constexpr bool kMultipliesPairs = true;
struct OfPairs {
  static Floats add(Floats a, Floats b, Floats sum) { return multiply_add_pairs(a, b, sum); }
};
#else
constexpr bool kMultipliesPairs = false;
using OfPairs = OfNumbers;
#endif

// True if all rows of x and W, of bfloat16 numbers, consist of whole words.
inline bool has_words(const LinearMap& map) {
  return map.width % 2 == 0 && (uintptr_t(map.x) | uintptr_t(map.weight)) % sizeof(float) == 0;
}

// True for many rows; in bfloat16 only if the processor multiplies pairs and rows consist of words, and in float32 also
// for few rows if a matrix has gaps or is transposed.
inline bool has_many_rows(const LinearMap& map) {
  if (map.bfloat16) return kMultipliesPairs && map.rows >= kManyRowsOfPairs && has_words(map);
  const bool has_rows =
      map.x_column == 1 && map.x_row == map.width && map.weight_column == 1 && map.weight_row == map.width;
  return map.rows >= kManyRows || !has_rows;
}

inline int64_t panels(const LinearMap& map) { return (map.out + kPanel - 1) / kPanel; }
// Parts into which the rows are divided. Two tasks for each thread are enough.
inline int64_t row_parts(const LinearMap& map) {
  const int64_t wanted = (2 * map.threads + panels(map) - 1) / panels(map);
  return larger((map.rows + kMostRows - 1) / kMostRows, smaller(wanted, larger(map.rows / kFewestRows, 1)));
}

// The outputs of one block of W for one part of the rows of x.
template <class Element>
class ManyRowsProduct {
 public:
  ManyRowsProduct(const LinearMap& map, int64_t task, void* memory)
      : map_(map),
        width_(map.width / kPerWord),
        first_output_(task / row_parts(map) * kPanel),
        count_(smaller(kPanel, map.out - first_output_)) {
    const int64_t parts = row_parts(map), part = task % parts;
    next_output_ = (task + map.threads) / parts * kPanel;
    first_row_ = map.rows * part / parts, height_ = map.rows * (part + 1) / parts - first_row_;
    Arena arena(memory);
    panel_ = arena.take<float>(kDepth * kPanel), sums_ = arena.take<float>(height_ * kPanel);
  }

  static int64_t memory(const LinearMap& map) {
    const int64_t height = (map.rows + row_parts(map) - 1) / row_parts(map);
    return int64_t(sizeof(float)) * (kDepth + height) * kPanel;
  }

  void run() const {
    const int64_t x_row = map_.x_row / kPerWord;
    const LeftMatrix x{static_cast<const float*>(map_.x) + first_row_ * x_row, x_row, map_.x_column};
    for (int64_t begin = 0; begin < larger(width_, 1); begin += kDepth) {
      const int64_t depth = smaller(kDepth, width_ - begin);
      if (map_.weight_column == 1) pack_rows(begin, depth);
      else pack_columns(begin, depth);
      const LeftMatrix block{x.data + begin * x.column, x.row, x.column};
      const NextBlock next = block_after(begin);
      if (begin == 0) multiply_panel<kTileVectors, false>(block, depth, next);
      else multiply_panel<kTileVectors, true>(block, depth, next);
    }
    write();
  }

 private:
  static constexpr int64_t kPerWord = int64_t(sizeof(float) / sizeof(Element));
  using Product = std::conditional_t<kPerWord == 1, OfNumbers, OfPairs>;

  // Copy the features `begin` to `begin + depth` of the outputs to the panel `(features, outputs)`. W has its rows one
  // after another, which are transposed; the last one is repeated where there are no more outputs.
  void pack_rows(int64_t begin, int64_t depth) const {
    for (int64_t n = 0; n < count_; n += kLanes) {
      const float* rows[kLanes];
      for (int i = 0; i < kLanes; ++i) rows[i] = weight(smaller(n + i, count_ - 1), begin);
      for (int64_t k = 0; k < depth; k += kLanes) {
        Floats square[kLanes];
        const int64_t rest = smaller(depth - k, kLanes);
        if (rest == kLanes) {
          load_transposed(rows, k, square);
          for (int i = 0; i < kLanes; ++i) __builtin_prefetch(rows[i] + k + 2 * kLanes);
        } else {
          for (int i = 0; i < kLanes; ++i) square[i] = as_floats(load_part(rows[i] + k, 4 * rest));
          transpose_square(square);
        }
        for (int i = 0; i < rest; ++i) store(panel_ + (k + i) * kPanel + n, square[i]);
      }
    }
  }

  // The same where W has its columns one after another, as in a gradient.
  void pack_columns(int64_t begin, int64_t depth) const {
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t n = 0; n < count_; n += kLanes) {
        const int64_t rest = smaller(count_ - n, kLanes);
        const float* from = weight(n, begin + k);
        store(panel_ + k * kPanel + n, rest == kLanes ? load(from) : as_floats(load_part(from, 4 * rest)));
      }
  }

  int64_t weight_row() const { return map_.weight_row / kPerWord; }
  const float* weight(int64_t output, int64_t feature) const {
    return static_cast<const float*>(map_.weight) + (first_output_ + output) * weight_row() +
           feature * map_.weight_column;
  }

  // The numbers of W that are copied next: `rows` rows of `lines` cache lines, which begin `stride` numbers apart.
  struct NextBlock {
    const float* data;
    int64_t stride, rows, lines;
  };

  // The block after the one that begins at a feature: the next features, or the first ones of the task that this thread
  // gets next if all tasks take the same time.
  NextBlock block_after(int64_t begin) const {
    const bool is_last = begin + kDepth >= width_;
    const int64_t feature = is_last ? 0 : begin + kDepth, output = is_last ? next_output_ : first_output_;
    const int64_t outputs = smaller(kPanel, larger(map_.out - output, 0));
    const int64_t features = outputs ? smaller(kDepth, width_ - feature) : 0;
    const float* data = weight(output - first_output_, feature);
    if (map_.weight_column == 1) return {data, weight_row(), outputs, (features + kLine - 1) / kLine};
    return {data, map_.weight_column, features, (outputs + kLine - 1) / kLine};
  }

  // Multiply by the vectors of the panel that have outputs: the last panel may have fewer vectors than a tile.
  // Meanwhile the numbers that are copied next are prefetched, some for each register tile.
  template <int kVectorCount, bool kAdd>
  void multiply_panel(LeftMatrix x, int64_t depth, NextBlock next) const {
    if constexpr (kVectorCount > 1)
      if (count_ <= (kVectorCount - 1) * kLanes) return multiply_panel<kVectorCount - 1, kAdd>(x, depth, next);
    const int64_t tiles = (height_ + kTileRows - 1) / kTileRows, share = (next.rows + tiles - 1) / tiles;
    int64_t row = 0;
    for (int64_t m = 0; m < height_; m += kTileRows) {
      for (const int64_t end = smaller(row + share, next.rows); row < end; ++row)
        for (int64_t line = 0; line < next.lines; ++line)
          __builtin_prefetch(next.data + row * next.stride + line * kLine, 0, 2);
      multiply_strip<kVectorCount, kAdd, Product>({x.data + m * x.row, x.row, x.column},
                                                  smaller(kTileRows, height_ - m), panel_, kPanel, depth,
                                                  sums_ + m * kPanel, kPanel);
    }
  }

  void write() const {
    float bias[kPanel] = {};
    for (int64_t n = 0; map_.bias && n < count_; ++n)
      bias[n] = widen(static_cast<const Element*>(map_.bias)[first_output_ + n]);
    for (int64_t m = 0; m < height_; ++m) {
      Element* to = static_cast<Element*>(map_.y) + (first_row_ + m) * map_.out + first_output_;
      const float* from = sums_ + m * kPanel;
      int64_t n = 0;
      if constexpr (kPerWord == 1)
        for (; n + kLanes <= count_; n += kLanes) store(to + n, load(from + n) + load(bias + n));
      else if constexpr (kMultipliesPairs)
        for (; n + 2 * kLanes <= count_; n += 2 * kLanes)
          store_numbers(load(from + n) + load(bias + n), load(from + n + kLanes) + load(bias + n + kLanes), to + n);
      for (; n < count_; ++n) narrow(from[n] + bias[n], to + n);
    }
  }

  const LinearMap& map_;
  const int64_t width_, first_output_, count_;  // the width in words
  int64_t first_row_, height_, next_output_;
  float *panel_, *sums_;
};

}  // namespace headwise::HEADWISE_ISA
