// Statistics of the attention weights of a block, from the powers of each tile while they are in cache.
//
// Sums over the keys of a row are carried along like the output. Sums over the rows of a key need the final divisor of
// each row, so the powers of all tiles of the block are kept until the end.
#pragma once
#include "softmax.h"

namespace headwise::HEADWISE_ISA {

// A tile whose powers are kept: its keys, its place in the kept powers, and the shifts that they are relative to.
struct KeptTile {
  KeyRange keys;
  const float* powers;
  float shift[kRows];
};

class StatisticsOfBlock {
 public:
  StatisticsOfBlock(const Problem& p, const RowBlock& block, const Visibility& visibility, Arena* arena)
      : p_(p), s_(p.statistics), block_(block), visibility_(visibility) {
    if (!arena) return;  // no statistics are asked for
    tiles_ = arena->take<KeptTile>(tile_capacity(p));
    is_token_of_block_ = arena->take<uint8_t>(s_->token_count + 1);
    positions_ = arena->take<float>(kRows);
    away_ = arena->take<float>(kRows);
    indices_ = arena->take<float>(2 * kRows);
    tokens_ = arena->take<int32_t>(kRows);
    seen_ = arena->take<int32_t>(p.keys + 1);
    visible_ = arena->take<float>(kRows);
    first_position_ = first_of_first_ = INT32_MAX, last_position_ = last_of_first_ = INT32_MIN;
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = block.batch * p.queries + block.query[r];
      position_[r] = s_->positions[at], first_key_[r] = s_->first_key[at];
      positions_[r] = float(position_[r]);
      first_position_ = smaller(first_position_, position_[r]);
      last_position_ = larger(last_position_, position_[r]);
      first_of_first_ = smaller(first_of_first_, first_key_[r]);
      last_of_first_ = larger(last_of_first_, first_key_[r]);
      visible_[r] = 0.0f;
    }
    if (s_->key_tokens) mark_tokens();
    seen_keys_ = visibility.visible({0, p.keys});
    for (int64_t j = seen_keys_.begin; j <= seen_keys_.end; ++j) seen_[j] = 0;
  }

  static int64_t tile_capacity(const Problem& p) { return p.keys / kKeys + 2; }

  bool is_counted(int r) const {
    return r < block_.rows && (!s_->counted || s_->counted[block_.batch * p_.queries + block_.query[r]]);
  }

  // Arguments of `softmax_tile` for the distances of a tile.
  const float* start_tile(KeyRange keys) {
    is_before_ = keys.end - 1 <= first_position_;
    is_after_ = keys.begin >= last_position_;
    for (int r = 0; r < kRows; ++r) away_[r] = positions_[r] - float(keys.begin);
    return is_before_ || is_after_ ? nullptr : away_;
  }
  float* indices() { return indices_; }

  // Raise the largest score of each row before the softcap. `dense` is the tile's dense mask and bias, or null.
  void raise_uncapped(SoftmaxState& state, KeyRange keys, const float* dense, float* scores) const {
    if (!dense) hide_outside_ranges(visibility_, block_, keys, scores);
    for (int r = 0; r < block_.width; r += kLanes) {
      Floats top = load(state.top_uncapped + r);
      for (int64_t at = r; at < (keys.end - keys.begin) * kRows; at += kRows) {
        const Floats score = load(scores + at);
        top = larger(dense ? select(greater(load(dense + at), all(kHidden)), score, all(kHidden)) : score, top);
      }
      store(state.top_uncapped + r, top);
    }
  }

  // Add the powers of a tile to the sums of the rows. `dense` is the tile's dense mask and bias, or null.
  void add_tile(SoftmaxState& state, KeyRange keys, const float* powers, const float* dense) {
    add_distances(state);
    add_single_keys(state, keys, powers);
    for (int64_t key = keys.begin; s_->special && key < keys.end; ++key)
      if (s_->special[block_.batch * p_.keys + key])
        add_row(state.sums[kPowerSpecial], powers + (key - keys.begin) * kRows);
    if (s_->special) raise_content(state, keys, powers);
    if (s_->key_tokens) add_copies(state, keys, powers);
    if (dense) count_dense(keys, dense);
    KeptTile& tile = tiles_[tile_count_++];
    tile.keys = keys, tile.powers = powers;
    __builtin_memcpy(tile.shift, state.shift, sizeof tile.shift);
  }

  // Write the results of the block. `squares` has the squared norms of the output before and after the output
  // projection.
  void finish(const SoftmaxState& state, const Divisors& divisors, const float (&squares)[2][kRows]) {
    float largest[kRows];
    for (int r = 0; r < block_.width; r += kLanes)
      store(largest + r, exp2<6>(load(state.top + r) - load(state.shift + r)) * load(divisors.inverse + r));
    const int64_t plane = p_.batch * p_.heads * p_.queries;
    for (int r = 0; r < block_.rows; ++r) {
      float* to = s_->rows + flat_index(p_, block_, r);
      const double inverse = divisors.inverse[r], total = state.sums[kPowers][r] * inverse;
      const double entropy = total * divisors.log2[r] - state.sums[kPowerScores][r] * inverse;
      to[kEntropy * plane] = entropy < 0 ? 0.0f : float(entropy * double(kLn2));
      to[kLargest * plane] = largest[r];
      for (int n = kPowerDistances; n < kPowerSums; ++n)
        to[(n - kPowerDistances + kDistance) * plane] = float(state.sums[n][r] * inverse);
      to[kMaxLogit * plane] = state.top[r] == kNoScore ? kNoScore : float(state.top[r] * kLn2Exact);
      to[kMaxLogitUncapped * plane] = float(state.top_uncapped[r] * kLn2Exact);
      to[kOutputNorm * plane] = __builtin_sqrtf(squares[0][r]);
      to[kWrittenNorm * plane] = squares[1][r] > 0 ? __builtin_sqrtf(squares[1][r]) : squares[1][r] * 0.0f;
      to[kVisibleKeys * plane] = float(visible_keys(r));
    }
    for (int first = 0, last; first < block_.rows; first = last) {  // the rows of one head
      last = end_of_head(first);
      add_received(state, divisors, first, last);
      if (!has_dense_part(p_)) add_seen(first, last);
    }
  }

 private:
  void mark_tokens() {
    for (int64_t t = 0; t <= s_->token_count; ++t) is_token_of_block_[t] = 0;
    for (int r = 0; r < kRows; ++r) {
      tokens_[r] = s_->query_tokens[block_.batch * p_.queries + block_.query[r]];
      if (tokens_[r] >= 0) is_token_of_block_[tokens_[r]] = 1;
    }
  }

  // End of the rows with the head of row `first`.
  int end_of_head(int first) const {
    int last = first + 1;
    while (last < block_.rows && block_.head[last] == block_.head[first]) ++last;
    return last;
  }

  void add_row(float* sums, const float* row) const {
    for (int r = 0; r < block_.width; r += kLanes) store(sums + r, load(sums + r) + load(row + r));
  }

  // Raise the largest power of each row on keys that are not special tokens.
  void raise_content(SoftmaxState& state, KeyRange keys, const float* powers) const {
    const uint8_t* special = s_->special + block_.batch * p_.keys;
    float* top = state.sums[kLargestContentPower];
    for (int64_t begin = keys.begin, end; begin < keys.end; begin = end) {
      while (begin < keys.end && special[begin]) ++begin;
      for (end = begin; end < keys.end && !special[end];) ++end;
      for (int r = 0; r < block_.width; r += kLanes) {
        Floats largest = load(top + r);
        for (int64_t key = begin; key < end; ++key)
          largest = larger(load(powers + (key - keys.begin) * kRows + r), largest);
        store(top + r, largest);
      }
    }
  }

  // Add the powers of earlier copies of each row's token, and of the keys after them. Only keys whose token is that of
  // some row are compared with the rows.
  void add_copies(SoftmaxState& state, KeyRange keys, const float* powers) {
    const int32_t* tokens = s_->key_tokens + block_.batch * p_.keys;
    int64_t copies[kKeys + 1];  // keys whose token is one of the block; the first may be before the tile
    int count = 0;
    for (int64_t key = larger(keys.begin - 1, 0); key < keys.end; ++key) {
      copies[count] = key;
      count += is_token_of_block_[tokens[key]];
    }
    for (int r = 0; r < block_.width; r += kLanes) {
      const Ints row_tokens = load(tokens_ + r);
      const Floats position = load(positions_ + r);
      Floats duplicate = load(state.sums[kPowerDuplicate] + r), induction = load(state.sums[kPowerInduction] + r);
      for (int n = 0; n < count; ++n) {
        const int64_t key = copies[n];
        const float* row = powers + (key - keys.begin) * kRows + r;
        const Mask is_copy = both(equal(row_tokens, all(tokens[key])), greater(position, all(float(key))));
        if (key >= keys.begin) duplicate = select(is_copy, duplicate + load(row), duplicate);
        if (key + 1 < keys.end) induction = select(is_copy, induction + load(row + kRows), induction);
      }
      store(state.sums[kPowerDuplicate] + r, duplicate);
      store(state.sums[kPowerInduction] + r, induction);
    }
  }

  void add_distances(SoftmaxState& state) const {
    for (int r = 0; r < block_.width; r += kLanes) {
      Floats sum = load(indices_ + r);
      if (is_before_ || is_after_) {
        sum = load(away_ + r) * load(indices_ + kRows + r) - sum;
        if (!is_before_) sum = zero() - sum;
      }
      store(state.sums[kPowerDistances] + r, load(state.sums[kPowerDistances] + r) + sum);
    }
  }

  // Read the powers of single keys: the row's own, the previous, the next and the first.
  void add_single_keys(SoftmaxState& state, KeyRange keys, const float* powers) const {
    const auto add = [&](PowerSum sum, int r, int64_t key) {
      if (key >= keys.begin && key < keys.end) state.sums[sum][r] += powers[(key - keys.begin) * kRows + r];
    };
    const bool has_first = last_of_first_ >= keys.begin && first_of_first_ < keys.end;
    if (!has_first && (keys.end <= first_position_ - 1 || keys.begin > last_position_ + 1)) return;
    for (int r = 0; r < block_.rows; ++r) {
      add(kPowerSelf, r, position_[r]);
      add(kPowerPrevious, r, position_[r] - 1);
      add(kPowerNext, r, position_[r] + 1);
      add(kPowerFirst, r, first_key_[r]);
    }
  }

  // Count the visible keys of each row, and the counted rows that may attend to each key, under a dense mask.
  void count_dense(KeyRange keys, const float* dense) {
    for (int first = 0, last; first < block_.rows; first = last) {
      last = end_of_head(first);
      float is_row[kRows], is_counted_row[kRows];
      for (int r = 0; r < kRows; ++r) {
        is_row[r] = r >= first && r < last ? 1.0f : 0.0f;
        is_counted_row[r] = is_counted(r) ? is_row[r] : 0.0f;
      }
      int32_t* to = s_->seen_by + (block_.batch * p_.heads + block_.head[first]) * p_.keys;
      for (int64_t key = keys.begin; key < keys.end; ++key) {
        Floats seen = zero();
        for (int r = 0; r < block_.width; r += kLanes) {
          const Mask is_visible = greater(load(dense + (key - keys.begin) * kRows + r), all(kHidden));
          store(visible_ + r, load(visible_ + r) + select(is_visible, load(is_row + r), zero()));
          seen = seen + select(is_visible, load(is_counted_row + r), zero());
        }
        add_integer(to + key, int32_t(sum(seen)));
      }
    }
  }

  int64_t visible_keys(int r) const {
    if (has_dense_part(p_)) return int64_t(visible_[r]);
    int64_t total = 0;
    for (int n = 0; n < visibility_.count; ++n) total += visibility_.length[n][r];
    return total;
  }

  // Add up the weights on each key in the rows of one head: powers times 2^(shift of the tile - last shift) / divisor.
  void add_received(const SoftmaxState& state, const Divisors& divisors, int first, int last) const {
    float inverse[kRows], factor[kRows];
    for (int r = 0; r < kRows; ++r) inverse[r] = r >= first && r < last && is_counted(r) ? divisors.inverse[r] : 0.0f;
    const int64_t head = block_.batch * p_.heads + block_.head[first];
    const int from = first / kLanes * kLanes;
    for (int64_t t = 0; t < tile_count_; ++t) {
      const KeptTile& tile = tiles_[t];
      for (int r = from; r < last; r += kLanes)
        store(factor + r, exp2<6>(load(tile.shift + r) - load(state.shift + r)) * load(inverse + r));
      float sums[kKeys + kLanes];
      const int64_t count = tile.keys.end - tile.keys.begin;
      for (int64_t j = 0; j < count; j += kLanes) {
        Floats columns[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const float* row = tile.powers + smaller(j + i, count - 1) * kRows;
          columns[i] = zero();
          for (int r = from; r < last; r += kLanes)
            columns[i] = multiply_add(load(row + r), load(factor + r), columns[i]);
        }
        store(sums + j, sums_of_vectors(columns));
      }
      add_sums(head, tile.keys, sums);
    }
  }

  // Add column sums as fixed-point numbers, while no other thread adds to the same head.
  void add_sums(int64_t head, KeyRange keys, const float* sums) const {
    int64_t* to = s_->received + head * p_.keys + keys.begin;
    while (__atomic_test_and_set(s_->locks + head, __ATOMIC_ACQUIRE)) {
    }
    for (int64_t j = 0; j < keys.end - keys.begin; ++j) to[j] += int64_t(sums[j] * float(int64_t(1) << kReceivedBits));
    __atomic_clear(s_->locks + head, __ATOMIC_RELEASE);
  }

  template <class T>
  static void add_integer(T* to, T value) {
    __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
  }

  // Add the number of counted rows of one head that may attend to each key, from the differences of the numbers of
  // neighbouring keys: +1 where the range of a row begins, -1 where it ends.
  void add_seen(int first, int last) {
    int32_t* to = s_->seen_by + (block_.batch * p_.heads + block_.head[first]) * p_.keys;
    for (int r = first; r < last; ++r)
      for (int n = 0; is_counted(r) && n < visibility_.count; ++n) {
        const int32_t begin = visibility_.begin[n][r], length = visibility_.length[n][r];
        if (length > 0) ++seen_[begin], --seen_[begin + length];
      }
    int32_t total = 0;
    for (int64_t key = seen_keys_.begin; key < seen_keys_.end; ++key) {
      total += seen_[key];
      seen_[key] = 0;
      if (total) add_integer(to + key, total);
    }
    seen_[seen_keys_.end] = 0;
  }

  const Problem& p_;
  const Statistics* s_;
  const RowBlock& block_;
  const Visibility& visibility_;
  KeptTile* tiles_;
  int64_t tile_count_ = 0;
  uint8_t* is_token_of_block_;
  float *positions_, *away_, *indices_ = nullptr;
  float* visible_;
  int32_t *tokens_, *seen_;
  KeyRange seen_keys_;
  int32_t position_[kRows], first_key_[kRows];
  int64_t first_position_, last_position_, first_of_first_, last_of_first_;
  bool is_before_ = false, is_after_ = false;
};

}  // namespace headwise::HEADWISE_ISA
