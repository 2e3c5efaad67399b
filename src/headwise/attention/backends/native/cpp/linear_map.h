// The description of a linear map of few rows, y = x W^T + b. All matrices have their rows one after another in memory.
#pragma once
#include <cstdint>

namespace headwise {

struct LinearMap {
  int64_t rows, width, out;
  bool bfloat16;       // else float, for all four
  const void* x;       // (rows, width)
  const void* weight;  // (out, width)
  const void* bias;    // (out), or null
  void* y;             // (rows, out)
};

}  // namespace headwise
