// Products in bfloat16 with sums in float32, of pairs of numbers.
//
// A product takes its left factor as rows of 32 numbers, and its right factor as rows of pairs, two neighbouring numbers
// of a column. So keys are left factors where they lie, queries become pairs of features once for each block, and values
// are copied once for each call, transposed. Powers become pairs of keys.
#pragma once
#ifdef __AMX_BF16__
#include "pairs_amx.h"
#else
#include "pairs_avx512_bf16.h"
#endif
#include "products.h"
#include "softmax.h"

namespace headwise::HEADWISE_ISA {

constexpr int kTileKeys = 32;  // numbers in a row of a left factor

// Keys and values of one key/value head as left factors, in blocks of 32 keys, filled up with zeros: the keys as rows
// `(32, features)`, then the values transposed, `(features, 32)`.
struct PackedShape {
  int64_t head_dim, value_dim, blocks;
  explicit PackedShape(const Problem& p)
      : head_dim(round_up(p.head_dim, kTileKeys)),
        value_dim(round_up(p.value_dim, kTileKeys)),
        blocks(round_up(p.keys, kKeys) / kTileKeys) {}
  int64_t block_size() const { return kTileKeys * (head_dim + value_dim); }
  int64_t size() const { return blocks * block_size(); }
};

// Pack one block of 32 keys and values. `room` has space for 16 x value_dim floats.
inline void pack_block(const Problem& p, int64_t batch, int64_t kv_head, int64_t index, uint16_t* to, float* room) {
  const PackedShape shape(p);
  const int64_t first = index * kTileKeys, count = smaller(kTileKeys, larger(p.keys - first, 0));
  const uint16_t* keys = row_of(static_cast<const uint16_t*>(p.k), p.k_strides, batch, kv_head, first);
  const uint16_t* values = row_of(static_cast<const uint16_t*>(p.v), p.v_strides, batch, kv_head, first);
  for (int64_t j = 0; j < kTileKeys; ++j)
    for (int64_t d = 0; d < shape.head_dim; ++d)
      to[j * shape.head_dim + d] = j < count && d < p.head_dim ? keys[j * p.k_strides.row + d] : 0;
  uint32_t* pairs = reinterpret_cast<uint32_t*>(room);
  for (int64_t j = 0; j < kTileKeys; j += 2) {
    const uint16_t* row = values + j * p.v_strides.row;
    uint32_t* pair = pairs + j / 2 * shape.value_dim;
    for (int64_t d = 0; d < shape.value_dim; ++d) pair[d] = 0;
    if (j < count)
      for (int64_t d = 0; d < p.value_dim; ++d) pair[d] = row[d];
    if (j + 1 < count)
      for (int64_t d = 0; d < p.value_dim; ++d) pair[d] |= uint32_t(row[p.v_strides.row + d]) << 16;
  }
  transpose(room, shape.value_dim, kTileKeys / 2, shape.value_dim,
            reinterpret_cast<float*>(to + kTileKeys * shape.head_dim), kTileKeys / 2);
}

// Products of a block with packed keys and values.
template <class Element>
class PairProducts {
 public:
  static constexpr int kDegree = 4;
  static constexpr int kAlignment = kTileKeys;  // tiles begin at a multiple of it

  PairProducts(const Problem& p, const RowBlock& block, Arena& arena) : shape_(p), block_(block) {
    const int64_t widest = larger(shape_.head_dim, larger(shape_.value_dim, kKeys));
    room_ = arena.take<float>(kRows * widest);
    queries_ = arena.take<uint32_t>(shape_.head_dim / 2 * kRows);
    powers_ = arena.take<uint32_t>(kKeys / 2 * kRows);
    packed_ = static_cast<const uint16_t*>(p.packed) +
              (block.batch * p.kv_heads + block.kv_head - p.first_packed) * shape_.size();
    width_ = round_up(block.rows, 32);
    for (int r = 0; r < kRows; ++r) factor_[r] = p.scale[block.head[r]] * kLog2E;
    for (int r = 0; r < width_; ++r) {  // a pair of features is one number of 32 bits
      uint16_t* to = reinterpret_cast<uint16_t*>(room_) + r * shape_.head_dim;
      const uint16_t* from =
          row_of(static_cast<const uint16_t*>(p.q), p.q_strides, block.batch, block.head[r], block.query[r]);
      for (int64_t d = 0; d < shape_.head_dim; ++d) to[d] = d < p.head_dim && r < block.rows ? from[d] : 0;
    }
    transpose(room_, shape_.head_dim / 2, width_, shape_.head_dim / 2, reinterpret_cast<float*>(queries_), kRows);
  }

  float* room() { return room_; }
  const float* factor() const { return factor_; }

  // scores (keys x kRows) = K Q^T.
  void scores(KeyRange keys, float* scores) const {
    for (int64_t key = keys.begin; key < keys.end; key += kTileKeys)
      for (int64_t r = 0; r < width_; r += 32)
        multiply_pairs<false>(block_of(key), shape_.head_dim, kTileKeys, queries_ + r, shape_.head_dim / kTileKeys,
                              scores + (key - keys.begin) * kRows + r);
  }

  // output (value_dim x kRows) = V^T powers, or output + it. The powers are overwritten unless they are kept.
  void add_values(KeyRange keys, float* powers, bool keeps_powers, float* output, bool add) {
    uint32_t* pairs = keeps_powers ? powers_ : reinterpret_cast<uint32_t*>(powers);
    const int64_t count = keys.end - keys.begin;
    for (int64_t j = 0; j < round_up(count, kTileKeys); j += 2)
      for (int r = 0; r < width_; r += kLanes) {
        const float* from = powers + j * kRows + r;
        const Floats first = j < count ? load(from) : zero(), second = j + 1 < count ? load(from + kRows) : zero();
        store(reinterpret_cast<float*>(pairs + j / 2 * kRows + r), narrow_pairs(first, second));
      }
    const auto product = add ? multiply_pairs<true> : multiply_pairs<false>;
    const uint16_t* values = block_of(keys.begin) + kTileKeys * shape_.head_dim;
    for (int64_t d = 0; d < shape_.value_dim; d += 32)
      for (int64_t r = 0; r < width_; r += 32)
        product(values + d * kTileKeys, kTileKeys, shape_.block_size(), pairs + r,
                round_up(count, kTileKeys) / kTileKeys, output + d * kRows + r);
  }

 private:
  const uint16_t* block_of(int64_t key) const { return packed_ + key / kTileKeys * shape_.block_size(); }

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
