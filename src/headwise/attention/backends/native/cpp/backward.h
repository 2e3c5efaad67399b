// The backward pass: weights are computed again from the normalizers of rows, tile by tile (FlashAttention, Dao et al. 2022,
// appendix B).
//
// With S the scores, A the weights, dO and g the gradients of the output and the log-sum-exp,
//
//     dV_j = sum_i A_ij dO_i     dS_ij = A_ij (dO_i . V_j - delta_i + g_i)     delta_i = dO_i . O_i
//     dQ_i = scale sum_j dS_ij K_j     dK_j = scale sum_i dS_ij Q_i
//
// A task computes some row blocks of one key/value head, and adds up the gradients of its keys and values in sums of
// its own. Row blocks are divided among tasks by the sizes of the call, not by the number of threads, and the sums of
// tasks are added in order: the result does not depend on threads.
#pragma once
#include "few_rows.h"
#include "gradient_products.h"
#ifdef __AVX512BF16__
#include "gradient_pairs.h"
#endif

namespace headwise::HEADWISE_ISA {

constexpr int64_t kTasksWanted = 8;
constexpr int64_t kMostPartialBytes = int64_t(128) << 20;

// Widths and numbers of keys in the sums of gradients, for all kinds of products.
#ifdef __AVX512BF16__
inline int64_t padded(const Problem& p, int64_t width) { return round_up(width, p.bfloat16 ? kPairTile : kLanes); }
inline int64_t padded_keys(const Problem& p) { return round_up(p.keys, kPairTile); }
#else
inline int64_t padded(const Problem&, int64_t width) { return round_up(width, kLanes); }
inline int64_t padded_keys(const Problem& p) { return p.keys; }
#endif

// Floats of the sums of gradients of keys and values in one task: `(keys, head_dim)`, then `(keys, value_dim)`, with
// rows of whole vectors.
inline int64_t partial_floats(const Problem& p) {
  return padded_keys(p) * (padded(p, p.head_dim) + padded(p, p.value_dim));
}

// Number of tasks for each key/value head.
inline int64_t backward_splits(const Problem& p) {
  const int64_t units = p.batch * p.kv_heads, wanted = (kTasksWanted + units - 1) / units;
  const int64_t affordable = larger(kMostPartialBytes / (4 * partial_floats(p) * units + 1), 1);
  return smaller(smaller(wanted, affordable), blocks_per_kv_head(p));
}

// The weights of a block of rows and their gradients, tile by tile.
template <template <class> class Products, class Element>
class BackwardBlock {
 public:
  static constexpr int kTileKeys = Products<Element>::kTileKeys;

  BackwardBlock(const Problem& p, Arena& arena) : p_(p), products_(p, arena) {
    float** const tiles[] = {&scores_, &slopes_, &dense_, &weight_gradients_};
    for (float** tile : tiles) *tile = arena.take<float>(kTileKeys * kRows);
  }
  static int64_t memory(const Problem& p) { return Products<Element>::memory(p) + 16 * kTileKeys * kRows + 4096; }

  // Add the gradients of keys and values to `key_sums (keys x padded head_dim)` and `value_sums`, and write those of
  // the queries.
  void run(const RowBlock& block, float* key_sums, float* value_sums) {
    start(block);
    const Visibility visibility(p_, block);
    if (has_few_rows(p_)) normalize_again(block, visibility);
    bool started = false;
    for (KeyRange keys = first_tile(visibility); !keys.empty(); keys = next_tile(visibility, keys)) {
      if (has_dense_part(p_) && !dense_tile(p_, block, visibility, keys, products_.room(), dense_)) continue;
      compute_scores(block, visibility, keys);
      products_.weight_gradients(keys, weight_gradients_);
      products_.add(keys, [this](int64_t j, int r) { return derivative(j, r); }, scores_, weight_gradients_, started,
                    key_sums + keys.begin * padded(p_, p_.head_dim), value_sums + keys.begin * padded(p_, p_.value_dim));
      started = true;
    }
    float* sums = products_.query_sums();
    for (int64_t n = 0; !started && n < p_.head_dim * kRows; ++n) sums[n] = 0.0f;
    lanes_to_rows(block, sums, p_.head_dim, products_.room(), static_cast<Element*>(p_.gradients->q),
                  p_.gradients->q_strides);
  }

 private:
  static KeyRange first_tile(const Visibility& visibility) {
    return visibility.next_tile(0, Products<Element>::kAlignment, kTileKeys);
  }
  static KeyRange next_tile(const Visibility& visibility, KeyRange keys) {
    constexpr int kAlignment = Products<Element>::kAlignment;
    return visibility.next_tile(round_up(keys.end, kAlignment), kAlignment, kTileKeys);
  }

  // Prepare the factors of products, the normalizers of the rows, and delta.
  void start(const RowBlock& block) {
    products_.start(block);
    products_.output_products(delta_);
    const Gradients& g = *p_.gradients;
    for (int r = 0; r < kRows; ++r) {
      scale_[r] = p_.scale[block.head[r]];
      const int64_t index = flat_index(p_, block, r);
      shift_[r] = g.normalizers[2 * index];
      inverse_[r] = r < block.rows ? g.normalizers[2 * index + 1] : 0.0f;
      lse_gradient_[r] = g.lse_gradient ? g.lse_gradient[index] : 0.0f;
    }
    const float* factor = products_.factor();
    scales_late_ = factor && p_.softcap == 0 && !has_dense_part(p_) && all_positive(factor);
    for (int r = 0; r < kRows; ++r) factor_[r] = scales_late_ ? factor[r] : 1.0f;
  }

  // Compute the normalizers from the scores of this pass. A forward pass over few rows adds up its products in another
  // order, and a weight of a large score has the error of that score.
  void normalize_again(const RowBlock& block, const Visibility& visibility) {
    SoftmaxState state;
    start_softmax(state);
    for (KeyRange keys = first_tile(visibility); !keys.empty(); keys = next_tile(visibility, keys)) {
      if (has_dense_part(p_) && !dense_tile(p_, block, visibility, keys, products_.room(), dense_)) continue;
      compute_scores(block, visibility, keys);
      softmax_tile<false, Products<Element>::kDegree>(block, state, keys.end - keys.begin,
                                                      scales_late_ ? factor_ : nullptr, scores_, nullptr, 0, nullptr,
                                                      nullptr);
    }
    const Divisors divisors(p_, block, state);
    for (int r = 0; r < kRows; ++r) {
      shift_[r] = state.shift[r];
      inverse_[r] = r < block.rows ? divisors.inverse[r] : 0.0f;
    }
  }

  // Compute the masked scores of a tile.
  void compute_scores(const RowBlock& block, const Visibility& visibility, KeyRange keys) {
    const int64_t count = keys.end - keys.begin;
    products_.scores(keys, scores_);
    if (products_.factor() && !scales_late_) scale_scores(block, count, products_.factor(), scores_);
    if (p_.softcap > 0) {
      cap_scores(p_, block, count, scores_);
      write_slopes(block, count);
    }
    if (has_dense_part(p_)) add_tile(block, count, dense_, scores_);
    else hide_outside_ranges(visibility, block, keys, scores_);
  }

  // The weights of the rows from `r` on for key j of the tile, and the gradients of their scores times the scale.
  Derivative derivative(int64_t j, int r) const {
    const int64_t at = j * kRows + r;
    const Floats score = multiply_subtract(load(scores_ + at), load(factor_ + r), load(shift_ + r));
    const Floats weight = exp2<Products<Element>::kDegree>(score) * load(inverse_ + r);
    const Floats slope = load(weight_gradients_ + at) - load(delta_ + r) + load(lse_gradient_ + r);
    const Floats gradient = weight * load(scale_ + r) * slope;
    return {weight, p_.softcap > 0 ? gradient * load(slopes_ + at) : gradient};
  }

  // Derivative of `c tanh(s / c)`, from its value.
  void write_slopes(const RowBlock& block, int64_t count) {
    const Floats inverse = all(1.0f / (p_.softcap * kLog2E));
    for (int64_t j = 0; j < count; ++j)
      for (int r = 0; r < block.width; r += kLanes) {
        const Floats ratio = load(scores_ + j * kRows + r) * inverse;
        store(slopes_ + j * kRows + r, all(1.0f) - ratio * ratio);
      }
  }

  const Problem& p_;
  Products<Element> products_;
  bool scales_late_;  // scores are multiplied by the scale where the weights are computed
  float *scores_, *slopes_, *dense_, *weight_gradients_;
  float factor_[kRows], scale_[kRows], shift_[kRows], inverse_[kRows], lse_gradient_[kRows], delta_[kRows];
};

// Compute the row blocks of one task, and add to `partial`, the task's sums of gradients of keys and values.
template <template <class> class Products, class Element>
inline void backward_task(const Problem& p, int64_t unit, int64_t split, int64_t splits, float* partial,
                          void* memory) {
  Arena arena(memory);
  BackwardBlock<Products, Element> rows(p, arena);
  for (int64_t n = 0; n < partial_floats(p); ++n) partial[n] = 0.0f;
  const int64_t blocks = blocks_per_kv_head(p);
  float* value_sums = partial + padded_keys(p) * padded(p, p.head_dim);
  for (int64_t index = split; index < blocks; index += splits)
    rows.run(row_block(p, unit * blocks + index), partial, value_sums);
}

// Add the sums of all tasks of a key/value head in order, and write the gradients of some of its keys and values.
template <class Element>
inline void reduce_partials(const Problem& p, int64_t unit, KeyRange keys, const float* partials, int64_t splits) {
  const int64_t batch = unit / p.kv_heads, head = unit % p.kv_heads, size = partial_floats(p);
  const auto write = [&](const float* from, int64_t width, void* data, const Strides& strides) {
    for (int64_t key = keys.begin; key < keys.end; ++key) {
      Element* to = row_of(static_cast<Element*>(data), strides, batch, head, key);
      for (int64_t d = 0; d < width; ++d) {
        float sum = 0.0f;
        for (int64_t split = 0; split < splits; ++split) sum += from[split * size + key * padded(p, width) + d];
        narrow(sum, to + d);
      }
    }
  };
  const Gradients& g = *p.gradients;
  write(partials, p.head_dim, g.k, g.k_strides);
  write(partials + padded_keys(p) * padded(p, p.head_dim), p.value_dim, g.v, g.v_strides);
}

}  // namespace headwise::HEADWISE_ISA
