// Products of bfloat16 pairs in the matrix unit AMX of Intel processors: tiles of 16 x 16 sums.
#pragma once

namespace headwise::HEADWISE_ISA {

// Turns the tile registers on for the lifetime of the object.
class PairRegisters {
 public:
  PairRegisters() {
    // Static: to the compiler, the intrinsic reads 8 bytes only, so that it would drop writes to a local variable.
    static constexpr struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    _tile_loadconfig(&configuration);
  }
  ~PairRegisters() { _tile_release(); }
};

// C (32 x 32) = left (32 x 32 depth) times right (16 depth pairs x 32), or C + it.
template <bool kAdd>
inline void multiply_pair_tile(NumberRows left, PairRows right, int64_t depth, float* c, int64_t c_row) {
  if constexpr (kAdd) {
    _tile_loadd(0, c, c_row * 4);
    _tile_loadd(1, c + 16, c_row * 4);
    _tile_loadd(2, c + 16 * c_row, c_row * 4);
    _tile_loadd(3, c + 16 * c_row + 16, c_row * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; ++k, left.data += left.step, right.data += 16 * right.row) {
    _tile_loadd(4, left.data, left.row * 2);
    _tile_loadd(6, right.data, right.row * 4);
    _tile_loadd(7, right.data + 16, right.row * 4);
    _tile_loadd(5, left.data + 16 * left.row, left.row * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_row * 4);
  _tile_stored(1, c + 16, c_row * 4);
  _tile_stored(2, c + 16 * c_row, c_row * 4);
  _tile_stored(3, c + 16 * c_row + 16, c_row * 4);
}

}  // namespace headwise::HEADWISE_ISA
