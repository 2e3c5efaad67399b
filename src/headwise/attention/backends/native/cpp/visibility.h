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
      for (int r = 0; r < block.width; ++r) {
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

// True if the bias can be the initial value of the scores, to which their products are added.
inline bool is_plain_bias(const Problem& p) { return p.bias && !p.dense && !(p.softcap > 0); }

// A bias in units of ln 2. A finite bias stays finite: models write the least float where they hide a key, and a row in
// which all keys have it is not empty.
inline float bias_in_bits(float bias) {
  const float bits = bias * kLog2E;
  return bits == kHidden && bias != kHidden ? kNoScore : bits;
}
inline Floats bias_in_bits(Floats bias) {
  const Floats bits = bias * all(kLog2E);
  return select(greater(bias, all(kHidden)), larger(all(kNoScore), bits), bits);  // NaN stays NaN
}

// Call `use(elements)` with the elements of the bias, which are float32 or bfloat16.
template <class Use>
inline auto with_bias(const Problem& p, Use use) {
  return p.bias_bfloat16 ? use(static_cast<const uint16_t*>(p.bias)) : use(static_cast<const float*>(p.bias));
}

// Bits of a float, and of minus infinity. Loops over bits are vectorized, also those that look for a visible key.
inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
constexpr uint32_t kHiddenBits = 0xff800000u;

// One row of the bias, `column` elements apart, in units of ln 2. Returns true if a key is visible.
template <class Bias>
inline bool bias_row(const Bias* bias, int64_t column, int64_t count, float* to) {
  uint32_t visible = 0;
  if (column == 1)
    for (int64_t j = 0; j < count; ++j) to[j] = bias_in_bits(widen(bias[j]));
  else
    for (int64_t j = 0; j < count; ++j) to[j] = bias_in_bits(widen(bias[j * column]));
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
  if (p.bias)
    is_visible = with_bias(p, [&](const auto* elements) {
      const int64_t step = p.bias_strides.column;
      return bias_row(row_of(elements, p.bias_strides, batch, head, query) + keys.begin * step, step, count, to);
    });
  if (!p.dense) return is_visible;
  const int64_t column = p.dense_strides.column;
  const uint8_t* mask = row_of(p.dense, p.dense_strides, batch, head, query) + keys.begin * column;
  return p.bias ? mask_row<true>(mask, column, count, to) : mask_row<false>(mask, column, count, to);
}

// Pointers to the bias of the rows of a tile, at its first key.
template <class Bias>
struct BiasRows {
  const Bias* row[kRows];
  int64_t column;
  bool are_equal = true;  // all rows have the same bias

  BiasRows(const Problem& p, const RowBlock& block, KeyRange keys, const Bias* bias) : column(p.bias_strides.column) {
    for (int r = 0; r < block.width; ++r) {
      row[r] = row_of(bias, p.bias_strides, block.batch, block.head[r], block.query[r]) + keys.begin * column;
      are_equal &= row[r] == row[0];
    }
  }

  // True if the bias of every row is minus infinity at `count` keys. Nearly always the first row decides.
  bool hides(const RowBlock& block, int64_t count) const {
    for (int r = 0; r < (are_equal ? 1 : block.rows); ++r) {
      uint32_t visible = 0;
      for (int64_t j = 0; j < (column ? count : 1); ++j) visible |= bits_of(widen(row[r][j * column])) ^ kHiddenBits;
      if (visible) return false;
    }
    return true;
  }

  // The bias of `kLanes` rows at key `j`.
  Floats at_key(int r, int64_t j) const {
    float elements[kLanes];
    for (int i = 0; i < kLanes; ++i) elements[i] = widen(row[r + i][j * column]);
    return load(elements);
  }
};

// Write the bias of a tile in units of ln 2, `to (keys x kRows)`. Returns false if it hides all keys from all rows.
template <class Bias>
inline bool bias_tile(const Problem& p, const RowBlock& block, KeyRange keys, const Bias* bias, float* to) {
  const int64_t count = keys.end - keys.begin;
  const BiasRows<Bias> rows(p, block, keys, bias);
  if (rows.hides(block, count)) return false;
  if (rows.are_equal) {
    for (int64_t j = 0; j < count; ++j) {
      const Floats element = all(bias_in_bits(widen(rows.row[0][j * rows.column])));
      for (int r = 0; r < block.width; r += kLanes) store(to + j * kRows + r, element);
    }
    return true;
  }
  for (int r = 0; r < block.width; r += kLanes) {
    int64_t j = 0;
    for (; rows.column == 1 && j + kLanes <= count; j += kLanes) {
      Floats square[kLanes];
      load_transposed(rows.row + r, j, square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(to + (j + i) * kRows + r, bias_in_bits(square[i]));
    }
    for (Floats elements = zero(); j < count; ++j) {
      if (rows.column || j == 0) elements = bias_in_bits(rows.at_key(r, j));
      store(to + j * kRows + r, elements);
    }
  }
  return true;
}
inline bool bias_tile(const Problem& p, const RowBlock& block, KeyRange keys, float* to) {
  return with_bias(p, [&](const auto* bias) { return bias_tile(p, block, keys, bias, to); });
}

// Write what is added to the scores of a tile, `to (keys x kRows)`: the bias in units of ln 2, and minus infinity at
// keys hidden by mask, bias or ranges. Returns false if mask and bias hide all keys from all rows.
inline bool dense_tile(const Problem& p, const RowBlock& block, const Visibility& visibility, KeyRange keys,
                       float* room, float* to) {
  if (!p.dense) {
    if (!bias_tile(p, block, keys, to)) return false;
    hide_outside_ranges(visibility, block, keys, to);
    return true;
  }
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
