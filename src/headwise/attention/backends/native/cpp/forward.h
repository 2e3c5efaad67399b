// The forward pass of a block of rows: scores, softmax and output, tile by tile (FlashAttention-2, Dao 2023,
// algorithm 1), with statistics of the weights on request.
#pragma once
#include "dropout.h"
#include "products.h"
#include "statistics.h"

namespace headwise::HEADWISE_ISA {

// Products of a block with keys and values, in float32. bfloat16 keys and values are converted tile by tile.
template <class Element>
class FloatProducts {
 public:
  static constexpr int kDegree = 6;
  static constexpr int kAlignment = 1;

  FloatProducts(const Problem& p, const RowBlock& block, Arena& arena) : p_(p), block_(block) {
    queries_ = arena.take<float>(round_up(p.head_dim, kLanes) * kRows);
    room_ = arena.take<float>(kRows * round_up(larger(p.head_dim, larger(p.value_dim, kKeys)), kLanes));
    converted_ = arena.take<float>(kKeys * larger(p.head_dim, p.value_dim));
    double scale[kRows];
    for (int r = 0; r < kRows; ++r) scale[r] = p.scale[block.head[r]] * kLog2EExact;
    rows_to_lanes(block, static_cast<const Element*>(p.q), p.q_strides, p.head_dim, scale, room_, queries_);
  }

  float* room() { return room_; }
  const float* factor() const { return nullptr; }  // the queries are scaled
  bool adds_to_bias() const { return is_one_sum(p_.head_dim, block_.width); }

  // scores (keys x kRows) = K Q^T, in units of ln 2, or the bias that `scores` has and it.
  template <bool kAdd>
  void scores(KeyRange keys, float* scores) {
    multiply<kAdd>(tile_of(p_.k, p_.k_strides, keys, p_.head_dim), keys.end - keys.begin, queries_, kRows, p_.head_dim,
                   scores, kRows, block_.width);
  }

  // output (value_dim x kRows) = V^T powers, or output + it.
  void add_values(KeyRange keys, const float* powers, bool, float* output, bool add) {
    const LeftMatrix values = tile_of(p_.v, p_.v_strides, keys, p_.value_dim);
    const LeftMatrix transposed{values.data, values.column, values.row};
    const auto product = add ? multiply<true> : multiply<false>;
    product(transposed, p_.value_dim, powers, kRows, keys.end - keys.begin, output, kRows, block_.width);
  }

 private:
  LeftMatrix tile_of(const void* data, const Strides& strides, KeyRange keys, int64_t width) {
    const Element* rows = row_of(static_cast<const Element*>(data), strides, block_.batch, block_.kv_head, keys.begin);
    return as_floats(rows, strides.row, keys.end - keys.begin, width, converted_);
  }

  const Problem& p_;
  const RowBlock& block_;
  float *queries_, *room_, *converted_;
};

// Divide the output by the divisors; a row without a key gets 0. Scale it up for dropout. Write the log-sum-exp.
inline void normalize(const Problem& p, const RowBlock& block, const SoftmaxState& state, const Divisors& divisors,
                      float* output) {
  for (int r = 0; r < block.rows; ++r)
    write_normalizers(p, flat_index(p, block, r), divisors.lse[r], state.shift[r], divisors.inverse[r]);
  for (int64_t d = 0; d < p.value_dim; ++d)
    for (int r = 0; r < block.width; r += kLanes) {
      float* at = output + d * kRows + r;
      store(at, state.started ? load(at) * load(divisors.scaled_inverse + r) : zero());
    }
}

// Add the product of two `(value_dim x kRows)` matrices, row by row, to `sums`.
inline void add_row_products(const Problem& p, const RowBlock& block, const float* a, const float* b, float* sums) {
  for (int64_t d = 0; d < p.value_dim; ++d)
    for (int r = 0; r < block.width; r += kLanes)
      store(sums + r, multiply_add(load(a + d * kRows + r), load(b + d * kRows + r), load(sums + r)));
}

// Squared norm of each row of the output, and of its product with the output projection: O . (G O) for G = W^T W.
inline void squared_norms(const Problem& p, const RowBlock& block, const float* output, float* product,
                          float (&squares)[2][kRows]) {
  const float* gram = p.statistics->gram;
  for (int r = 0; r < kRows; ++r) squares[0][r] = squares[1][r] = 0.0f;
  add_row_products(p, block, output, output, squares[0]);
  for (int first = 0, last; gram && first < block.rows; first = last) {  // the rows of one head
    for (last = first + 1; last < block.rows && block.head[last] == block.head[first];) ++last;
    const int64_t size = p.value_dim * p.value_dim;
    multiply<false>({gram + block.head[first] * size, p.value_dim, 1}, p.value_dim, output, kRows, p.value_dim, product,
                    kRows, block.width);
    float of_head[kRows] = {};
    add_row_products(p, block, output, product, of_head);
    for (int r = first; r < last; ++r) squares[1][r] = of_head[r];
  }
}

// Bytes of memory that `forward_block` divides among its arrays, with room for their alignment.
inline int64_t forward_memory(const Problem& p) {
  const int64_t widest = round_up(larger(p.head_dim, larger(p.value_dim, kKeys)), 32);
  int64_t floats = (8 * widest + kKeys) * kRows + kKeys * widest, bytes = 0;
  if (p.statistics) {
    floats += p.keys * kRows + p.keys + 16 * kRows;
    bytes = StatisticsOfBlock::tile_capacity(p) * int64_t(sizeof(KeptTile)) + p.statistics->token_count;
  }
  return 4 * floats + bytes + 4096;
}

template <template <class> class Products, class Element, bool kStatistics>
inline void forward_block(const Problem& p, const RowBlock& block, void* memory) {
  Arena arena(memory);
  float* scores = arena.take<float>((kStatistics ? p.keys + kKeys : kKeys) * kRows);
  float* output = arena.take<float>(round_up(p.value_dim, 32) * kRows);
  float* dense = arena.take<float>(kKeys * kRows);
  Products<Element> products(p, block, arena);
  const Visibility visibility(p, block);
  const Dropout dropout(p, block);
  SoftmaxState state;
  start_softmax(state);
  [[maybe_unused]] StatisticsOfBlock statistics(p, block, visibility, kStatistics ? &arena : nullptr);

  constexpr int kAlignment = Products<Element>::kAlignment;
  const bool changes_scores = p.softcap > 0 || has_dense_part(p);
  const float* factor = products.factor();
  if (factor && (changes_scores || !all_positive(factor))) factor = nullptr;
  const bool adds_to_bias = !kStatistics && products.adds_to_bias() && is_plain_bias(p);

  for (KeyRange keys = visibility.next_tile(0, kAlignment); !keys.empty();
       keys = visibility.next_tile(round_up(keys.end, kAlignment), kAlignment)) {
    const int64_t count = keys.end - keys.begin;
    if (adds_to_bias) {
      if (!bias_tile(p, block, keys, scores)) continue;
      products.template scores<true>(keys, scores);
      hide_outside_ranges(visibility, block, keys, scores);
    } else {
      if (has_dense_part(p) && !dense_tile(p, block, visibility, keys, products.room(), dense)) continue;
      products.template scores<false>(keys, scores);
      const float* late_factor = factor ? nullptr : products.factor();
      if (late_factor && (p.softcap > 0 || !has_dense_part(p)))
        scale_scores(block, count, late_factor, scores), late_factor = nullptr;
      if (p.softcap > 0) {
        if constexpr (kStatistics) statistics.raise_uncapped(state, keys, has_dense_part(p) ? dense : nullptr, scores);
        cap_scores(p, block, count, scores);
      }
      if (has_dense_part(p)) add_tile(block, count, late_factor, dense, scores);
      else hide_outside_ranges(visibility, block, keys, scores);
    }
    const float* away = kStatistics ? statistics.start_tile(keys) : nullptr;
    softmax_tile<kStatistics, Products<Element>::kDegree>(block, state, count, factor, scores, output, p.value_dim,
                                                          away, statistics.indices());
    if (p.dropout > 0) dropout.drop(keys, scores);
    products.add_values(keys, scores, kStatistics, output, state.started);
    state.started = true;
    if constexpr (kStatistics) {
      statistics.add_tile(state, keys, scores, has_dense_part(p) ? dense : nullptr);
      scores += count * kRows;
    }
  }

  const Divisors divisors(p, block, state);
  normalize(p, block, state, divisors, output);
  if constexpr (kStatistics) {
    float squares[2][kRows];
    squared_norms(p, block, output, arena.take<float>(p.value_dim * kRows), squares);
    statistics.finish(state, divisors, squares);
  }
  lanes_to_rows(block, output, p.value_dim, products.room(), static_cast<Element*>(p.out), p.out_strides);
}

}  // namespace headwise::HEADWISE_ISA
