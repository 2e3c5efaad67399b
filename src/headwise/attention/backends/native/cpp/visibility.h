// Keys that the rows of a block may attend to: ranges of keys for each row, and dense masks and biases.
#pragma once
#include "block.h"

namespace headwise::HEADWISE_ISA {

constexpr int kMostRanges = 4;

inline KeyRange intersection(KeyRange a, KeyRange b) { return {larger(a.begin, b.begin), smaller(a.end, b.end)}; }

inline int range_count(const Problem& p) { return p.ranges ? p.range_count : 1; }

// Range number `n` of the keys that a query may attend to.
inline KeyRange visible_range(const Problem& p, int64_t batch, int64_t head, int64_t query, int n) {
  if (!p.ranges) return {0, p.keys};
  const int32_t* range = row_of(p.ranges, p.range_strides, batch, head, query) + 2 * n;
  const int64_t begin = larger(range[0], 0);
  return {begin, larger(smaller(range[1], p.keys), begin)};
}

// The ranges of every row of a block, and for each of them the keys that some row, or every row, may attend to.
struct Visibility {
  int count;
  int32_t begin[kMostRanges][kRows], length[kMostRanges][kRows];
  KeyRange some[kMostRanges], every[kMostRanges];

  Visibility(const Problem& p, const RowBlock& block) : count(range_count(p)) {
    for (int n = 0; n < count; ++n) {
      some[n] = {p.keys, 0}, every[n] = {0, p.keys};
      for (int r = 0; r < kRows; ++r) {
        const KeyRange range = visible_range(p, block.batch, block.head[r], block.query[r], n);
        begin[n][r] = int32_t(range.begin), length[n][r] = int32_t(range.end - range.begin);
        every[n] = intersection(every[n], range);
        if (!range.empty()) some[n] = {smaller(some[n].begin, range.begin), larger(some[n].end, range.end)};
      }
    }
  }

  // The smallest range with every key of `keys` that some row may attend to.
  KeyRange visible(KeyRange keys) const {
    KeyRange hull{keys.end, keys.begin};
    for (int n = 0; n < count; ++n) {
      const KeyRange part = intersection(some[n], keys);
      if (!part.empty()) hull = {smaller(hull.begin, part.begin), larger(hull.end, part.end)};
    }
    return hull;
  }

  // The keys of the next tile, up to `most`, from key `start` on; empty after the last. A tile begins at a multiple of
  // `alignment`.
  KeyRange next_tile(int64_t start, int64_t alignment, int64_t most = kKeys) const {
    int64_t next = INT64_MAX;
    for (int n = 0; n < count; ++n)
      if (start < some[n].end) next = smaller(next, larger(start, some[n].begin));
    if (next == INT64_MAX) return {0, 0};
    next = larger(next / alignment * alignment, start);
    return {next, visible({next, next + most}).end};
  }

  // The largest range in `keys` that every row may attend to.
  KeyRange unmasked(KeyRange keys) const {
    KeyRange best{keys.begin, keys.begin};
    for (int n = 0; n < count; ++n) {
      const KeyRange part = intersection(every[n], keys);
      if (part.end - part.begin > best.end - best.begin) best = part;
    }
    return best;
  }

  // Lanes, from lane `r` on, of the rows that may attend to a key.
  Mask sees(int64_t key, int r) const {
    Mask mask = no_lanes();
    for (int n = 0; n < count; ++n) {
      const Ints offset = subtract(all(int32_t(key)), load(begin[n] + r));  // below 0 it is a large unsigned number
      mask = either(mask, less_unsigned(offset, load(length[n] + r)));
    }
    return mask;
  }
};

// Hide the keys of a tile that are outside of the ranges of a row: `scores (keys x kRows)`, in place.
inline void hide_outside_ranges(const Visibility& visibility, const RowBlock& block, KeyRange keys, float* scores) {
  const KeyRange unmasked = visibility.unmasked(keys);
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    if (key == unmasked.begin && !unmasked.empty()) key = unmasked.end;
    if (key >= keys.end) break;
    float* row = scores + (key - keys.begin) * kRows;
    for (int r = 0; r < block.width; r += kLanes)
      store(row + r, select(visibility.sees(key, r), load(row + r), all(kHidden)));
  }
}

inline bool has_dense_part(const Problem& p) { return p.dense || p.bias; }

// A bias in units of ln 2. A finite bias stays finite: models write the least float where they hide a key, and a row in
// which all keys have it is not empty.
inline float bias_in_bits(float bias) {
  const float bits = bias * kLog2E;
  return bits == kHidden && bias != kHidden ? kNoScore : bits;
}

// Bits of a float, and of minus infinity. Loops over bits are vectorized, also those that look for a visible key.
inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
constexpr uint32_t kHiddenBits = 0xff800000u;

// One row of the bias, `column` elements apart, in units of ln 2. Returns true if a key is visible.
inline bool bias_row(const float* bias, int64_t column, int64_t count, float* to) {
  uint32_t visible = 0;
  if (column == 1)
    for (int64_t j = 0; j < count; ++j) to[j] = bias_in_bits(bias[j]);
  else
    for (int64_t j = 0; j < count; ++j) to[j] = bias_in_bits(bias[j * column]);
  for (int64_t j = 0; j < count; ++j) visible |= bits_of(to[j]) ^ kHiddenBits;
  return visible;
}

// Minus infinity at the keys of one row that the mask hides, or the bias that is in `to` already, elsewhere 0. Returns
// true if a key is visible.
template <bool kHasBias>
inline bool mask_row(const uint8_t* mask, int64_t column, int64_t count, float* to) {
  uint32_t visible = 0;
  uint32_t* bits = reinterpret_cast<uint32_t*>(to);
  const auto hide = [&](int64_t j, uint8_t sees) {
    bits[j] = sees ? (kHasBias ? bits[j] : 0u) : kHiddenBits;
    visible |= bits[j] ^ kHiddenBits;
  };
  if (column == 1)
    for (int64_t j = 0; j < count; ++j) hide(j, mask[j]);
  else
    for (int64_t j = 0; j < count; ++j) hide(j, mask[j * column]);
  return visible;
}

// One row of the dense mask and bias. Returns true if a key is visible.
inline bool dense_row(const Problem& p, int64_t batch, int64_t head, int64_t query, KeyRange keys, float* to) {
  const int64_t count = keys.end - keys.begin;
  bool is_visible = true;
  if (p.bias) {
    const float* bias = row_of(p.bias, p.bias_strides, batch, head, query) + keys.begin * p.bias_strides.column;
    is_visible = bias_row(bias, p.bias_strides.column, count, to);
  }
  if (!p.dense) return is_visible;
  const int64_t column = p.dense_strides.column;
  const uint8_t* mask = row_of(p.dense, p.dense_strides, batch, head, query) + keys.begin * column;
  return p.bias ? mask_row<true>(mask, column, count, to) : mask_row<false>(mask, column, count, to);
}

// Write what is added to the scores of a tile, `to (keys x kRows)`: the bias in units of ln 2, and minus infinity at
// keys hidden by mask, bias or ranges. Returns false if mask and bias hide all keys from all rows.
inline bool dense_tile(const Problem& p, const RowBlock& block, const Visibility& visibility, KeyRange keys,
                       float* room, float* to) {
  const int64_t padded = round_up(keys.end - keys.begin, kLanes);
  bool is_visible = false;
  for (int r = 0; r < block.width; ++r)
    is_visible |= dense_row(p, block.batch, block.head[r], block.query[r], keys, room + r * padded);
  if (!is_visible) return false;
  transpose(room, padded, block.width, padded, to, kRows);
  hide_outside_ranges(visibility, block, keys, to);
  return true;
}

}  // namespace headwise::HEADWISE_ISA
