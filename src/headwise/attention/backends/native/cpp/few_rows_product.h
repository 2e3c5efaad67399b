// A linear map y = x W^T + b of few rows of x, as of a short text or a step of decoding. In a step of decoding, reading
// W takes most of the time. Each lane of a vector holds another feature, as in few_rows.h.
//
// The products of each output are added in the same order, whatever the number of rows, of tasks and of threads. Sums
// are blocked: each lane adds up at most `kLaneSum` products, fewer where there are fewer lanes, then the lanes are
// added to the total.
#pragma once
#include "few_rows.h"
#include "linear_map.h"

namespace headwise::HEADWISE_ISA {

constexpr int64_t kTaskNumbers = 1 << 15;   // numbers of W that are worth a task of their own
constexpr int64_t kTaskRows = 32;           // rows of x that are, where W is too small to be divided
constexpr int64_t kPrefetchedWidth = 1024;  // widest rows of W that are prefetched; wider ones gained nothing
constexpr int64_t kLaneSum = kLanes < 16 ? kSumLength<1> : kSumLength<2>;

// Rows of W of each task: whole vectors of results.
inline int64_t rows_of_task(const LinearMap& map) {
  return round_up(larger(kTaskNumbers / larger(map.width, 1), 1), kLanes);
}
inline int64_t output_tasks(const LinearMap& map) { return (map.out + rows_of_task(map) - 1) / rows_of_task(map); }
inline int64_t few_rows_tasks(const LinearMap& map) {
  return output_tasks(map) > 1 ? output_tasks(map) : (map.rows + kTaskRows - 1) / kTaskRows;
}

template <class Element>
class FewRowsProduct {
 public:
  explicit FewRowsProduct(const LinearMap& map)
      : map_(map), weight_(static_cast<const Element*>(map.weight)), x_(static_cast<const Element*>(map.x)) {}

  // Compute the outputs `begin` to `end` of the rows `row` to `last` of x. Meanwhile the next `kLanes` rows of W are
  // prefetched, one cache line in each step; each of the first groups of four rows of x prefetches its share.
  void run(int64_t row, int64_t last, int64_t begin, int64_t end) const {
    constexpr int64_t kOutputs = kLanes / 4;
    const bool has_next = end + kLanes <= map_.out && map_.width <= kPrefetchedWidth;
    for (int64_t n = 0; row + 4 <= last; row += 4, ++n) {
      if (has_next && n < kOutputs) outputs<4, true>(row, begin, end, end - begin + n);
      else outputs<4>(row, begin, end);
    }
    if (last - row >= 2) outputs<2>(row, begin, end), row += 2;
    if (last - row == 1) outputs<1>(row, begin, end);
  }

 private:
  // Outputs `begin` to `end` of `kRowCount` rows of x from row `first` on.
  template <int kRowCount, bool kPrefetch = false>
  void outputs(int64_t first, int64_t begin, int64_t end, int64_t ahead = 0) const {
    constexpr int kOutputs = kLanes / kRowCount;
    const Element* x = x_ + first * map_.width;
    for (int64_t j = begin; j < end; j += kOutputs) {
      const Element* weights[kOutputs];  // after the last row of W, that row again
#pragma GCC unroll 16
      for (int i = 0; i < kOutputs; ++i) weights[i] = weight_ + smaller(j + i, end - 1) * map_.width;
      const Element* coming = weight_ + (j + ahead) * map_.width;
      Floats total = zero();
      for (int64_t d = 0; d < map_.width; d += kLaneSum * kLanes)
        total = total + block<kRowCount, kPrefetch>(x, weights, coming, d, smaller(d + kLaneSum * kLanes, map_.width));
      float lanes[kLanes];
      store(lanes, total);
      for (int r = 0; r < kRowCount; ++r)
        for (int i = 0; i < smaller(kOutputs, end - j); ++i) write(first + r, j + i, lanes[r * kOutputs + i]);
    }
  }

  // Products over the features `begin` to `end` of `kRowCount` rows of x with kLanes / kRowCount rows of W.
  template <int kRowCount, bool kPrefetch>
  Floats block(const Element* x, const Element* const* weights, [[maybe_unused]] const Element* coming, int64_t begin,
               int64_t end) const {
    constexpr int kOutputs = kLanes / kRowCount, kCount = kVectors<Element>;
    Floats sums[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sums[i] = zero();
    const auto add_step = [&](int64_t d, auto load_vectors) {
      Floats rows[kRowCount][kCount];
#pragma GCC unroll 4
      for (int r = 0; r < kRowCount; ++r) load_vectors(x + r * map_.width + d, rows[r]);
#pragma GCC unroll 16
      for (int i = 0; i < kOutputs; ++i) {
        Floats vectors[kCount];
        load_vectors(weights[i] + d, vectors);
#pragma GCC unroll 2
        for (int n = 0; n < kCount; ++n)
#pragma GCC unroll 4
          for (int r = 0; r < kRowCount; ++r) {
            Floats& sum = sums[r * kOutputs + i];
            sum = multiply_add(vectors[n], rows[r][n], sum);
          }
      }
    };
    int64_t d = begin;
    for (; d + kStep<Element> <= end; d += kStep<Element>) {
      if constexpr (kPrefetch) __builtin_prefetch(coming + d, 0, 2);
      add_step(d, LoadStep());
    }
    if (d < end) add_step(d, LoadPart{end - d});
    return sums_of_vectors(sums);
  }

  void write(int64_t row, int64_t output, float product) const {
    const float bias = map_.bias ? widen(static_cast<const Element*>(map_.bias)[output]) : 0.0f;
    narrow(product + bias, static_cast<Element*>(map_.y) + row * map_.out + output);
  }

  const LinearMap& map_;
  const Element *weight_, *x_;
};

inline void multiply_few_rows(const LinearMap& map, int64_t task) {
  const bool divides_rows = output_tasks(map) <= 1;
  const int64_t row = divides_rows ? task * kTaskRows : 0;
  const int64_t last = divides_rows ? smaller(row + kTaskRows, map.rows) : map.rows;
  const int64_t begin = divides_rows ? 0 : task * rows_of_task(map), end = smaller(begin + rows_of_task(map), map.out);
  for (int64_t j = begin; j < end; j += kLanes) {  // so few rows of W stay in the first-level cache for all rows of x
    if (map.bfloat16) FewRowsProduct<uint16_t>(map).run(row, last, j, smaller(j + kLanes, end));
    else FewRowsProduct<float>(map).run(row, last, j, smaller(j + kLanes, end));
  }
}

}  // namespace headwise::HEADWISE_ISA
