// The online softmax of a block of rows: tiles of scores become powers of two, sums and maxima are carried along
// (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023, section 3.1).
//
// Scores are in units of ln 2. The shift of a row, a number near its largest score so far, is subtracted before the
// power is taken. It moves only if a score exceeds it by more than `kSlack`, since every move rescales the output:
// powers of up to 2^8 lose no precision.
#pragma once
#include "visibility.h"

namespace headwise::HEADWISE_ISA {

constexpr float kSlack = 8.0f;
constexpr int kSummedPowers = 16;  // summed up before they are added to other sums, since long sums lose digits

// Sums over the keys of powers times a number, for the statistics, and the largest power of the keys that are not
// special tokens; all are rescaled with the shift.
enum PowerSum {
  kPowers,
  kPowerScores,
  kPowerDistances,
  kPowerSelf,
  kPowerPrevious,
  kPowerNext,
  kPowerFirst,
  kPowerSpecial,
  kPowerDuplicate,
  kPowerInduction,
  kLargestContentPower,
  kPowerSums
};

struct SoftmaxState {
  float shift[kRows];
  float top[kRows];           // largest score
  float top_uncapped[kRows];  // the same before the softcap and without the bias, for the statistics
  float sums[kPowerSums][kRows];
  bool started;  // the output has sums that a moving shift must rescale
};

// The sum of the powers of a row, its sink included: its inverse, its logarithm to base 2, and the log-sum-exp of the
// row in nats. The first two are 0 in a row without a key.
struct Divisor {
  float inverse = 0.0f;
  double log2 = 0.0, lse;

  // `powers` is the sum without the sink, relative to `shift`. Relative to the larger one of the shift and the sink
  // logit no power overflows. Where all scores are below the range of floats in units of ln 2, and were replaced by the
  // least float, the log-sum-exp is the least float too, unless a score is NaN.
  Divisor(double shift, double powers, double sink) : lse(sink * kLn2Exact) {
    if (powers == 0) return;
    const bool has_sink = sink != double(kHidden);
    const double top = sink > shift ? sink : shift, below = has_sink ? __builtin_exp2(shift - top) : 1.0;
    const double sum = has_sink ? powers * below + __builtin_exp2(sink - top) : powers, log2_sum = __builtin_log2(sum);
    inverse = float(below / sum);
    log2 = (top - shift) + log2_sum;  // next to a large shift, the sum of all three would lose the logarithm
    lse = top == kNoScore && sum == sum ? top : (top + log2_sum) * kLn2Exact;
  }
};

// The sink logit of a head in units of ln 2; minus infinity for none.
inline double sink_of(const Problem& p, int64_t head) {
  return p.sinks ? p.sinks[head] * kLog2EExact : double(kHidden);
}

// Write the log-sum-exp of a row, and what the backward pass needs.
inline void write_normalizers(const Problem& p, int64_t index, double lse, float shift, float inverse) {
  p.lse[index] = float(lse);
  p.normalizers[2 * index] = shift, p.normalizers[2 * index + 1] = inverse;
}

// The divisors of the rows of a block.
struct Divisors {
  float inverse[kRows], scaled_inverse[kRows];  // the latter with the factor of dropout
  double log2[kRows], lse[kRows];

  Divisors(const Problem& p, const RowBlock& block, const SoftmaxState& state) {
    for (int r = 0; r < block.width; ++r) {
      const Divisor divisor(state.shift[r], state.sums[kPowers][r], sink_of(p, block.head[r]));
      inverse[r] = divisor.inverse, scaled_inverse[r] = float(divisor.inverse * dropout_factor(p));
      log2[r] = divisor.log2, lse[r] = divisor.lse;
    }
  }
};

inline void start_softmax(SoftmaxState& state) {
  for (int r = 0; r < kRows; ++r) {
    state.shift[r] = kNoScore, state.top[r] = state.top_uncapped[r] = kHidden;
    for (auto& sums : state.sums) sums[r] = 0.0f;
  }
  state.started = false;
}

inline bool all_positive(const float* factor) {
  for (int r = 0; r < kRows; ++r)
    if (!(factor[r] > 0.0f)) return false;
  return true;
}

// Scores times one factor for each row, in place.
inline void scale_scores(const RowBlock& block, int64_t keys, const float* factor, float* scores) {
  for (int64_t j = 0; j < keys; ++j)
    for (int r = 0; r < block.width; r += kLanes)
      store(scores + j * kRows + r, load(scores + j * kRows + r) * load(factor + r));
}

// `softcap tanh(score / softcap)` of every score, in place, and the derivative in `slopes` unless it is null.
inline void cap_scores(const Problem& p, const RowBlock& block, int64_t keys, float* scores, float* slopes = nullptr) {
  const Floats cap = all(p.softcap * kLog2E), inverse = all(1.0f / (p.softcap * kLog2E));
  for (int64_t j = 0; j < keys; ++j)
    for (int r = 0; r < block.width; r += kLanes) {
      const Tanh result = tanh(load(scores + j * kRows + r) * inverse);
      store(scores + j * kRows + r, cap * result.value);
      if (slopes) store(slopes + j * kRows + r, result.slope);
    }
}

// Scores times one factor for each row (null for 1), plus what is added to them, in place.
inline void add_tile(const RowBlock& block, int64_t keys, const float* factor, const float* added, float* scores) {
  for (int r = 0; r < block.width; r += kLanes) {
    const Floats scale = factor ? load(factor + r) : all(1.0f);
    for (int64_t at = r; at < keys * kRows; at += kRows)
      store(scores + at, multiply_add(load(scores + at), scale, load(added + at)));
  }
}

// Move the shifts of the lanes from `r` on to the new largest scores, and rescale the sums and the output.
inline void move_shift(SoftmaxState& state, int r, Floats top, float* output, int64_t value_dim) {
  const Floats old = load(state.shift + r), moved = larger(old, top), factor = exp2<6>(old - moved);
  store(state.shift + r, moved);
  // The scores in the sum of powers times scores are relative to the shift.
  float* scores = state.sums[kPowerScores] + r;
  store(scores, multiply_add(load(state.sums[kPowers] + r), select(greater(old, all(kNoScore)), old - moved, zero()),
                             load(scores)));
  for (auto& sums : state.sums) store(sums + r, load(sums + r) * factor);
  if (!state.started) return;
  for (int64_t d = 0; d < value_dim; ++d) store(output + d * kRows + r, load(output + d * kRows + r) * factor);
}

// Turn the scores of `kN` vectors of rows, from row `r` on, times `factor`, into powers, in place, and add up the
// powers. With statistics, also add up powers times scores, and powers times distances: `away` is the distance of the
// first key, one for each row, if keys are on both sides of the rows; otherwise it is null, and powers times the index
// of the key in the tile are returned in `indices`.
template <int kN, bool kStatistics, bool kScaled, int kDegree>
inline void power_strip(SoftmaxState& state, int r, int64_t keys, const float* factor, float* scores, const float* away,
                        float* indices) {
  Floats shift[kN], scale[kN], sum[kN], part[kN], weighted[kN], far[kN];
  Floats index = zero();
#pragma GCC unroll 4
  for (int n = 0; n < kN; ++n)
    shift[n] = load(state.shift + r + n * kLanes), sum[n] = part[n] = weighted[n] = far[n] = zero();
  for (int n = 0; kScaled && n < kN; ++n) scale[n] = load(factor + r + n * kLanes);
  for (int64_t j = 0; j < keys; ++j) {
    if (j % kSummedPowers == 0) {
#pragma GCC unroll 4
      for (int n = 0; n < kN; ++n) sum[n] = sum[n] + part[n], part[n] = zero();
    }
#pragma GCC unroll 4
    for (int n = 0; n < kN; ++n) {
      float* at = scores + j * kRows + r + n * kLanes;
      const Floats x = kScaled ? multiply_subtract(load(at), scale[n], shift[n]) : load(at) - shift[n];
      const Floats power = exp2<kDegree>(x);
      store(at, power);
      part[n] = part[n] + power;
      if constexpr (kStatistics) {
        weighted[n] = multiply_add(power, larger(all(-1000.0f), x), weighted[n]);  // 0 times minus infinity is 0 here
        const Floats distance = away ? absolute(load(away + r + n * kLanes) - index) : index;
        far[n] = multiply_add(power, distance, far[n]);
      }
    }
    if constexpr (kStatistics) index = index + all(1.0f);
  }
#pragma GCC unroll 4
  for (int n = 0; n < kN; ++n) {
    const int lane = r + n * kLanes;
    sum[n] = sum[n] + part[n];
    store(state.sums[kPowers] + lane, load(state.sums[kPowers] + lane) + sum[n]);
    if constexpr (kStatistics) {
      store(state.sums[kPowerScores] + lane, load(state.sums[kPowerScores] + lane) + weighted[n]);
      store(indices + lane, far[n]);
      store(indices + kRows + lane, sum[n]);
    }
  }
}

// Largest score of each of `kN` vectors of rows; moves the shift where it must.
template <int kN>
inline void raise_shift(SoftmaxState& state, int r, int64_t keys, const float* factor, const float* scores,
                        float* output, int64_t value_dim) {
  Floats top[kN];
#pragma GCC unroll 4
  for (int n = 0; n < kN; ++n) top[n] = all(kHidden);
  for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 4
    for (int n = 0; n < kN; ++n) top[n] = larger(load(scores + j * kRows + r + n * kLanes), top[n]);
#pragma GCC unroll 4
  for (int n = 0; n < kN; ++n) {
    const int lane = r + n * kLanes;
    if (factor) top[n] = top[n] * load(factor + lane);
    store(state.top + lane, larger(top[n], load(state.top + lane)));
    if (any(greater(top[n], load(state.shift + lane) + all(kSlack))))
      move_shift(state, lane, top[n], output, value_dim);
  }
}

template <int kN, bool kStatistics, int kDegree>
inline void softmax_strip(SoftmaxState& state, int r, int64_t keys, const float* factor, float* scores, float* output,
                          int64_t value_dim, const float* away, float* indices) {
  raise_shift<kN>(state, r, keys, factor, scores, output, value_dim);
  const auto strip =
      factor ? power_strip<kN, kStatistics, true, kDegree> : power_strip<kN, kStatistics, false, kDegree>;
  strip(state, r, keys, factor, scores, away, indices);
}

// Turn the scores of a tile, times the positive `factor` of each row (null for 1), into powers, in place.
template <bool kStatistics, int kDegree>
inline void softmax_tile(const RowBlock& block, SoftmaxState& state, int64_t keys, const float* factor, float* scores,
                         float* output, int64_t value_dim, const float* away, float* indices) {
  constexpr int kWide = kTileVectors;
  int r = 0;
  for (; r + kWide * kLanes <= block.width; r += kWide * kLanes)
    softmax_strip<kWide, kStatistics, kDegree>(state, r, keys, factor, scores, output, value_dim, away, indices);
  for (; r < block.width; r += kLanes)
    softmax_strip<1, kStatistics, kDegree>(state, r, keys, factor, scores, output, value_dim, away, indices);
}

}  // namespace headwise::HEADWISE_ISA
