// Dropout of attention weights (Srivastava et al. 2014) by a counter-based generator of random numbers, Philox 4x32-10
// (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
//
// The generator is a function of a counter and the seed, without a state. So the forward and the backward pass compute
// the same numbers, in any order, and no mask is stored. A weight is dropped if a uniform number of 48 bits is below
// the probability. The number depends on the seed and on the indices of batch, head, query and key alone:
//
//     bits 47 to 32: number key % 8 of the 8 numbers of 16 bits in philox(key / 8, head, query, batch)
//     bits 31 to 0: word 0 of philox(key, head, query, 2^31 + batch)
//
// The lower bits decide only where the upper ones equal those of the probability, and are generated only there.
#pragma once
#include "visibility.h"

namespace headwise::HEADWISE_ISA {

constexpr int kPhiloxRounds = 10;
constexpr int kKeysPerCounter = 8;

// Pairs of words as plain numbers, for the same rounds as on vectors.
inline uint64_t product_of_lower_words(uint64_t a, uint64_t b) { return uint64_t(uint32_t(a)) * uint32_t(b); }
inline uint64_t upper_words(uint64_t pair) { return pair >> 32; }
inline uint64_t exclusive_or(uint64_t a, uint64_t b, uint64_t c) { return a ^ b ^ c; }

// Multipliers of the generator, and the keys of its rounds.
template <class Pairs>
struct PhiloxConstants {
  Pairs multiplier[2], key[kPhiloxRounds][2];

  template <class Broadcast>
  PhiloxConstants(uint64_t seed, Broadcast broadcast) : multiplier{broadcast(0xd2511f53), broadcast(0xcd9e8d57)} {
    uint32_t lower = uint32_t(seed), upper = uint32_t(seed >> 32);
    for (auto& pair : key) {
      pair[0] = broadcast(lower), pair[1] = broadcast(upper);
      lower += 0x9e3779b9, upper += 0xbb67ae85;
    }
  }
};

// Four words, each the lower one of a pair; the upper ones have any value.
template <class Pairs>
struct FourWords {
  Pairs word[4];

  void mix(const PhiloxConstants<Pairs>& constants, int round) {
    const Pairs first = product_of_lower_words(word[0], constants.multiplier[0]);
    const Pairs second = product_of_lower_words(word[2], constants.multiplier[1]);
    word[0] = exclusive_or(upper_words(second), word[1], constants.key[round][0]);
    word[2] = exclusive_or(upper_words(first), word[3], constants.key[round][1]);
    word[1] = second, word[3] = first;
  }
};

// The dropout of the weights of one block of rows.
class Dropout {
 public:
  Dropout(const Problem& p, const RowBlock& block)
      : p_(p), block_(block), scalars_(p.seed, [](uint32_t word) { return word; }) {
    if (!(p.dropout > 0)) return;
    constexpr int64_t kOne = int64_t(1) << 48;
    threshold_ = smaller(int64_t(__builtin_llround(p.dropout * double(kOne))), kOne - 1);
    for (int r = 0; r < kRows; ++r) start_row(r);
  }

  // Call `use(at, r, kept)` for every vector of weights of a tile: those of the rows from `r` on, at the place `at` of
  // arrays `(keys x kRows)`. The lanes `kept` are those of the weights that are not dropped.
  template <class Use>
  void for_each_vector(KeyRange keys_of_call, Use use) const {
    const KeyRange keys{keys_of_call.begin + p_.first_key, keys_of_call.end + p_.first_key};
    const PhiloxConstants<Ints> constants(p_.seed, [](uint32_t word) { return all(int32_t(word)); });
    const uint32_t upper = uint32_t(threshold_ >> 32);
    const Ints same = all(int32_t(upper << 16 | upper));
    const Ints limit = all(int32_t(upper << 16 | 0xffff));  // the lower half of a word does not count
    for (int r = 0; r < block_.width; r += kLanes)
      for (int64_t start = keys.begin / kKeysPerCounter * kKeysPerCounter; start < keys.end; start += kKeysPerCounter) {
        Ints words[4];
        generate(constants, start / kKeysPerCounter, r, words);
        bool is_undecided = false;
        for (const Ints& word : words) is_undecided |= has_equal_half(word, same);
        const int64_t first = larger(start, keys.begin), last = smaller(start + kKeysPerCounter, keys.end);
        const int64_t at = (start - keys.begin) * kRows + r;
        if (!is_undecided && last - first == kKeysPerCounter) {
#pragma GCC unroll 4
          for (int n = 0; n < 4; ++n) {
            use(at + 2 * n * kRows, r, less_unsigned(limit, lower_half_moved_up(words[n])));
            use(at + (2 * n + 1) * kRows, r, less_unsigned(limit, words[n]));
          }
          continue;
        }
        for (int64_t key = first; key < last; ++key) {
          const Ints word = words[(key - start) / 2], number = key % 2 ? word : lower_half_moved_up(word);
          const Mask kept = is_undecided ? decided(number, key, r) : less_unsigned(limit, number);
          use(at + (key - start) * kRows, r, kept);
        }
      }
  }

  // Set the weights of a tile that are dropped to 0.
  void drop(KeyRange keys, float* weights) const {
    for_each_vector(keys,
                    [&](int64_t at, int, Mask kept) { store(weights + at, select(kept, load(weights + at), zero())); });
  }

 private:
  int64_t query(int r) const { return p_.first_query + block_.query[r]; }

  // The first two rounds mix the words of rows and those of keys in separate products. The rows' part of the words
  // after these rounds, without the round's key, is computed once for a block.
  void start_row(int r) {
    const uint64_t second = product_of_lower_words(uint32_t(query(r)), scalars_.multiplier[1]);
    const uint64_t mixed = exclusive_or(upper_words(second), uint32_t(block_.head[r]), scalars_.key[0][0]);
    const uint64_t first = product_of_lower_words(mixed, scalars_.multiplier[0]);
    const uint64_t words[] = {second, upper_words(first), first};
    for (int n = 0; n < 3; ++n) rows_[n][r] = int32_t(uint32_t(words[n]));
  }

  // The four random words of each of the rows from `r` on, for the keys of one counter.
  void generate(const PhiloxConstants<Ints>& constants, int64_t counter, int r, Ints (&words)[4]) const {
    const uint64_t first = product_of_lower_words(uint64_t(counter), scalars_.multiplier[0]);
    const uint64_t mixed = exclusive_or(upper_words(first), uint32_t(block_.batch), scalars_.key[0][1]);
    const uint64_t second = product_of_lower_words(mixed, scalars_.multiplier[1]);
    const Ints of_keys[] = {all(int32_t(upper_words(second))), all(int32_t(uint32_t(second))),
                            all(int32_t(uint32_t(first)))};
    FourWords<Ints> even, odd;  // rows
    const auto start = [&](FourWords<Ints>& four, Ints row0, Ints row1, Ints row2) {
      four.word[0] = exclusive_or(of_keys[0], row0, constants.key[1][0]);
      four.word[1] = of_keys[1];
      four.word[2] = exclusive_or(of_keys[2], row1, constants.key[1][1]);
      four.word[3] = row2;
    };
    const Ints row0 = load(rows_[0] + r), row1 = load(rows_[1] + r), row2 = load(rows_[2] + r);
    start(even, row0, row1, row2);
    start(odd, upper_words(row0), upper_words(row1), upper_words(row2));
#pragma GCC unroll 8
    for (int round = 2; round < kPhiloxRounds; ++round) even.mix(constants, round), odd.mix(constants, round);
    for (int n = 0; n < 4; ++n) words[n] = pairs_of_lower_words(even.word[n], odd.word[n]);
  }

  // The lanes whose weights are kept, from the upper bits of their numbers, in the upper halves of words, and the lower
  // bits where these decide.
  Mask decided(Ints upper_bits, int64_t key, int r) const {
    uint32_t words[kLanes];
    __builtin_memcpy(words, &upper_bits, sizeof words);
    float is_kept[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      int64_t number = int64_t(words[lane] >> 16) << 32;
      if (number >> 32 == threshold_ >> 32) number |= lower_bits(key, r + lane);
      is_kept[lane] = number >= threshold_ ? 1.0f : 0.0f;
    }
    return greater(load(is_kept), zero());
  }

  uint32_t lower_bits(int64_t key, int r) const {
    FourWords<uint64_t> four{
        {uint64_t(key), uint32_t(block_.head[r]), uint32_t(query(r)), uint64_t(block_.batch) | uint64_t(1) << 31}};
    for (int round = 0; round < kPhiloxRounds; ++round) four.mix(scalars_, round);
    return uint32_t(four.word[0]);
  }

  const Problem& p_;
  const RowBlock& block_;
  const PhiloxConstants<uint64_t> scalars_;
  int64_t threshold_ = 0;  // the probability, in units of 2^-48
  int32_t rows_[3][kRows];
};

}  // namespace headwise::HEADWISE_ISA
