// Products of bfloat16 pairs in the matrix unit AMX of Intel processors: tiles of 16 x 16 sums.
#pragma once
#include "block.h"

namespace headwise::HEADWISE_ISA {

// Turns the tile registers on for the lifetime of the object.
class PairRegisters {
 public:
  PairRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const configuration;
    _tile_loadconfig(&configuration);
  }
  ~PairRegisters() { _tile_release(); }
};

// C (32 x 32) = left (32 x 32 depth) times right (16 depth pairs x 32), or C + it. Sizes in elements: rows of `left`
// are `left_row` numbers apart, and the blocks of 32 columns `left_step`.
template <bool kAdd>
inline void multiply_pairs(const uint16_t* left, int64_t left_row, int64_t left_step, const uint32_t* right,
                           int64_t depth, float* c) {
  constexpr int kRowBytes = kRows * 4;
  if constexpr (kAdd) {
    _tile_loadd(0, c, kRowBytes);
    _tile_loadd(1, c + 16, kRowBytes);
    _tile_loadd(2, c + 16 * kRows, kRowBytes);
    _tile_loadd(3, c + 16 * kRows + 16, kRowBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; ++k, left += left_step, right += 16 * kRows) {
    _tile_loadd(4, left, left_row * 2);
    _tile_loadd(6, right, kRowBytes);
    _tile_loadd(7, right + 16, kRowBytes);
    _tile_loadd(5, left + 16 * left_row, left_row * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, kRowBytes);
  _tile_stored(1, c + 16, kRowBytes);
  _tile_stored(2, c + 16 * kRows, kRowBytes);
  _tile_stored(3, c + 16 * kRows + 16, kRowBytes);
}

}  // namespace headwise::HEADWISE_ISA
