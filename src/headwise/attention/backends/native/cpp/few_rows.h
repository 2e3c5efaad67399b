// Products of a block with few rows, as in a step of decoding: features are the lanes of vectors, not rows, of which
// most lanes would be empty. Such a block reads keys and values once and does little else.
#pragma once
#include "products.h"
#include "softmax.h"

namespace headwise::HEADWISE_ISA {

constexpr int kFewRows = 6;

// True if all rows of a key/value head are so few that their products are faster with features as lanes.
inline bool has_few_rows(const Problem& p) { return group_size(p) * p.queries <= kFewRows; }

template <class Element>
class FewRowsProducts {
 public:
  static constexpr int kDegree = 6;
  static constexpr int kAlignment = 1;

  FewRowsProducts(const Problem& p, const RowBlock& block, Arena& arena) : p_(p), block_(block) {
    room_ = arena.take<float>(kRows * round_up(larger(p.head_dim, larger(p.value_dim, kKeys)), kLanes));
    queries_ = arena.take<float>(kFewRows * p.head_dim);
    for (int r = 0; r < block.rows; ++r) {
      const Element* from =
          row_of(static_cast<const Element*>(p.q), p.q_strides, block.batch, block.head[r], block.query[r]);
      const float scale = p.scale[block.head[r]] * kLog2E;
      for (int64_t d = 0; d < p.head_dim; ++d) queries_[r * p.head_dim + d] = widen(from[d]) * scale;
    }
  }

  float* room() { return room_; }
  const float* factor() const { return nullptr; }  // the queries are scaled

  // scores (keys x kRows) = K Q^T, in units of ln 2; zeros in lanes without a row.
  void scores(KeyRange keys, float* scores) const {
    const int64_t count = keys.end - keys.begin;
    for (int64_t j = 0; j < count; ++j)
      for (int r = 0; r < block_.width; r += kLanes) store(scores + j * kRows + r, zero());
    for (int64_t j = 0; j < count; j += kLanes)
      for (int r = 0; r < block_.rows; ++r) {
        float dots[kLanes];
        store(dots, dot_products(keys.begin + j, count - j, queries_ + r * p_.head_dim));
        for (int64_t i = 0; i < smaller(kLanes, count - j); ++i) scores[(j + i) * kRows + r] = dots[i];
      }
  }

  // output (value_dim x kRows) = V^T powers, or output + it.
  void add_values(KeyRange keys, const float* powers, bool, float* output, bool add) const {
    const int64_t count = keys.end - keys.begin;
    const Element* values = row_of(static_cast<const Element*>(p_.v), p_.v_strides, block_.batch, block_.kv_head,
                                   keys.begin);
    for (int r = 0; r < block_.rows; ++r) {
      float* row = room_;
      int64_t d = 0;
      for (; d + 4 * kLanes <= p_.value_dim; d += 4 * kLanes) add_columns<4>(values + d, count, powers + r, row + d);
      for (; d + kLanes <= p_.value_dim; d += kLanes) add_columns<1>(values + d, count, powers + r, row + d);
      for (; d < p_.value_dim; ++d) {
        row[d] = 0.0f;
        for (int64_t j = 0; j < count; ++j) row[d] += powers[j * kRows + r] * widen(values[j * p_.v_strides.row + d]);
      }
      for (d = 0; d < p_.value_dim; ++d) {
        float* to = output + d * kRows + r;
        *to = add ? *to + row[d] : row[d];
      }
    }
  }

 private:
  // Products of a query with `kLanes` keys from `key` on, of which `count` exist.
  Floats dot_products(int64_t key, int64_t count, const float* query) const {
    const Element* rows = row_of(static_cast<const Element*>(p_.k), p_.k_strides, block_.batch, block_.kv_head, key);
    Floats sums[kLanes];
    float rest[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const Element* row = rows + smaller(i, count - 1) * p_.k_strides.row;
      sums[i] = zero(), rest[i] = 0.0f;
      int64_t d = 0;
      for (; d + kLanes <= p_.head_dim; d += kLanes) sums[i] = multiply_add(load(row + d), load(query + d), sums[i]);
      for (; d < p_.head_dim; ++d) rest[i] += widen(row[d]) * query[d];
    }
    return sums_of_vectors(sums) + load(rest);
  }

  // Sum over the keys of the powers of one row times `kN` vectors of the values.
  template <int kN>
  void add_columns(const Element* values, int64_t count, const float* powers, float* to) const {
    Floats sums[kN];
    for (int n = 0; n < kN; ++n) sums[n] = zero();
    for (int64_t j = 0; j < count; ++j, values += p_.v_strides.row)
      for (int n = 0; n < kN; ++n)
        sums[n] = multiply_add(all(powers[j * kRows]), load(values + n * kLanes), sums[n]);
    for (int n = 0; n < kN; ++n) store(to + n * kLanes, sums[n]);
  }

  const Problem& p_;
  const RowBlock& block_;
  float *room_, *queries_;
};

}  // namespace headwise::HEADWISE_ISA
