// The five products of the backward pass for a block of rows, in float32. bfloat16 numbers are converted tile by tile.
//
// `PairGradientProducts` in gradient_pairs.h has the same members and computes in bfloat16.
#pragma once
#include "products.h"
#include "softmax.h"

namespace headwise::HEADWISE_ISA {

// The weights of some rows for one key, after dropout, and the gradients of their scores times the scale.
struct Derivative {
  Floats weight, gradient;
};

// The derivative of the softmax of a tile, one vector at a time. All members are constant while a tile is computed, so
// that the compiler keeps them in registers.
template <bool kSoftcap, bool kDropout>
struct Differentiation {
  // `(keys, kRows)`: weights, their gradients times the factors of dropout, and the derivative of the softcap.
  const float *weights, *weight_gradients, *slopes;
  const float *lse_gradient, *scale, *delta;  // `kRows`
  const Mask* kept;                           // `(keys, kRows / kLanes)`: the lanes whose weights dropout keeps
  float kept_factor;                          // of these weights

  // The rows from `r` on, and key j of the tile.
  Derivative operator()(int64_t j, int r) const {
    const int64_t at = j * kRows + r;
    const Floats weight = load(weights + at);
    Floats used_weight = weight;
    if constexpr (kDropout) used_weight = select(kept[at / kLanes], weight * all(kept_factor), zero());
    const Floats slope = load(weight_gradients + at) - load(delta + r) + load(lse_gradient + r);
    const Floats gradient = weight * load(scale + r) * slope;
    return {used_weight, kSoftcap ? gradient * load(slopes + at) : gradient};
  }
};

template <class Element>
class FloatGradientProducts {
 public:
  static constexpr bool kHasPairs = false;
  static constexpr int kDegree = 6;
  static constexpr int kAlignment = 1;  // tiles begin at a multiple of it
  static constexpr int kTileKeys = kKeys;
  static constexpr int64_t kSummedHeads = 16;  // rows of several heads that are added up at a time
  static int64_t padded(int64_t width) { return round_up(width, kLanes); }

  FloatGradientProducts(const Problem& p, Arena& arena) : p_(p) {
    const int64_t widest = padded(larger(p.head_dim, larger(p.value_dim, kKeys)));
    float** const blocks[] = {&queries_, &query_rows_, &upstream_, &upstream_rows_, &query_sums_, &room_};
    for (float** block : blocks) *block = arena.take<float>(widest * kRows);
    keys_ = arena.take<float>(kKeys * p.head_dim);
    values_ = arena.take<float>(kKeys * p.value_dim);
  }
  static int64_t memory(const Problem& p) {
    const int64_t widest = padded(larger(p.head_dim, larger(p.value_dim, kKeys)));
    return 4 * (6 * widest * kRows + 2 * kKeys * widest);
  }

  // Prepare the queries and the gradients of the output of a block.
  void start(const RowBlock& block) {
    block_ = &block;
    float ones[kRows];
    double log2_scale[kRows];
    for (int r = 0; r < kRows; ++r) ones[r] = 1.0f, log2_scale[r] = p_.scale[block.head[r]] * kLog2EExact;
    const Element* q = static_cast<const Element*>(p_.q);
    const Element* upstream = static_cast<const Element*>(p_.gradients->out);
    rows_to_lanes(block, q, p_.q_strides, p_.head_dim, log2_scale, room_, queries_);
    block_rows(q, p_.q_strides, p_.head_dim, query_rows_);
    rows_to_lanes(block, upstream, p_.gradients->out_strides, p_.value_dim, ones, room_, upstream_);
    block_rows(upstream, p_.gradients->out_strides, p_.value_dim, upstream_rows_);
  }

  // Products `O . dO` of each row, with the operations of the products `V . dO`: in a row in which one key has all
  // weight, the two cancel.
  void output_products(float* to) {
    float ones[kRows], *out = query_sums_;
    for (float& one : ones) one = 1.0f;
    rows_to_lanes(*block_, static_cast<const Element*>(p_.out), p_.out_strides, p_.value_dim, ones, room_, out);
    multiply_rows(out, upstream_, kRows, p_.value_dim, block_->width, to);
  }

  float* room() { return room_; }
  const float* factor() const { return nullptr; }  // the queries are scaled
  bool adds_to_bias() const { return is_one_sum(p_.head_dim, block_->width); }
  float* query_sums() { return query_sums_; }

  // scores (keys x kRows) = K Q^T, in units of ln 2, or the bias that `scores` has and it.
  template <bool kAdd>
  void scores(KeyRange keys, float* scores) {
    const LeftMatrix key_rows = tile_of(p_.k, p_.k_strides, keys, p_.head_dim, keys_);
    multiply<kAdd>(key_rows, keys.end - keys.begin, queries_, kRows, p_.head_dim, scores, kRows, block_->width);
  }

  // Gradients of the weights (keys x kRows) = V dO^T.
  void weight_gradients(KeyRange keys, float* to) {
    const LeftMatrix values = tile_of(p_.v, p_.v_strides, keys, p_.value_dim, values_);
    multiply<false>(values, keys.end - keys.begin, upstream_, kRows, p_.value_dim, to, kRows, block_->width);
  }

  // Add the products of a tile to the gradients of queries, keys and values. Gradients of scores replace those of the
  // weights, and weights after dropout the weights before.
  template <class Differentiate>
  void add(KeyRange keys, const Differentiate derivative, float* weights, float* weight_gradients, bool started,
           float* key_sums, float* value_sums) {
    const int64_t count = keys.end - keys.begin, head_dim = padded(p_.head_dim), value_dim = padded(p_.value_dim);
    for (int64_t j = 0; j < count; ++j)
      for (int r = 0; r < block_->width; r += kLanes) {
        const Derivative result = derivative(j, r);
        store(weights + j * kRows + r, result.weight);
        store(weight_gradients + j * kRows + r, result.gradient);
      }
    // Sums over rows of several heads are shorter than those over the rows of one head, since plain attention adds up
    // each head alone, and then the heads.
    const int64_t most = block_->head[0] == block_->head[kRows - 1] ? kRows : kSummedHeads;
    multiply_in_sums<true>({weights, kRows, 1}, count, upstream_rows_, value_dim, block_->rows, value_sums, value_dim,
                           value_dim, most);
    multiply_in_sums<true>({weight_gradients, kRows, 1}, count, query_rows_, head_dim, block_->rows, key_sums, head_dim,
                           head_dim, most);
    const auto product = started ? multiply<true> : multiply<false>;
    const LeftMatrix key_rows = tile_of(p_.k, p_.k_strides, keys, p_.head_dim, keys_);
    product({key_rows.data, key_rows.column, key_rows.row}, p_.head_dim, weight_gradients, kRows, count, query_sums_,
            kRows, block_->width);
  }

 private:
  // Rows of the block: `to (kRows x padded width)`, zeros in lanes without a row.
  void block_rows(const Element* data, const Strides& strides, int64_t width, float* to) const {
    for (int r = 0; r < kRows; ++r, to += padded(width)) {
      const Element* from = row_of(data, strides, block_->batch, block_->head[r], block_->query[r]);
      for (int64_t d = 0; d < padded(width); ++d) to[d] = r < block_->rows && d < width ? widen(from[d]) : 0.0f;
    }
  }

  LeftMatrix tile_of(const void* data, const Strides& strides, KeyRange keys, int64_t width, float* room) const {
    const Element* rows =
        row_of(static_cast<const Element*>(data), strides, block_->batch, block_->kv_head, keys.begin);
    return as_floats(rows, strides.row, keys.end - keys.begin, width, room);
  }

  const Problem& p_;
  const RowBlock* block_ = nullptr;
  float *queries_, *query_rows_, *upstream_, *upstream_rows_, *query_sums_, *room_, *keys_, *values_;
};

}  // namespace headwise::HEADWISE_ISA
