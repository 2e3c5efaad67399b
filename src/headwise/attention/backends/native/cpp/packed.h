// Copies of the keys and values of one key/value head as left factors of products of pairs, made once for each call.
#pragma once
#include "pairs.h"

namespace headwise::HEADWISE_ISA {

// The copies, in blocks of 32 keys, filled up with zeros. For the forward pass: the keys as rows `(32, features)`, then
// the values transposed, `(features, 32)`. For the backward pass: keys and values as rows, then the keys transposed.
struct PackedShape {
  int64_t head_dim, value_dim, blocks;
  bool for_gradients;
  explicit PackedShape(const Problem& p)
      : head_dim(round_up(p.head_dim, kPairTile)),
        value_dim(round_up(p.value_dim, kPairTile)),
        blocks(round_up(p.keys, kKeys) / kPairTile),
        for_gradients(p.gradients != nullptr) {}
  int64_t block_size() const { return kPairTile * (head_dim + value_dim + (for_gradients ? head_dim : 0)); }
  int64_t size() const { return blocks * block_size(); }
};

// The 32 rows of a block, of which `count` exist.
struct PackedRows {
  const uint16_t* data;
  int64_t row, count, size;  // numbers from row to row, rows, and numbers in a row
  const uint16_t* at(int64_t j) const { return data + j * row; }
};

// Copy rows to `to (32 x features)`; return its end.
inline uint16_t* pack_rows(const PackedRows& rows, int64_t features, uint16_t* to) {
  for (int64_t j = 0; j < kPairTile; ++j, to += features) {
    const int64_t size = j < rows.count ? rows.size : 0;
    if (size > 0) __builtin_memcpy(to, rows.at(j), size_t(size) * 2);
    for (int64_t d = size; d < features; ++d) to[d] = 0;
  }
  return to;
}

// Copy rows, transposed, to `to (features x 32)`; return its end. `room` has space for 16 x features floats.
inline uint16_t* pack_columns(const PackedRows& rows, int64_t features, uint16_t* to, float* room) {
  uint32_t* pair = reinterpret_cast<uint32_t*>(room);
  for (int64_t j = 0; j < kPairTile; j += 2, pair += features) {
    for (int64_t d = 0; d < features; ++d) pair[d] = 0;
    if (j < rows.count)
      for (int64_t d = 0; d < rows.size; ++d) pair[d] = rows.at(j)[d];
    if (j + 1 < rows.count)
      for (int64_t d = 0; d < rows.size; ++d) pair[d] |= uint32_t(rows.at(j + 1)[d]) << 16;
  }
  transpose(room, features, kPairTile / 2, features, reinterpret_cast<float*>(to), kPairTile / 2);
  return to + kPairTile * features;
}

// Pack one block of 32 keys and values. `room` has space for 16 rows of keys or values.
inline void pack_block(const Problem& p, int64_t batch, int64_t kv_head, int64_t index, uint16_t* to, float* room) {
  const PackedShape shape(p);
  const int64_t first = index * kPairTile, count = smaller(kPairTile, larger(p.keys - first, 0));
  const auto rows = [&](const void* data, const Strides& strides, int64_t size) {
    const uint16_t* from = row_of(static_cast<const uint16_t*>(data), strides, batch, kv_head, first);
    return PackedRows{from, strides.row, count, size};
  };
  const PackedRows keys = rows(p.k, p.k_strides, p.head_dim), values = rows(p.v, p.v_strides, p.value_dim);
  to = pack_rows(keys, shape.head_dim, to);
  if (shape.for_gradients) pack_columns(keys, shape.head_dim, pack_rows(values, shape.value_dim, to), room);
  else pack_columns(values, shape.value_dim, to, room);
}

}  // namespace headwise::HEADWISE_ISA
