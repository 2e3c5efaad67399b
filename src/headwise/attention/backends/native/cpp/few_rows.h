// A step of decoding: a key/value head has few query rows, and its keys and values are read once. The lanes of products
// are features, since lanes of rows would be mostly empty, and those of the softmax are keys.
//
// The keys are divided into pieces, which threads compute at the same time, and whose results are merged by their
// sums of powers (Flash-Decoding, Dao, Haziza, Massa and Sizov 2023). Pieces depend on the call, not on the number of
// threads, and so does the result.
#pragma once
#include "products.h"
#include "softmax.h"

namespace headwise::HEADWISE_ISA {

constexpr int kFewRows = 8;
constexpr int kStepKeys = 64;        // keys of a tile: its keys and values fit a first-level cache
constexpr int64_t kPieceKeys = 512;  // smallest number of keys that is worth a piece of its own
constexpr int64_t kPiecesWanted = 64;

// Dropout, which is for training, is left to blocks of rows.
inline bool has_few_rows(const Problem& p) {
  return group_size(p) * p.queries <= kFewRows && !p.statistics && !(p.dropout > 0);
}

// Number of pieces of each key/value head.
inline int64_t piece_count(const Problem& p) {
  if (!has_few_rows(p)) return 0;
  const int64_t units = p.batch * p.kv_heads, wanted = (kPiecesWanted + units - 1) / units;
  return larger(1, smaller(wanted, p.keys / kPieceKeys));
}

// Numbers of a row of keys or values that are loaded together, as `kVectors` vectors. Two bfloat16 numbers share a lane
// of 32 bits, so even features are one vector and odd features the next.
template <class Element>
constexpr int kVectors = sizeof(float) / sizeof(Element);
template <class Element>
constexpr int kStep = kVectors<Element> * kLanes;

template <class Element>
inline int64_t whole_steps(int64_t width) {
  return round_up(width, kStep<Element>);
}

// Index of a feature in a row of vectors.
template <class Element>
inline int64_t index_of(int64_t feature) {
  constexpr int kCount = kVectors<Element>;
  const int64_t rest = feature % kStep<Element>;
  return feature - rest + rest % kCount * kLanes + rest / kCount;
}

inline void unpack(Ints bits, Floats (&to)[1]) { to[0] = as_floats(bits); }
inline void unpack(Ints bits, Floats (&to)[2]) { to[0] = even_numbers(bits), to[1] = odd_numbers(bits); }

// Functions that load the numbers of a step, or only the first `count`, and zeros.
struct LoadStep {
  template <class Element>
  void operator()(const Element* from, Floats (&to)[kVectors<Element>]) const {
    unpack(load(reinterpret_cast<const int32_t*>(from)), to);
  }
};
struct LoadPart {
  int64_t count;
  template <class Element>
  void operator()(const Element* from, Floats (&to)[kVectors<Element>]) const {
    unpack(load_part(from, count * int64_t(sizeof(Element))), to);
  }
};

// The result of one piece: for each row its shift, the sum of its powers, and the sum of powers times values.
template <class Element>
struct PieceResult {
  float *shift, *sum, *output;
  int64_t width;

  PieceResult(const Problem& p, void* memory) : width(whole_steps<Element>(p.value_dim)) {
    shift = static_cast<float*>(memory), sum = shift + kFewRows, output = sum + kFewRows;
  }
  static int64_t bytes(const Problem& p) { return 4 * kFewRows * (2 + whole_steps<Element>(p.value_dim)); }
};

template <class Element>
class FewRowsPiece {
 public:
  FewRowsPiece(const Problem& p, int64_t unit, void* results, void* memory)
      : p_(p), batch_(unit / p.kv_heads), kv_head_(unit % p.kv_heads), result_(p, results) {
    rows_ = int(group_size(p) * p.queries);
    const int64_t width = whole_steps<Element>(p.head_dim);
    Arena arena(memory);
    queries_ = arena.take<float>(kFewRows * width);
    scores_ = arena.take<float>(kFewRows * kStepKeys);
    hull_ = {p.keys, 0};
    for (int r = 0; r < rows_; ++r) {
      const int64_t head = head_of(r);
      const Element* from = row_of(static_cast<const Element*>(p.q), p.q_strides, batch_, head, query_of(r));
      const double scale = p.scale[head] * kLog2EExact;
      float* to = queries_ + r * width;
      for (int64_t d = 0; d < width; ++d) to[d] = 0.0f;
      for (int64_t d = 0; d < p.head_dim; ++d) to[index_of<Element>(d)] = float(widen(from[d]) * scale);
      for (int n = 0; n < range_count(p); ++n) {
        visible_[r][n] = visible_range(p, batch_, head, query_of(r), n);
        if (!visible_[r][n].empty())
          hull_ = {smaller(hull_.begin, visible_[r][n].begin), larger(hull_.end, visible_[r][n].end)};
      }
    }
  }

  // Compute piece number `piece` of `pieces` of the keys that some row may attend to.
  void run(int64_t piece, int64_t pieces) {
    for (int r = 0; r < rows_; ++r) result_.shift[r] = kNoScore, sums_[r] = zero();
    for (int64_t d = 0; d < rows_ * result_.width; ++d) result_.output[d] = 0.0f;
    const int64_t count = larger(hull_.end - hull_.begin, 0);
    const int64_t length = larger(round_up((count + pieces - 1) / pieces, kStepKeys), kPieceKeys);
    const int64_t begin = hull_.begin + piece * length, end = smaller(begin + length, hull_.end);
    for (int64_t key = begin; key < end; key += kStepKeys) run_tile({key, smaller(key + kStepKeys, end)});
    for (int r = 0; r < rows_; ++r) result_.sum[r] = sum(sums_[r]);
  }

 private:
  int64_t head_of(int r) const { return kv_head_ * group_size(p_) + r / p_.queries; }
  int64_t query_of(int r) const { return r % p_.queries; }

  void run_tile(KeyRange keys) {
    const int count = int(keys.end - keys.begin);
    const Element* k = row_of(static_cast<const Element*>(p_.k), p_.k_strides, batch_, kv_head_, keys.begin);
    const Element* v = row_of(static_cast<const Element*>(p_.v), p_.v_strides, batch_, kv_head_, keys.begin);
    for_rows([&](auto rows, int r) { this->template scores<decltype(rows)::value>(k, count, r); });
    for (int r = 0; r < rows_; ++r) powers(keys, r);
    for_rows([&](auto rows, int r) { this->template add_values<decltype(rows)::value>(v, count, r); });
  }

  template <int kCount>
  struct RowCount {
    static constexpr int value = kCount;
  };

  // Call `run(RowCount<n>, first row)` for groups of n rows.
  template <class Run>
  void for_rows(Run run) const {
    int r = 0;
    for (; r + 4 <= rows_; r += 4) run(RowCount<4>(), r);
    if (rows_ - r == 3) run(RowCount<3>(), r);
    if (rows_ - r == 2) run(RowCount<2>(), r);
    if (rows_ - r == 1) run(RowCount<1>(), r);
  }

  // Scores of some rows, from row `first` on, in units of ln 2.
  template <int kRowCount>
  void scores(const Element* keys, int count, int first) {
    constexpr int kPadded = kRowCount == 3 ? 4 : kRowCount, kKeyCount = kLanes / kPadded;
    constexpr int kCount = kVectors<Element>;
    const int64_t width = whole_steps<Element>(p_.head_dim), stride = p_.k_strides.row;
    for (int j = 0; j < count; j += kKeyCount) {
      Floats sums[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) sums[i] = zero();
      const Element* rows[kKeyCount];
#pragma GCC unroll 16
      for (int i = 0; i < kKeyCount; ++i) rows[i] = keys + smaller(j + i, count - 1) * stride;
      const float* query = queries_ + first * width;
      const auto add_step = [&](int64_t d, auto load_vectors) {
#pragma GCC unroll 16
        for (int i = 0; i < kKeyCount; ++i) {
          Floats vectors[kCount];
          load_vectors(rows[i] + d, vectors);
#pragma GCC unroll 4
          for (int r = 0; r < kRowCount; ++r)
#pragma GCC unroll 2
            for (int n = 0; n < kCount; ++n) {
              Floats& sum = sums[r * kKeyCount + i];
              sum = multiply_add(vectors[n], load(query + r * width + d + n * kLanes), sum);
            }
        }
      };
      int64_t d = 0;
      for (; d + kStep<Element> <= p_.head_dim; d += kStep<Element>) add_step(d, LoadStep());
      if (d < p_.head_dim) add_step(d, LoadPart{p_.head_dim - d});
      float dots[kLanes];
      store(dots, sums_of_vectors(sums));
#pragma GCC unroll 4
      for (int r = 0; r < kRowCount; ++r)
        __builtin_memcpy(scores_ + (first + r) * kStepKeys + j, dots + r * kKeyCount, kKeyCount * sizeof(float));
    }
  }

  // Turn the scores of a row into powers, and add them up. The lanes after the last key get 0.
  void powers(KeyRange keys, int r) {
    const int count = int(keys.end - keys.begin), padded = int(round_up(count, kLanes));
    float* row = scores_ + r * kStepKeys;
    if (p_.softcap > 0) {
      const Floats cap = all(p_.softcap * kLog2E), inverse = all(1.0f / (p_.softcap * kLog2E));
      for (int j = 0; j < padded; j += kLanes) store(row + j, cap * tanh(load(row + j) * inverse).value);
    }
    if (has_dense_part(p_)) {
      float dense[kStepKeys];
      dense_row(p_, batch_, head_of(r), query_of(r), keys, dense);
      for (int j = 0; j < count; ++j) row[j] += dense[j];
    }
    hide_outside_ranges(keys, r, row);
    for (int j = count; j < padded; ++j) row[j] = kHidden;

    Floats top = all(kHidden);
    for (int j = 0; j < padded; j += kLanes) top = larger(load(row + j), top);
    float& shift = result_.shift[r];
    if (any(greater(top, all(shift + kSlack)))) move_shift(r, top);
    for (int j = 0; j < padded; j += kLanes) {
      const Floats power = exp2<6>(load(row + j) - all(shift));
      sums_[r] = sums_[r] + power;
      store(row + j, power);
    }
  }

  void hide_outside_ranges(KeyRange keys, int r, float* row) const {
    for (int n = 0; n < range_count(p_); ++n)
      if (visible_[r][n].begin <= keys.begin && visible_[r][n].end >= keys.end) return;
    for (int64_t key = keys.begin; key < keys.end; ++key) {
      bool is_visible = false;
      for (int n = 0; n < range_count(p_); ++n) is_visible |= key >= visible_[r][n].begin && key < visible_[r][n].end;
      if (!is_visible) row[key - keys.begin] = kHidden;
    }
  }

  // Move the shift of a row to its new largest score, and rescale its sums.
  void move_shift(int r, Floats top) {
    float lanes[kLanes], largest = kHidden;
    store(lanes, top);
    for (float lane : lanes) largest = lane > largest ? lane : largest;
    const Floats factor = exp2<6>(all(result_.shift[r] - largest));
    result_.shift[r] = largest;
    sums_[r] = sums_[r] * factor;
    float* output = result_.output + r * result_.width;
    for (int64_t d = 0; d < result_.width; d += kLanes) store(output + d, load(output + d) * factor);
  }

  // Add powers times values to the output of some rows, from row `first` on.
  template <int kRowCount>
  void add_values(const Element* values, int count, int first) {
    constexpr int kSteps = 4 / kVectors<Element>;
    int64_t d = 0;
    for (; d + kSteps * kStep<Element> <= p_.value_dim; d += kSteps * kStep<Element>)
      add_columns<kRowCount, kSteps>(values, count, first, d, LoadStep());
    for (; d + kStep<Element> <= p_.value_dim; d += kStep<Element>)
      add_columns<kRowCount, 1>(values, count, first, d, LoadStep());
    if (d < p_.value_dim) add_columns<kRowCount, 1>(values, count, first, d, LoadPart{p_.value_dim - d});
  }

  template <int kRowCount, int kSteps, class Load>
  void add_columns(const Element* values, int count, int first, int64_t d, Load load_vectors) {
    constexpr int kCount = kVectors<Element>, kWidth = kSteps * kCount;
    Floats sums[kRowCount][kWidth];
#pragma GCC unroll 4
    for (int r = 0; r < kRowCount; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < kWidth; ++n) sums[r][n] = zero();
    const float* powers = scores_ + first * kStepKeys;
    const Element* row = values + d;
    for (int j = 0; j < count; ++j, row += p_.v_strides.row) {
#pragma GCC unroll 4
      for (int s = 0; s < kSteps; ++s) {
        Floats vectors[kCount];
        load_vectors(row + s * kStep<Element>, vectors);
#pragma GCC unroll 4
        for (int r = 0; r < kRowCount; ++r)
#pragma GCC unroll 2
          for (int n = 0; n < kCount; ++n) {
            Floats& sum = sums[r][s * kCount + n];
            sum = multiply_add(all(powers[r * kStepKeys + j]), vectors[n], sum);
          }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRowCount; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < kWidth; ++n) {
        float* to = result_.output + (first + r) * result_.width + d + n * kLanes;
        store(to, load(to) + sums[r][n]);
      }
  }

  const Problem& p_;
  int64_t batch_, kv_head_;
  int rows_;
  PieceResult<Element> result_;
  KeyRange visible_[kFewRows][kMostRanges], hull_;
  Floats sums_[kFewRows];
  float *queries_, *scores_;
};

inline float larger_float(float a, float b) { return a > b ? a : b; }

// Merge the results of all pieces of a key/value head, and write the output and the log-sum-exp.
template <class Element>
inline void merge_pieces_of(const Problem& p, int64_t unit, char* results, int64_t pieces) {
  const int64_t batch = unit / p.kv_heads, bytes = PieceResult<Element>::bytes(p);
  PieceResult<Element> merged(p, results);
  for (int r = 0; r < group_size(p) * p.queries; ++r) {
    const int64_t head = unit % p.kv_heads * group_size(p) + r / p.queries, query = r % p.queries;
    float shift = kNoScore;
    for (int64_t n = 0; n < pieces; ++n)
      shift = larger_float(PieceResult<Element>(p, results + n * bytes).shift[r], shift);
    double sum = 0.0;
    float* output = merged.output + r * merged.width;
    for (int64_t n = 0; n < pieces; ++n) {
      const PieceResult<Element> piece(p, results + n * bytes);
      const float factor = float(__builtin_exp2(double(piece.shift[r]) - shift));
      const float* from = piece.output + r * piece.width;
      sum += double(piece.sum[r]) * factor;
      for (int64_t d = 0; d < merged.width; d += kLanes)
        store(output + d, multiply_add(load(from + d), all(factor), n ? load(output + d) : zero()));
    }
    const Divisor divisor(shift, sum, sink_of(p, head));
    write_normalizers(p, (batch * p.heads + head) * p.queries + query, divisor.lse, shift, divisor.inverse);
    Element* to = row_of(static_cast<Element*>(p.out), p.out_strides, batch, head, query);
    for (int64_t d = 0; d < p.value_dim; ++d) narrow(output[index_of<Element>(d)] * divisor.inverse, to + d);
  }
}

}  // namespace headwise::HEADWISE_ISA
