// The gradient of a bias: the gradients `A_ij (D_ij dO_i . V_j - delta_i + g_i)` of the scores, without scale, added up
// along the axes on which the bias repeats. The symbols are those of backward.h.
//
// This is a pass of its own, which computes the weights once more. A task owns some elements of the gradient: those of
// 64 queries, or of some keys if the bias repeats along the queries. It computes all tiles of all sequences and heads
// to which these elements were added, always in the same order. So no thread needs the sums of another one, and the
// whole matrix is written only if the bias has it.
#pragma once
#include "backward.h"

namespace headwise::HEADWISE_ISA {

constexpr int64_t kBiasKeys = 4 * kKeys;  // keys of a task if the bias repeats along the queries

inline bool has_bias_rows(const Problem& p) { return p.gradients->bias_queries > 1; }
inline bool has_bias_keys(const Problem& p) { return p.gradients->bias_keys > 1; }

// Number of tasks for each sequence and head of the bias.
inline int64_t bias_parts(const Problem& p) {
  if (has_bias_rows(p)) return (p.queries + kRows - 1) / kRows;
  return has_bias_keys(p) ? (p.keys + kBiasKeys - 1) / kBiasKeys : 1;
}
inline int64_t bias_tasks(const Problem& p) {
  return p.gradients->bias_batch * p.gradients->bias_heads * bias_parts(p);
}

// Rows of one head, from query `start` on.
inline RowBlock block_of_head(const Problem& p, int64_t batch, int64_t head, int64_t start) {
  RowBlock block{batch, head / group_size(p), int(smaller(kRows, p.queries - start)), 0, {}, {}};
  block.width = int(round_up(block.rows, kLanes));
  for (int r = 0; r < kRows; ++r)
    block.head[r] = int32_t(head), block.query[r] = int32_t(start + smaller(r, block.rows - 1));
  return block;
}

// True if the blocks of rows of one head are blocks of the forward pass.
inline bool are_of_forward(const Problem& p) { return group_size(p) == 1 || !stacks_heads(p); }

// Number of blocks of rows whose numbers are computed before the tasks: where several tasks compute the same rows, each
// for some keys. Delta, and the normalizers of few rows, need all keys.
inline int64_t blocks_of_head(const Problem& p) { return (p.queries + kRows - 1) / kRows; }
inline int64_t bias_row_blocks(const Problem& p) {
  return has_bias_rows(p) || bias_parts(p) == 1 ? 0 : p.batch * p.heads * blocks_of_head(p);
}

template <class Element>
inline void write_bias_rows(const Problem& p, int64_t index, void* memory) {
  const int64_t matrix = index / blocks_of_head(p), start = index % blocks_of_head(p) * kRows;
  const RowBlock block = block_of_head(p, matrix / p.heads, matrix % p.heads, start);
  Arena arena(memory);
  GradientTiles<FloatGradientProducts, Element> tiles(p, arena);
  tiles.start(block, Visibility(p, block), are_of_forward(p));
  tiles.save(block, p.gradients->bias_rows);
}

template <class Element>
class BiasTask {
 public:
  BiasTask(const Problem& p, int64_t task, void* memory)
      : p_(p), g_(*p.gradients), arena_(memory), tiles_(p, arena_), sums_(arena_.take<double>(kBiasKeys)) {
    room_ = arena_.take<float>(kRows * round_up(kKeys, kLanes));
    const int64_t part = task % bias_parts(p), owner = task / bias_parts(p);
    batch_ = owner / g_.bias_heads, head_ = owner % g_.bias_heads;
    rows_ = {0, p.queries}, keys_ = {0, p.keys};
    if (has_bias_rows(p)) rows_ = {part * kRows, smaller((part + 1) * kRows, p.queries)};
    else if (has_bias_keys(p)) keys_ = {part * kBiasKeys, smaller((part + 1) * kBiasKeys, p.keys)};
  }
  static int64_t memory(const Problem& p) {
    return Tiles::memory(p) + 8 * kBiasKeys + 4 * kRows * round_up(kKeys, kLanes);
  }

  void run() {
    const int64_t count = has_bias_rows(p_) ? kRows : kBiasKeys;
    for (int64_t n = 0; n < count; ++n) sums_[n] = 0.0;
    const KeyRange batches = g_.bias_batch > 1 ? KeyRange{batch_, batch_ + 1} : KeyRange{0, p_.batch};
    const KeyRange heads = g_.bias_heads > 1 ? KeyRange{head_, head_ + 1} : KeyRange{0, p_.heads};
    for (int64_t batch = batches.begin; batch < batches.end; ++batch)
      for (int64_t head = heads.begin; head < heads.end; ++head)
        for (int64_t start = rows_.begin; start < rows_.end; start += kRows) {
          const RowBlock block = block_of_head(p_, batch, head, start);
          if (!has_bias_keys(p_)) add_rows(block);
          else if (p_.dropout > 0) add_block<true>(block);
          else add_block<false>(block);
        }
    if (has_bias_rows(p_) && has_bias_keys(p_)) return;
    const KeyRange owned = has_bias_rows(p_) ? rows_ : has_bias_keys(p_) ? keys_ : KeyRange{0, 1};
    for (int64_t n = owned.begin; n < owned.end; ++n)
      g_.bias[matrix() * (has_bias_rows(p_) ? p_.queries : g_.bias_keys) + n] = float(sums_[n - owned.begin]);
  }

 private:
  using Tiles = GradientTiles<FloatGradientProducts, Element>;

  int64_t matrix() const { return batch_ * g_.bias_heads + head_; }

  template <bool kDropout>
  void add_block(const RowBlock& block) {
    const Visibility visibility(p_, block);
    if (visibility.visible(keys_).empty()) return;
    if (g_.bias_rows) tiles_.start(block, g_.bias_rows);
    else tiles_.start(block, visibility, are_of_forward(p_));
    float ones[kRows];
    for (float& one : ones) one = 1.0f;
    tiles_.visit(block, visibility, keys_, [&](const GradientTile& tile) {
      auto derivative = tiles_.template derivative<false, kDropout>(tile);
      derivative.scale = ones;  // the bias is added to the scores after the scale
      float* gradients = tile.weight_gradients;
      for (int64_t j = 0; j < tile.keys.end - tile.keys.begin; ++j)
        for (int r = 0; r < block.width; r += kLanes) store(gradients + j * kRows + r, derivative(j, r).gradient);
      if (has_bias_rows(p_)) add_elements(block, tile.keys, gradients);
      else add_sums_of_keys(block, tile.keys, gradients);
    });
  }

  // The gradient of a bias that repeats along the keys. With a_i the weight of the sink,
  //
  //     sum_j A_ij (D_ij dO_i . V_j - delta_i + g_i) = a_i delta_i + (1 - a_i) g_i
  //
  // The terms of the sum on the left cancel, unless delta has a rounding error.
  void add_rows(const RowBlock& block) {
    const Visibility visibility(p_, block);
    tiles_.start(block, visibility, are_of_forward(p_), false);
    float deltas[kRows] = {}, weights[kRows] = {};
    tiles_.visit(block, visibility, {0, p_.keys}, [&](const GradientTile& tile) {
      Tiles::add_products(block, tile, deltas);
      if (g_.lse_gradient) Tiles::add_weights(block, tile, weights);
    });
    for (int r = 0; r < block.rows; ++r) {
      const double of_lse = g_.lse_gradient ? g_.lse_gradient[flat_index(p_, block, r)] : 0.0f;
      sums_[has_bias_rows(p_) ? r : 0] += tiles_.sink_weight(block, r) * deltas[r] + of_lse * weights[r];
    }
  }

  void add_elements(const RowBlock& block, KeyRange keys, const float* gradients) {
    const int64_t count = keys.end - keys.begin, padded = round_up(count, kLanes);
    transpose(gradients, kRows, padded, block.width, room_, padded);
    for (int r = 0; r < block.rows; ++r) {
      float* to = g_.bias + (matrix() * p_.queries + block.query[r]) * p_.keys + keys.begin;
      for (int64_t j = 0; j < count; ++j) to[j] += room_[r * padded + j];
    }
  }

  // Sums over rows, for each key.
  void add_sums_of_keys(const RowBlock& block, KeyRange keys, const float* gradients) {
    for (int64_t key = keys.begin; key < keys.end; ++key) {
      Floats total = zero();
      for (int r = 0; r < block.width; r += kLanes) total = total + load(gradients + (key - keys.begin) * kRows + r);
      sums_[key - keys_.begin] += sum(total);
    }
  }

  const Problem& p_;
  const Gradients& g_;
  Arena arena_;
  Tiles tiles_;
  double* sums_;  // in double precision: they have as many terms as the bias has copies
  float* room_;
  int64_t batch_, head_;
  KeyRange rows_, keys_;
};

}  // namespace headwise::HEADWISE_ISA
