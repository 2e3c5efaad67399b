// The backward pass: weights are computed again from the log-sum-exp, tile by tile (FlashAttention, Dao et al. 2022,
// appendix B).
//
// With S the scores, A the weights, dO and g the gradients of the output and the log-sum-exp,
//
//     dV_j = sum_i A_ij dO_i     dS_ij = A_ij (dO_i . V_j - delta_i)     delta_i = dO_i . O_i - g_i
//     dQ_i = scale sum_j dS_ij K_j     dK_j = scale sum_i dS_ij Q_i
//
// A task computes some row blocks of one key/value head, and adds up the gradients of its keys and values in sums of
// its own. Row blocks are divided among tasks by the sizes of the call, not by the number of threads, and the sums of
// tasks are added in order: the result does not depend on threads.
#pragma once
#include "products.h"
#include "softmax.h"

namespace headwise::HEADWISE_ISA {

constexpr int64_t kTasksWanted = 8;
constexpr int64_t kMostPartialBytes = int64_t(128) << 20;

inline int64_t padded(int64_t width) { return round_up(width, kLanes); }

// Floats of the sums of gradients of keys and values in one task: `(keys, head_dim)`, then `(keys, value_dim)`, with
// rows of whole vectors.
inline int64_t partial_floats(const Problem& p) { return p.keys * (padded(p.head_dim) + padded(p.value_dim)); }

// Number of tasks for each key/value head.
inline int64_t backward_splits(const Problem& p) {
  const int64_t units = p.batch * p.kv_heads, wanted = (kTasksWanted + units - 1) / units;
  const int64_t affordable = larger(kMostPartialBytes / (4 * partial_floats(p) * units + 1), 1);
  return smaller(smaller(wanted, affordable), blocks_per_kv_head(p));
}

// Rows of a block, times one factor for each: `to (kRows x padded width)`, zeros in lanes without a row.
template <class T>
inline void block_rows(const RowBlock& block, const T* data, const Strides& strides, int64_t width,
                       const float* factor, float* to) {
  for (int r = 0; r < kRows; ++r) {
    const T* from = row_of(data, strides, block.batch, block.head[r], block.query[r]);
    float* row = to + r * padded(width);
    for (int64_t d = 0; d < padded(width); ++d)
      row[d] = r < block.rows && d < width ? widen(from[d]) * factor[r] : 0.0f;
  }
}

template <class Element>
class BackwardTask {
 public:
  BackwardTask(const Problem& p, const Gradients& gradients, void* memory) : p_(p), g_(gradients) {
    Arena arena(memory);
    const int64_t widest = round_up(larger(p.head_dim, larger(p.value_dim, kKeys)), kLanes);
    float** const tiles[] = {&powers_, &slopes_, &dense_, &scores_gradient_};
    for (float** tile : tiles) *tile = arena.take<float>(kKeys * kRows);
    float** const blocks[] = {&queries_, &query_rows_, &upstream_, &upstream_rows_, &query_gradient_, &room_};
    for (float** block : blocks) *block = arena.take<float>(widest * kRows);
    keys_ = arena.take<float>(kKeys * p.head_dim);
    values_ = arena.take<float>(kKeys * p.value_dim);
  }

  static int64_t memory(const Problem& p) {
    const int64_t widest = round_up(larger(p.head_dim, larger(p.value_dim, kKeys)), kLanes);
    return 4 * (4 * kKeys * kRows + 6 * widest * kRows + 2 * kKeys * widest) + 4096;
  }

  // Compute the row blocks of one task, and add to `partial`, the task's sums of gradients of keys and values.
  void run(int64_t unit, int64_t split, int64_t splits, float* partial) {
    const int64_t blocks = blocks_per_kv_head(p_);
    key_gradient_ = partial, value_gradient_ = partial + p_.keys * padded(p_.head_dim);
    for (int64_t index = split; index < blocks; index += splits) run_block(row_block(p_, unit * blocks + index));
  }

 private:
  void run_block(const RowBlock& block) {
    start_block(block);
    const Visibility visibility(p_, block);
    bool started = false;
    for (KeyRange keys = visibility.next_tile(0, 1); !keys.empty(); keys = visibility.next_tile(keys.end, 1)) {
      if (has_dense_part(p_) && !dense_tile(p_, block, visibility, keys, room_, dense_)) continue;
      run_tile(block, visibility, keys, started);
      started = true;
    }
    for (int64_t d = 0; d < p_.head_dim; ++d)
      for (int r = 0; r < block.width; r += kLanes) {
        float* at = query_gradient_ + d * kRows + r;
        store(at, started ? load(at) * load(scale_ + r) : zero());
      }
    lanes_to_rows(block, query_gradient_, p_.head_dim, room_, static_cast<Element*>(g_.q), g_.q_strides);
  }

  // Prepare queries, the gradient of the output, the log-sum-exp in units of ln 2 and delta.
  void start_block(const RowBlock& block) {
    float ones[kRows], log2_scale[kRows];
    for (int r = 0; r < kRows; ++r) {
      ones[r] = 1.0f, scale_[r] = p_.scale[block.head[r]], log2_scale[r] = scale_[r] * kLog2E;
      const int64_t index = flat_index(p_, block, r);
      const double lse = (double(g_.lse[index]) + g_.lse_rest[index]) * 1.44269504088896341;
      const bool is_empty = g_.lse[index] == kHidden;
      lse_[r] = is_empty ? -kHidden : float(lse);  // an infinite sum makes all weights of the row 0
      lse_rest_[r] = is_empty ? 0.0f : float(lse - lse_[r]);
    }
    const Element* q = static_cast<const Element*>(p_.q);
    rows_to_lanes(block, q, p_.q_strides, p_.head_dim, log2_scale, room_, queries_);
    block_rows(block, q, p_.q_strides, p_.head_dim, scale_, query_rows_);
    const Element* upstream = static_cast<const Element*>(g_.out);
    rows_to_lanes(block, upstream, g_.out_strides, p_.value_dim, ones, room_, upstream_);
    block_rows(block, upstream, g_.out_strides, p_.value_dim, ones, upstream_rows_);
    for (int r = 0; r < kRows; ++r) {
      const Element* out =
          row_of(static_cast<const Element*>(p_.out), p_.out_strides, block.batch, block.head[r], block.query[r]);
      const float* row = upstream_rows_ + r * padded(p_.value_dim);
      // In the order of the products dO . V, which delta cancels in a row in which one key has all weight.
      float product = 0.0f;
      for (int64_t d = 0; d < p_.value_dim; ++d) product += row[d] * widen(out[d]);
      delta_[r] = product - (g_.lse_gradient ? g_.lse_gradient[flat_index(p_, block, r)] : 0.0f);
      if (lse_[r] == -kHidden) delta_[r] = 0.0f;  // the gradient of an infinite log-sum-exp counts for nothing
    }
  }

  void run_tile(const RowBlock& block, const Visibility& visibility, KeyRange keys, bool started) {
    const int64_t count = keys.end - keys.begin;
    const LeftMatrix key_rows = rows_of(p_.k, p_.k_strides, block, keys, p_.head_dim, keys_);
    const LeftMatrix value_rows = rows_of(p_.v, p_.v_strides, block, keys, p_.value_dim, values_);
    multiply<false>(key_rows, count, queries_, kRows, p_.head_dim, powers_, kRows, block.width);
    if (p_.softcap > 0) {
      cap_scores(p_, block, count, powers_);
      write_slopes(block, count);
    }
    if (has_dense_part(p_)) add_tile(block, count, dense_, powers_);
    else hide_outside_ranges(visibility, block, keys, powers_);
    multiply<false>(value_rows, count, upstream_, kRows, p_.value_dim, scores_gradient_, kRows, block.width);
    differentiate_softmax(block, count);

    const int64_t head_dim = padded(p_.head_dim), value_dim = padded(p_.value_dim);
    multiply<true>({powers_, kRows, 1}, count, upstream_rows_, value_dim, block.rows,
                   value_gradient_ + keys.begin * value_dim, value_dim, value_dim);
    multiply<true>({scores_gradient_, kRows, 1}, count, query_rows_, head_dim, block.rows,
                   key_gradient_ + keys.begin * head_dim, head_dim, head_dim);
    const LeftMatrix key_columns{key_rows.data, key_rows.column, key_rows.row};
    const auto product = started ? multiply<true> : multiply<false>;
    product(key_columns, p_.head_dim, scores_gradient_, kRows, count, query_gradient_, kRows, block.width);
  }

  // Turn scores into weights, and gradients of weights into gradients of scores.
  void differentiate_softmax(const RowBlock& block, int64_t count) {
    for (int64_t j = 0; j < count; ++j)
      for (int r = 0; r < block.width; r += kLanes) {
        const int64_t at = j * kRows + r;
        const Floats weight = exp2<6>(load(powers_ + at) - load(lse_ + r) - load(lse_rest_ + r));
        Floats gradient = weight * (load(scores_gradient_ + at) - load(delta_ + r));
        if (p_.softcap > 0) gradient = gradient * load(slopes_ + at);
        store(powers_ + at, weight);
        store(scores_gradient_ + at, gradient);
      }
  }

  // Derivative of `c tanh(s / c)`, from its value.
  void write_slopes(const RowBlock& block, int64_t count) {
    const Floats inverse = all(1.0f / (p_.softcap * kLog2E));
    for (int64_t j = 0; j < count; ++j)
      for (int r = 0; r < block.width; r += kLanes) {
        const Floats ratio = load(powers_ + j * kRows + r) * inverse;
        store(slopes_ + j * kRows + r, all(1.0f) - ratio * ratio);
      }
  }

  LeftMatrix rows_of(const void* data, const Strides& strides, const RowBlock& block, KeyRange keys, int64_t width,
                     float* room) const {
    const Element* rows = row_of(static_cast<const Element*>(data), strides, block.batch, block.kv_head, keys.begin);
    return as_floats(rows, strides.row, keys.end - keys.begin, width, room);
  }

  const Problem& p_;
  const Gradients& g_;
  float *powers_, *slopes_, *dense_, *scores_gradient_;
  float *queries_, *query_rows_, *upstream_, *upstream_rows_, *query_gradient_, *room_, *keys_, *values_;
  float *key_gradient_, *value_gradient_;
  float scale_[kRows], lse_[kRows], lse_rest_[kRows], delta_[kRows];
};

// Add the sums of all tasks of a key/value head in order, and write the gradients of some of its keys and values.
template <class Element>
inline void reduce_partials(const Problem& p, const Gradients& g, int64_t unit, KeyRange keys, const float* partials,
                            int64_t splits) {
  const int64_t batch = unit / p.kv_heads, head = unit % p.kv_heads, size = partial_floats(p);
  const auto write = [&](const float* from, int64_t width, void* data, const Strides& strides) {
    for (int64_t key = keys.begin; key < keys.end; ++key) {
      Element* to = row_of(static_cast<Element*>(data), strides, batch, head, key);
      for (int64_t d = 0; d < width; ++d) {
        float sum = 0.0f;
        for (int64_t split = 0; split < splits; ++split) sum += from[split * size + key * padded(width) + d];
        narrow(sum, to + d);
      }
    }
  };
  write(partials, p.head_dim, g.k, g.k_strides);
  write(partials + p.keys * padded(p.head_dim), p.value_dim, g.v, g.v_strides);
}

}  // namespace headwise::HEADWISE_ISA
