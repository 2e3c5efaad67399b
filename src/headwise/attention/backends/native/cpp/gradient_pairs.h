// The five products of the backward pass for a block of rows, of bfloat16 pairs. Weights and gradients of scores are
// rounded to bfloat16 for the products that add up gradients, and all sums are in float32 (FlashAttention-2, Dao 2023).
#pragma once
#include "gradient_products.h"
#include "packed.h"

namespace headwise::HEADWISE_ISA {

template <class Element>
class PairGradientProducts {
 public:
  static constexpr bool kHasPairs = true;
  static constexpr int kDegree = 4;
  static constexpr int kAlignment = kPairTile;  // tiles begin at a multiple of it
  static constexpr int kTileKeys = 64;
  static int64_t padded(int64_t width) { return round_up(width, kPairTile); }

  PairGradientProducts(const Problem& p, Arena& arena) : p_(p), shape_(p) {
    const int64_t widest = larger(shape_.head_dim, larger(shape_.value_dim, kTileKeys));
    uint32_t** const pairs[] = {&queries_, &query_pairs_, &upstream_, &upstream_pairs_, &slope_pairs_};
    for (uint32_t** each : pairs) *each = arena.take<uint32_t>(widest / 2 * kRows);
    uint16_t** const numbers[] = {&upstream_rows_, &weights_, &slopes_};
    for (uint16_t** each : numbers) *each = arena.take<uint16_t>(widest * kRows);
    query_sums_ = arena.take<float>(widest * kRows);
    room_ = arena.take<float>(widest * kRows);
  }
  static int64_t memory(const Problem& p) {
    const PackedShape shape(p);
    return 4 * kRows * 6 * larger(shape.head_dim, larger(shape.value_dim, kTileKeys));
  }

  // Prepare the queries and the gradients of the output of a block.
  void start(const RowBlock& block) {
    block_ = &block;
    packed_ = static_cast<const uint16_t*>(p_.packed) +
              (block.batch * p_.kv_heads + block.kv_head - p_.first_packed) * shape_.size();
    width_ = round_up(block.rows, kPairTile);
    for (int r = 0; r < kRows; ++r) factor_[r] = p_.scale[block.head[r]] * kLog2E;
    uint16_t* rows = reinterpret_cast<uint16_t*>(room_);
    copy_rows(block, p_.q, p_.q_strides, p_.head_dim, width_, shape_.head_dim, rows);
    feature_pairs(rows, width_, shape_.head_dim, queries_);
    row_pairs(rows, width_, shape_.head_dim, query_pairs_);
    copy_rows(block, p_.gradients->out, p_.gradients->out_strides, p_.value_dim, width_, shape_.value_dim,
              upstream_rows_);
    feature_pairs(upstream_rows_, width_, shape_.value_dim, upstream_);
    row_pairs(upstream_rows_, width_, shape_.value_dim, upstream_pairs_);
  }

  // Products `O . dO` of each row.
  void output_products(float* to) {
    uint16_t* out = reinterpret_cast<uint16_t*>(room_);
    copy_rows(*block_, p_.out, p_.out_strides, p_.value_dim, width_, shape_.value_dim, out);
    for (int64_t r = 0; r < kRows; ++r) {
      Floats product = zero();
      for (int64_t d = 0; r < width_ && d < shape_.value_dim; d += kLanes)
        product = multiply_add(load(out + r * shape_.value_dim + d), load(upstream_rows_ + r * shape_.value_dim + d),
                               product);
      to[r] = sum(product);
    }
  }

  float* room() { return room_; }
  const float* factor() const { return factor_; }
  bool adds_to_bias() const { return false; }  // the factor follows the product
  float* query_sums() { return query_sums_; }

  // scores (keys x kRows) = K Q^T, or the numbers that `scores` has and it.
  template <bool kAdd>
  void scores(KeyRange keys, float* scores) const {
    for (int64_t key = keys.begin; key < keys.end; key += kPairTile)
      multiply_pairs<kAdd>({block_of(key), shape_.head_dim, kPairTile}, kPairTile, {queries_, kRows}, width_,
                           shape_.head_dim, scores + (key - keys.begin) * kRows, kRows);
  }

  // Gradients of the weights (keys x kRows) = V dO^T.
  void weight_gradients(KeyRange keys, float* to) const {
    for (int64_t key = keys.begin; key < keys.end; key += kPairTile)
      multiply_pairs<false>({block_of(key) + kPairTile * shape_.head_dim, shape_.value_dim, kPairTile}, kPairTile,
                            {upstream_, kRows}, width_, shape_.value_dim, to + (key - keys.begin) * kRows, kRows);
  }

  // Add the products of a tile to the gradients of queries, keys and values.
  template <class Differentiate>
  void add(KeyRange keys, const Differentiate derivative, float*, float*, bool started, float* key_sums,
           float* value_sums) {
    const int64_t count = keys.end - keys.begin, depth = round_up(count, kPairTile);
    if (count == depth && block_->width == width_) narrow_derivatives<true>(derivative, count);
    else narrow_derivatives<false>(derivative, count);
    const int64_t head_dim = shape_.head_dim, value_dim = shape_.value_dim;
    multiply_pairs<true>({weights_, kRows, kPairTile}, depth, {upstream_pairs_, value_dim}, value_dim, width_,
                         value_sums, value_dim);
    multiply_pairs<true>({slopes_, kRows, kPairTile}, depth, {query_pairs_, head_dim}, head_dim, width_, key_sums,
                         head_dim);
    const auto product = started ? multiply_pairs<true> : multiply_pairs<false>;
    const uint16_t* key_columns = block_of(keys.begin) + kPairTile * (head_dim + value_dim);
    product({key_columns, kPairTile, shape_.block_size()}, head_dim, {slope_pairs_, kRows}, width_, depth, query_sums_,
            kRows);
  }

 private:
  // Round the weights and gradients of a tile, 2 keys and 2 vectors of rows at a time: as left factors, and gradients
  // also as pairs of keys. What the tile lacks to a multiple of 32 keys and rows is 0.
  template <bool kWhole, class Differentiate>
  void narrow_derivatives(const Differentiate derivative, const int64_t count) {
    const int width = block_->width, padded_width = int(width_);
    uint16_t *const weights = weights_, *const slopes = slopes_;
    float* const pairs = reinterpret_cast<float*>(slope_pairs_);
    for (int64_t j = 0; j < count; j += 2)
      for (int r = 0; r < padded_width; r += 2 * kLanes) {
        Derivative results[2][2];
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) {
          const int lane = r + n % 2 * kLanes;
          const bool exists = kWhole || (j + n / 2 < count && lane < width);
          results[n / 2][n % 2] = exists ? derivative(j + n / 2, lane) : Derivative{zero(), zero()};
        }
#pragma GCC unroll 2
        for (int key = 0; key < 2; ++key) {
          store_numbers(results[key][0].weight, results[key][1].weight, weights + (j + key) * kRows + r);
          store_numbers(results[key][0].gradient, results[key][1].gradient, slopes + (j + key) * kRows + r);
        }
#pragma GCC unroll 2
        for (int n = 0; n < 2; ++n)
          store(pairs + j / 2 * kRows + r + n * kLanes, narrow_pairs(results[0][n].gradient, results[1][n].gradient));
      }
    for (int64_t j = round_up(count, 2); j < round_up(count, kPairTile); j += 2)
      for (int r = 0; r < kRows; r += kLanes) {  // 2 rows of numbers, and 1 of pairs
        store(reinterpret_cast<float*>(weights + j * kRows) + r, zero());
        store(reinterpret_cast<float*>(slopes + j * kRows) + r, zero());
        store(pairs + j / 2 * kRows + r, zero());
      }
  }

  const uint16_t* block_of(int64_t key) const { return packed_ + key / kPairTile * shape_.block_size(); }

  const Problem& p_;
  PackedShape shape_;
  const RowBlock* block_ = nullptr;
  const uint16_t* packed_ = nullptr;
  float factor_[kRows];
  int64_t width_ = 0;
  uint32_t *queries_, *query_pairs_, *upstream_, *upstream_pairs_, *slope_pairs_;
  uint16_t *upstream_rows_, *weights_, *slopes_;
  float *query_sums_, *room_;
  PairRegisters registers_;
};

}  // namespace headwise::HEADWISE_ISA
