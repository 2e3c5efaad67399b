// A block of query rows that share a key/value head, and the memory in which it is computed.
#pragma once
#include "problem.h"
#include "products.h"

namespace headwise::HEADWISE_ISA {

constexpr int kRows = 64;  // rows of a block: lanes of the vectors
#ifdef HEADWISE_PAIRS
constexpr int kKeys = 128;  // keys of a tile
#else
constexpr int kKeys = 96;  // keys of a tile: its scores and the queries of a block fit a first-level cache of 48 KB
#endif

// The query rows of one block. With few queries, rows of several heads of a group are stacked (Ainslie et al. 2023,
// grouped-query attention), so that keys are read once for all of them.
struct RowBlock {
  int64_t batch, kv_head;
  int rows;   // rows in use
  int width;  // rows, rounded up to whole vectors
  int32_t head[kRows], query[kRows];
};

inline int64_t group_size(const Problem& p) { return p.heads / p.kv_heads; }
inline bool stacks_heads(const Problem& p) { return p.queries < kRows; }

// Number of blocks of each key/value head.
inline int64_t blocks_per_kv_head(const Problem& p) {
  if (stacks_heads(p)) return (group_size(p) * p.queries + kRows - 1) / kRows;
  return group_size(p) * ((p.queries + kRows - 1) / kRows);
}

// True if the forward pass multiplies pairs of bfloat16 numbers, for which keys and values are copied. Copies for the
// matrix unit are always worth their time; without it, only if several blocks read them.
inline bool forward_has_pairs([[maybe_unused]] const Problem& p) {
#if defined(__AMX_BF16__)
  return p.bfloat16;
#elif defined(HEADWISE_PAIRS)
  return p.bfloat16 && blocks_per_kv_head(p) > 1;
#else
  return false;
#endif
}

// The block with an index. Blocks of the last queries come first: under a causal mask these take longest.
inline RowBlock row_block(const Problem& p, int64_t index) {
  const int64_t blocks = blocks_per_kv_head(p), unit = index / blocks;
  RowBlock block{unit / p.kv_heads, unit % p.kv_heads, 0, 0, {}, {}};
  const int64_t rest = blocks - 1 - index % blocks, length = stacks_heads(p) ? group_size(p) * p.queries : p.queries;
  const int64_t per_length = (length + kRows - 1) / kRows, start = rest % per_length * kRows;
  const int64_t first_head = block.kv_head * group_size(p) + rest / per_length;
  block.rows = int(smaller(kRows, length - start));
  block.width = int(round_up(block.rows, kLanes));
  int32_t head = int32_t(first_head + start / p.queries), query = int32_t(start % p.queries);
  for (int r = 0; r < kRows; ++r) {
    block.head[r] = head, block.query[r] = query;
    if (r >= block.rows - 1) continue;  // lanes without a row repeat the last one
    if (++query == p.queries) ++head, query = 0;
  }
  return block;
}

// Index of a row of a block in arrays `(batch, heads, queries)`.
inline int64_t flat_index(const Problem& p, const RowBlock& block, int r) {
  return (block.batch * p.heads + block.head[r]) * p.queries + block.query[r];
}

// Divides a piece of memory into aligned arrays.
class Arena {
 public:
  explicit Arena(void* memory) : next_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(int64_t count) {
    T* array = reinterpret_cast<T*>(next_);
    next_ += round_up(count * int64_t(sizeof(T)), 64);
    return array;
  }
  int64_t used_since(void* memory) const { return next_ - static_cast<char*>(memory); }

 private:
  char* next_;
};

inline float widen(float x) { return x; }
inline float widen(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  __builtin_memcpy(&y, &bits, sizeof y);
  return y;
}

// Round to bfloat16, to the nearest even number.
inline void narrow(float x, uint16_t* to) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  *to = uint16_t(x == x ? rounded : 0x7fc0);
}
inline void narrow(float x, float* to) { *to = x; }

// Element (b, h, row, 0) of a tensor.
template <class T>
inline T* row_of(T* data, const Strides& s, int64_t batch, int64_t head, int64_t row) {
  return data + batch * s.batch + head * s.head + row * s.row;
}

// Rows of K or V as floats: in place, or converted into `room`.
inline LeftMatrix as_floats(const float* rows, int64_t stride, int64_t, int64_t, float*) { return {rows, stride, 1}; }
inline LeftMatrix as_floats(const uint16_t* rows, int64_t stride, int64_t count, int64_t width, float* room) {
  for (int64_t j = 0; j < count; ++j) {
    const uint16_t* from = rows + j * stride;
    float* to = room + j * width;
    int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes) store(to + d, load(from + d));
    for (; d < width; ++d) to[d] = widen(from[d]);
  }
  return {room, width, 1};
}

// Transpose rows of a block, times one factor for each row, into lanes: `to (width x kRows)`. Factors in double
// precision are worth their time where they belong to all numbers of a row: one rounding of a factor would be an error
// of all of them in the same direction.
template <class T, class Factor>
inline void rows_to_lanes(const RowBlock& block, const T* data, const Strides& strides, int64_t width,
                          const Factor* factor, float* room, float* to) {
  const int64_t padded = round_up(width, kLanes);
  for (int r = 0; r < block.width; ++r) {
    const T* from = row_of(data, strides, block.batch, block.head[r], block.query[r]);
    float* row = room + r * padded;
    for (int64_t d = 0; d < width; ++d) row[d] = r < block.rows ? float(widen(from[d]) * factor[r]) : 0.0f;
    for (int64_t d = width; d < padded; ++d) row[d] = 0.0f;
  }
  transpose(room, padded, block.width, padded, to, kRows);
}

// Write lanes `from (width x kRows)` to the rows of a tensor.
template <class T>
inline void lanes_to_rows(const RowBlock& block, const float* from, int64_t width, float* room, T* data,
                          const Strides& strides) {
  const int64_t padded = round_up(width, kLanes);
  transpose(from, kRows, padded, block.width, room, padded);
  for (int r = 0; r < block.rows; ++r) {
    T* to = row_of(data, strides, block.batch, block.head[r], block.query[r]);
    const float* row = room + r * padded;
    for (int64_t d = 0; d < width; ++d) narrow(row[d], to + d);
  }
}

}  // namespace headwise::HEADWISE_ISA
