// Products of the forward pass in bfloat16: keys are left factors as rows, values transposed, and powers become pairs
// of keys.
#pragma once
#include "packed.h"
#include "softmax.h"

namespace headwise::HEADWISE_ISA {

// Products of a block with packed keys and values.
template <class Element>
class PairProducts {
 public:
  static constexpr int kDegree = 4;
  static constexpr int kAlignment = kPairTile;  // tiles begin at a multiple of it

  PairProducts(const Problem& p, const RowBlock& block, Arena& arena) : shape_(p), block_(block) {
    const int64_t widest = larger(shape_.head_dim, larger(shape_.value_dim, kKeys));
    room_ = arena.take<float>(kRows * widest);
    queries_ = arena.take<uint32_t>(shape_.head_dim / 2 * kRows);
    powers_ = arena.take<uint32_t>(kKeys / 2 * kRows);
    packed_ = static_cast<const uint16_t*>(p.packed) +
              (block.batch * p.kv_heads + block.kv_head - p.first_packed) * shape_.size();
    width_ = round_up(block.rows, kPairTile);
    for (int r = 0; r < kRows; ++r) factor_[r] = p.scale[block.head[r]] * kLog2E;
    uint16_t* rows = reinterpret_cast<uint16_t*>(room_);
    copy_rows(block, p.q, p.q_strides, p.head_dim, width_, shape_.head_dim, rows);
    feature_pairs(rows, width_, shape_.head_dim, queries_);
  }

  float* room() { return room_; }
  const float* factor() const { return factor_; }
  bool adds_to_bias() const { return false; }  // the factor follows the product

  // scores (keys x kRows) = K Q^T, or the numbers that `scores` has and it.
  template <bool kAdd>
  void scores(KeyRange keys, float* scores) const {
    for (int64_t key = keys.begin; key < keys.end; key += kPairTile)
      multiply_pairs<kAdd>({block_of(key), shape_.head_dim, kPairTile}, kPairTile, {queries_, kRows}, width_,
                           shape_.head_dim, scores + (key - keys.begin) * kRows, kRows);
  }

  // output (value_dim x kRows) = V^T powers, or output + it. The powers are overwritten unless they are kept.
  void add_values(KeyRange keys, float* powers, bool keeps_powers, float* output, bool add) {
    uint32_t* pairs = keeps_powers ? powers_ : reinterpret_cast<uint32_t*>(powers);
    const int64_t count = keys.end - keys.begin, depth = round_up(count, kPairTile);
    for (int64_t j = 0; j < depth; j += 2)
      for (int r = 0; r < width_; r += kLanes) {
        const float* from = powers + j * kRows + r;
        const Floats first = j < count ? load(from) : zero(), second = j + 1 < count ? load(from + kRows) : zero();
        store(reinterpret_cast<float*>(pairs + j / 2 * kRows + r), narrow_pairs(first, second));
      }
    const auto product = add ? multiply_pairs<true> : multiply_pairs<false>;
    const uint16_t* values = block_of(keys.begin) + kPairTile * shape_.head_dim;
    product({values, kPairTile, shape_.block_size()}, shape_.value_dim, {pairs, kRows}, width_, depth, output, kRows);
  }

 private:
  const uint16_t* block_of(int64_t key) const { return packed_ + key / kPairTile * shape_.block_size(); }

  PackedShape shape_;
  const RowBlock& block_;
  const uint16_t* packed_;
  float factor_[kRows];
  float* room_;
  uint32_t *queries_, *powers_;
  int64_t width_;
  PairRegisters registers_;
};

}  // namespace headwise::HEADWISE_ISA
