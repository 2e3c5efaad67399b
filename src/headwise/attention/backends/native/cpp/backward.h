// The backward pass: weights are computed again from the normalizers of rows, tile by tile (FlashAttention, Dao et al.
// 2022, appendix B).
//
// With S the scores, A the weights, dO and g the gradients of the output and the log-sum-exp,
//
//     dV_j = sum_i D_ij A_ij dO_i     dS_ij = A_ij (D_ij dO_i . V_j - delta_i + g_i)     delta_i = dO_i . O_i
//     dQ_i = scale sum_j dS_ij K_j     dK_j = scale sum_i dS_ij Q_i
//
// with D the factors of dropout: 0 at weights that are dropped, and 1 / (1 - probability) at the others.
//
// A task computes a run of row blocks of one key/value head, and adds up the gradients of the keys and values that
// these rows may attend to in sums of its own. Row blocks are divided among tasks by the sizes and the mask of the
// call, not by the number of threads, and the sums of tasks are added in order: the result does not depend on threads.
#pragma once
#include "dropout.h"
#include "few_rows.h"
#include "gradient_products.h"
#ifdef HEADWISE_PAIRS
#include "gradient_pairs.h"
#endif

namespace headwise::HEADWISE_ISA {

// Numbers of a row in the sums of gradients, for all kinds of products, and the multiple of keys in these sums.
#ifdef HEADWISE_PAIRS
inline int64_t padded(const Problem& p, int64_t width) { return round_up(width, p.bfloat16 ? kPairTile : kLanes); }
inline int64_t key_step(const Problem& p) { return p.bfloat16 ? kPairTile : 1; }
#else
inline int64_t padded(const Problem&, int64_t width) { return round_up(width, kLanes); }
inline int64_t key_step(const Problem&) { return 1; }
#endif

// Floats of the sums of gradients for each key: those of the key, and those of the value.
inline int64_t floats_per_key(const Problem& p) { return padded(p, p.head_dim) + padded(p, p.value_dim); }

// The smallest range of keys that has all keys that some row of a block may attend to, in whole steps.
inline KeyRange keys_of_block(const Problem& p, int64_t index) {
  KeyRange keys{0, p.keys};
  if (p.ranges) keys = Visibility(p, row_block(p, index)).visible(keys);
  if (keys.empty()) return {0, 0};
  return {keys.begin / key_step(p) * key_step(p), round_up(keys.end, key_step(p))};
}

constexpr int kKeptTiles = 4;

// A tile of the weights of a block of rows: matrices `(keys, kRows)`.
struct GradientTile {
  KeyRange keys;
  float *weights, *weight_gradients;  // the latter times the factors of dropout
  float* slopes;                      // derivative of the softcap
  Mask* kept;                         // by dropout, `(keys, kRows / kLanes)`

  GradientTile part(KeyRange within) const {
    const KeyRange rest = intersection(keys, within);
    const int64_t offset = (rest.begin - keys.begin) * kRows;
    return {rest, weights + offset, weight_gradients + offset, slopes + offset, kept + offset / kLanes};
  }
};

// The weights of a block of rows and their gradients, tile by tile.
//
// Delta can be computed as dO . O, or as the mean of the gradients of the weights, sum_j A_ij D_ij dO_i . V_j. Where a
// row attends to few keys, it is subtracted from numbers that nearly equal it. The first form then leaves the rounding
// errors of O, which nothing cancels, and the second one those of the gradients, most of which cancel. So the second
// form is used where all keys of a block are in `kKeptTiles` tiles, which are computed once, and kept until they are
// differentiated. It is also used for few rows, which are cheap to compute twice. Gradients that are proportional to
// delta, those of sinks and of a bias that repeats along the keys, always have the second form, since the rounding
// error of O would be theirs.
template <template <class> class Products, class Element>
class GradientTiles {
 public:
  static constexpr int kTileKeys = Products<Element>::kTileKeys;

  GradientTiles(const Problem& p, Arena& arena) : p_(p), products_(p, arena) {
    for (GradientTile& tile : tiles_) {
      float** const matrices[] = {&tile.weights, &tile.weight_gradients, &tile.slopes};
      for (float** matrix : matrices) *matrix = arena.take<float>(kTileKeys * kRows);
      tile.kept = arena.take<Mask>(kTileKeys * kRows / kLanes);
    }
    dense_ = arena.take<float>(kTileKeys * kRows);
  }
  static int64_t memory(const Problem& p) {
    return Products<Element>::memory(p) + 4 * (4 * kKeptTiles + 1) * kTileKeys * kRows + 4096;
  }

  // Prepare the factors of products, the normalizers of the rows, and delta. `is_of_forward`: the block is one of the
  // blocks of the forward pass. Without `needs_delta`, delta is computed only where it costs nothing.
  void start(const RowBlock& block, const Visibility& visibility, bool is_of_forward, bool needs_delta = true) {
    start_products(block);
    keeps_tiles_ = fit_in_tiles(visibility);
    const bool has_same_products = Products<Element>::kHasPairs == forward_has_pairs(p_);
    if (has_few_rows(p_) || !is_of_forward || (keeps_tiles_ && !has_same_products)) normalize_again(block, visibility);
    has_exact_delta_ = keeps_tiles_ || (has_few_rows(p_) && needs_delta);
    if (has_exact_delta_) sum_delta(block, visibility);
    else if (needs_delta) products_.output_products(delta_);
  }

  // The same from the numbers that `save` wrote for these rows. No tile is kept.
  void start(const RowBlock& block, const float* rows) {
    start_products(block);
    keeps_tiles_ = has_exact_delta_ = false;
    for (int r = 0; r < block.rows; ++r) {
      const float* row = rows + kBiasRowNumbers * flat_index(p_, block, r);
      shift_[r] = row[0], inverse_[r] = row[1], delta_[r] = row[2];
    }
  }
  void save(const RowBlock& block, float* rows) const {
    for (int r = 0; r < block.rows; ++r) {
      float* row = rows + kBiasRowNumbers * flat_index(p_, block, r);
      row[0] = shift_[r], row[1] = inverse_[r], row[2] = delta_[r];
    }
  }

  // Call `use(tile)` for each tile of the keys `within` that some row may attend to.
  template <class Use>
  void visit(const RowBlock& block, const Visibility& visibility, KeyRange within, const Use& use) {
    if (!keeps_tiles_) return visit_weights(block, visibility, within, use);
    for (const GradientTile* tile = tiles_; tile < tile_; ++tile) {
      const GradientTile part = tile->part(within);
      if (!part.keys.empty()) use(part);
    }
  }

  template <bool kSoftcap, bool kDropout>
  Differentiation<kSoftcap, kDropout> derivative(const GradientTile& tile) const {
    const float kept_factor = float(dropout_factor(p_));
    return {tile.weights, tile.weight_gradients, tile.slopes, lse_gradient_, scale_, delta_, tile.kept, kept_factor};
  }
  Products<Element>& products() { return products_; }

  // Weight of the sink of row `r`; 0 in a row without a key.
  double sink_weight(const RowBlock& block, int r) const {
    if (inverse_[r] == 0.0f) return 0.0;
    const double sink = sink_of(p_, block.head[r]);
    if (inverse_[r] <= kLeastInverse && sink > double(kHidden)) return 1.0;
    return __builtin_exp2(sink - shift_[r] + __builtin_log2(double(inverse_[r])));
  }

  // Delta, if it was computed from all weights and their gradients; otherwise null.
  const float* exact_delta() const { return has_exact_delta_ ? delta_ : nullptr; }

  // Add to `sums` the products of the weights and their gradients.
  static void add_products(const RowBlock& block, const GradientTile& tile, float* sums) {
    for_sums(block, tile, sums, [&](int64_t at, Floats sum) {
      return multiply_add(load(tile.weights + at), load(tile.weight_gradients + at), sum);
    });
  }
  static void add_weights(const RowBlock& block, const GradientTile& tile, float* sums) {
    for_sums(block, tile, sums, [&](int64_t at, Floats sum) { return load(tile.weights + at) + sum; });
  }

 private:
  static constexpr int kAlignment = Products<Element>::kAlignment;
  static constexpr float kLeastInverse = 1e-30f;  // where it is less, the keys have no weight next to the sink

  void start_products(const RowBlock& block) {
    products_.start(block);
    const Gradients& g = *p_.gradients;
    for (int r = 0; r < kRows; ++r) {
      scale_[r] = p_.scale[block.head[r]];
      const int64_t index = flat_index(p_, block, r);
      // In lanes without a row, all weights are 0.
      shift_[r] = r < block.rows ? g.normalizers[2 * index] : -kHidden;
      inverse_[r] = r < block.rows ? g.normalizers[2 * index + 1] : 0.0f;
      lse_gradient_[r] = g.lse_gradient ? g.lse_gradient[index] : 0.0f;
      delta_[r] = 0.0f;
    }
    const float* factor = products_.factor();
    scales_late_ = factor && p_.softcap == 0 && !has_dense_part(p_) && all_positive(factor);
    for (int r = 0; r < kRows; ++r) factor_[r] = scales_late_ ? factor[r] : 1.0f;
    tile_ = tiles_;
  }

  // True if all keys that some row may attend to are in `kKeptTiles` tiles.
  static bool fit_in_tiles(const Visibility& visibility) {
    int64_t next = 0;
    for (int n = 0; n <= kKeptTiles; ++n) {
      const KeyRange keys = visibility.next_tile(next, kAlignment, kTileKeys);
      if (keys.empty()) return true;
      next = round_up(keys.end, kAlignment);
    }
    return false;
  }

  // Compute the normalizers from the scores of this pass. A forward pass over few rows, over rows in other lanes, or in
  // another kind of products adds up its products in another order, and a weight of a large score has the error of that
  // score. Tiles that are kept have scores afterwards.
  void normalize_again(const RowBlock& block, const Visibility& visibility) {
    SoftmaxState state;
    start_softmax(state);
    visit_scores(block, visibility, {0, p_.keys}, [&] {
      const int64_t count = tile_->keys.end - tile_->keys.begin;
      float* const powers = tile_->weight_gradients;
      __builtin_memcpy(powers, tile_->weights, size_t(count * kRows) * sizeof(float));
      softmax_tile<false, Products<Element>::kDegree>(block, state, count, scales_late_ ? factor_ : nullptr, powers,
                                                      nullptr, 0, nullptr, nullptr);
      if (keeps_tiles_) ++tile_;
    });
    const Divisors divisors(p_, block, state);
    for (int r = 0; r < block.rows; ++r) shift_[r] = state.shift[r], inverse_[r] = divisors.inverse[r];
  }

  // Compute delta from the weights and their gradients.
  void sum_delta(const RowBlock& block, const Visibility& visibility) {
    const Dropout dropout(p_, block);
    for (GradientTile* tile = tiles_; tile < tile_; ++tile) {  // tiles that have scores already
      write_weights(block, dropout, *tile);
      add_products(block, *tile, delta_);
    }
    if (tile_ > tiles_) return;
    visit_weights(block, visibility, {0, p_.keys}, [&](const GradientTile& tile) {
      add_products(block, tile, delta_);
      if (keeps_tiles_) ++tile_;
    });
  }

  // Sum up numbers of a tile for each row: `add(at, sum)` returns the sum and the number at a place of the tile. Sums
  // of four are shorter than those of plain attention, which has a lane for every eighth or sixteenth key.
  template <class Add>
  static void for_sums(const RowBlock& block, const GradientTile& tile, float* totals, Add add) {
    constexpr int64_t kSums = 4;
    const int64_t count = tile.keys.end - tile.keys.begin;
    for (int r = 0; r < block.width; r += kLanes)
      for (int64_t first = 0; first < count; first += kSummedPowers) {
        Floats sums[kSums] = {zero(), zero(), zero(), zero()};
        for (int64_t j = first; j < smaller(first + kSummedPowers, count); ++j)
          sums[j % kSums] = add(j * kRows + r, sums[j % kSums]);
        store(totals + r, load(totals + r) + ((sums[0] + sums[1]) + (sums[2] + sums[3])));
      }
  }

  // Compute the weights of each tile and their gradients in `*tile_`, and call `use(*tile_)`.
  template <class Use>
  void visit_weights(const RowBlock& block, const Visibility& visibility, KeyRange within, const Use& use) {
    const Dropout dropout(p_, block);
    visit_scores(block, visibility, within, [&] {
      write_weights(block, dropout, *tile_);
      use(*tile_);
    });
  }

  // Multiply the gradients of the weights by the factors of dropout. The products are stored, because the compiler
  // could fuse them with the subtraction of delta, and then numbers that must cancel would not.
  static void drop(const Dropout& dropout, const GradientTile& tile, Floats factor) {
    dropout.for_each_vector(tile.keys, [&tile, factor](int64_t at, int, Mask kept) {
      tile.kept[at / kLanes] = kept;
      float* const gradients = tile.weight_gradients + at;
      store(gradients, select(kept, load(gradients) * factor, zero()));
    });
  }

  // Replace the scores of a tile by weights, and write their gradients.
  void write_weights(const RowBlock& block, const Dropout& dropout, const GradientTile& tile) {
    const int64_t count = tile.keys.end - tile.keys.begin;
    for (int64_t j = 0; j < count; ++j)
      for (int r = 0; r < block.width; r += kLanes) {
        float* const at = tile.weights + j * kRows + r;
        const Floats score = multiply_subtract(load(at), load(factor_ + r), load(shift_ + r));
        store(at, exp2<Products<Element>::kDegree>(score) * load(inverse_ + r));
      }
    products_.weight_gradients(tile.keys, tile.weight_gradients);
    if (p_.dropout > 0) drop(dropout, tile, all(float(dropout_factor(p_))));
  }

  // Compute the masked scores of each tile in the place of its weights, and call `use()`.
  template <class Use>
  void visit_scores(const RowBlock& block, const Visibility& visibility, KeyRange within, const Use& use) {
    for (int64_t next = within.begin;;) {
      const KeyRange keys = intersection(visibility.next_tile(next, kAlignment, kTileKeys), {next, within.end});
      if (keys.empty()) return;
      next = round_up(keys.end, kAlignment);
      tile_->keys = keys;
      if (write_scores(block, visibility)) use();
    }
  }

  // The steps are those of the forward pass, so that scores have the same bits. Returns false if mask and bias hide all
  // keys of the tile.
  bool write_scores(const RowBlock& block, const Visibility& visibility) {
    const KeyRange keys = tile_->keys;
    const int64_t count = keys.end - keys.begin;
    float* const scores = tile_->weights;
    if (is_plain_bias(p_) && products_.adds_to_bias()) {
      if (!bias_tile(p_, block, keys, scores)) return false;
      products_.template scores<true>(keys, scores);
      hide_outside_ranges(visibility, block, keys, scores);
      return true;
    }
    if (has_dense_part(p_) && !dense_tile(p_, block, visibility, keys, products_.room(), dense_)) return false;
    products_.template scores<false>(keys, scores);
    const float* late_factor = scales_late_ ? nullptr : products_.factor();
    if (late_factor && (p_.softcap > 0 || !has_dense_part(p_)))
      scale_scores(block, count, late_factor, scores), late_factor = nullptr;
    if (p_.softcap > 0) cap_scores(p_, block, count, scores, tile_->slopes);
    if (has_dense_part(p_)) add_tile(block, count, late_factor, dense_, scores);
    else hide_outside_ranges(visibility, block, keys, scores);
    return true;
  }

  const Problem& p_;
  Products<Element> products_;
  bool scales_late_;  // scores are multiplied by the scale where the weights are computed
  bool keeps_tiles_, has_exact_delta_ = false;
  GradientTile tiles_[kKeptTiles], *tile_;  // the tile that is computed next: after those that are kept
  float* dense_;
  float factor_[kRows], scale_[kRows], shift_[kRows], inverse_[kRows], lse_gradient_[kRows], delta_[kRows];
};

// Add the gradients of keys and values of a block of rows to the sums of a task, `(keys, padded head_dim)` and then
// `(keys, padded value_dim)`, and write the gradients of its queries.
template <bool kSoftcap, bool kDropout, template <class> class Products, class Element>
inline void backward_block(const Problem& p, const RowBlock& block, const BackwardTask& task,
                           GradientTiles<Products, Element>& tiles) {
  const int64_t head_dim = padded(p, p.head_dim), value_dim = padded(p, p.value_dim);
  float *key_sums = task.sums, *value_sums = key_sums + (task.keys.end - task.keys.begin) * head_dim;
  Products<Element>& products = tiles.products();
  bool started = false;
  const Visibility visibility(p, block);
  tiles.start(block, visibility, true);
  float* const all_deltas = p.gradients->deltas;
  const bool sums_deltas = all_deltas && !tiles.exact_delta();
  float deltas[kRows] = {};
  tiles.visit(block, visibility, {0, p.keys}, [&](const GradientTile& tile) {
    const int64_t first = tile.keys.begin - task.keys.begin;
    if (sums_deltas) GradientTiles<Products, Element>::add_products(block, tile, deltas);
    products.add(tile.keys, tiles.template derivative<kSoftcap, kDropout>(tile), tile.weights, tile.weight_gradients,
                 started, key_sums + first * head_dim, value_sums + first * value_dim);
    started = true;
  });
  for (int r = 0; all_deltas && r < block.rows; ++r)
    all_deltas[flat_index(p, block, r)] = sums_deltas ? deltas[r] : tiles.exact_delta()[r];
  float* sums = products.query_sums();
  for (int64_t n = 0; !started && n < p.head_dim * kRows; ++n) sums[n] = 0.0f;
  lanes_to_rows(block, sums, p.head_dim, products.room(), static_cast<Element*>(p.gradients->q),
                p.gradients->q_strides);
}

// Compute the row blocks of one task.
template <template <class> class Products, class Element>
inline void backward_task(const Problem& p, const BackwardTask& task, void* memory) {
  Arena arena(memory);
  GradientTiles<Products, Element> tiles(p, arena);
  const int64_t count = (task.keys.end - task.keys.begin) * floats_per_key(p);
  for (int64_t n = 0; n < count; ++n) task.sums[n] = 0.0f;
  const auto plain =
      p.dropout > 0 ? backward_block<false, true, Products, Element> : backward_block<false, false, Products, Element>;
  const auto capped =
      p.dropout > 0 ? backward_block<true, true, Products, Element> : backward_block<true, false, Products, Element>;
  const auto run = p.softcap > 0 ? capped : plain;
  for (int64_t index = task.first; index < task.last; ++index) run(p, row_block(p, index), task, tiles);
}

constexpr int64_t kMostReduced = 64;  // numbers of a row that are added up at a time

// Add up one row of the sums of the tasks of a key/value head, in order: `width` numbers, which are `offset` floats for
// each key of the task and `key` rows of `step` numbers from the start of its sums.
template <class Element>
inline void reduce_row(const BackwardTask* tasks, int64_t count, int64_t key, int64_t offset, int64_t step,
                       int64_t width, Element* to) {
  for (int64_t first = 0; first < width; first += kMostReduced) {
    const int64_t size = smaller(width - first, kMostReduced);
    float sums[kMostReduced] = {};
    for (const BackwardTask* task = tasks; task < tasks + count; ++task) {
      if (key < task->keys.begin || key >= task->keys.end) continue;
      const int64_t keys = task->keys.end - task->keys.begin;
      const float* from = task->sums + keys * offset + (key - task->keys.begin) * step + first;
      for (int64_t d = 0; d < size; ++d) sums[d] += from[d];
    }
    for (int64_t d = 0; d < size; ++d) narrow(sums[d], to + first + d);
  }
}

// Write the gradients of some keys and values of the key/value head of some tasks.
template <class Element>
inline void reduce_keys(const Problem& p, const BackwardTask* tasks, int64_t count, int64_t unit, KeyRange keys) {
  const int64_t batch = unit / p.kv_heads, head = unit % p.kv_heads;
  const int64_t head_dim = padded(p, p.head_dim), value_dim = padded(p, p.value_dim);
  const Gradients& g = *p.gradients;
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    reduce_row(tasks, count, key, 0, head_dim, p.head_dim,
               row_of(static_cast<Element*>(g.k), g.k_strides, batch, head, key));
    reduce_row(tasks, count, key, head_dim, value_dim, p.value_dim,
               row_of(static_cast<Element*>(g.v), g.v_strides, batch, head, key));
  }
}

}  // namespace headwise::HEADWISE_ISA
