// The description of a rotation of queries or keys by their positions.
#pragma once
#include "problem.h"

namespace headwise {

struct Rotation {
  int64_t batch, heads, tokens, width;
  int64_t rotated;   // features that are rotated, the first ones
  bool interleaved;  // pairs are features (0, 1), (2, 3), ..., else (0, rotated / 2), ...
  bool bfloat16;     // else float
  const void* x;     // (batch, heads, tokens, width)
  Strides x_strides;
  void* y;  // the same
  Strides y_strides;
  const int64_t* positions;  // (batch, tokens), the same for all sequences if the stride is 0
  int64_t position_stride;
  const double* turns;  // full turns of each pair from one position to the next
  double factor;        // of the result
};

}  // namespace headwise
