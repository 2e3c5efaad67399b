// The description of a linear map, y = x W^T + b.
#pragma once
#include <cstdint>

namespace headwise {

struct LinearMap {
  int64_t rows, width, out;
  bool bfloat16;  // else float, for all four
  // Element (i, j) of x (rows, width) and of the weight (out, width) is at `i * row + j * column`. One of the strides
  // of the weight is 1. The bias (out), or null, and y (rows, out) have no gaps; in bfloat16, neither have x and the
  // weight.
  const void *x, *weight, *bias;
  int64_t x_row, x_column, weight_row, weight_column;
  void* y;
  int64_t threads;  // the result does not depend on it
};

}  // namespace headwise
