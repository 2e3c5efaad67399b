// The operators of the layers around attention.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "parallel.h"
#include "tensors.h"

namespace headwise {
namespace {

// In float32, a matrix x may have any strides, and the weight may have its rows or its columns one after another.
Tensor linear_map(Tensor x, Tensor weight, MaybeTensor bias) {
  LinearMap map{};
  STD_TORCH_CHECK(x.dim() >= 1 && weight.dim() == 2, "x must have 1 axis or more, and weight 2");
  map.out = weight.size(0), map.width = weight.size(1);
  STD_TORCH_CHECK(x.size(x.dim() - 1) == map.width && (!bias || (bias->dim() == 1 && bias->size(0) == map.out)),
                  "the sizes of x, weight and bias do not fit together");
  map.bfloat16 = x.scalar_type() == ScalarType::BFloat16;
  const ScalarType dtype = map.bfloat16 ? ScalarType::BFloat16 : ScalarType::Float;
  require(x, dtype, "x"), require(weight, dtype, "weight"), require(bias, dtype, "bias");
  STD_TORCH_CHECK(
      (x.is_contiguous() || (x.dim() == 2 && !map.bfloat16)) &&
          (weight.is_contiguous() || (std::min(weight.stride(0), weight.stride(1)) == 1 && !map.bfloat16)) &&
          (!bias || bias->is_contiguous()),
      "x, weight or bias has strides that are not supported");
  std::vector<int64_t> sizes(x.dim(), map.out), strides(x.dim(), 1);
  map.rows = 1;
  for (int64_t axis = x.dim() - 2; axis >= 0; --axis) {
    sizes[axis] = x.size(axis), strides[axis] = std::max<int64_t>(sizes[axis + 1], 1) * strides[axis + 1];
    map.rows *= sizes[axis];
  }
  Tensor y = allocate(sizes, strides, dtype);
  map.x_row = x.is_contiguous() ? map.width : x.stride(0), map.x_column = x.is_contiguous() ? 1 : x.stride(1);
  map.weight_row = weight.is_contiguous() ? map.width : weight.stride(0);
  map.weight_column = weight.is_contiguous() ? 1 : weight.stride(1);
  map.x = x.const_data_ptr(), map.weight = weight.const_data_ptr(), map.y = y.mutable_data_ptr();
  map.bias = bias ? bias->const_data_ptr() : nullptr;
  if (map.rows > 0 && map.out > 0) run_linear(map);
  return y;
}

// Queries or keys `(batch, heads, tokens, width)`, rotated by their positions. The result has the heads of one position
// adjacent in memory, as projections write them.
Tensor rotate_few_tokens(Tensor x, Tensor positions, Tensor turns, double factor, bool interleaved) {
  Rotation r{};
  STD_TORCH_CHECK(x.dim() == 4 && positions.dim() == 2 && turns.dim() == 1, "x must have 4 axes, and positions 2");
  r.batch = x.size(0), r.heads = x.size(1), r.tokens = x.size(2), r.width = x.size(3);
  r.rotated = 2 * turns.size(0), r.interleaved = interleaved, r.factor = factor;
  STD_TORCH_CHECK(
      (positions.size(0) == 1 || positions.size(0) == r.batch) && positions.size(1) == r.tokens && r.rotated <= r.width,
      "the sizes of x, positions and turns do not fit together");
  r.bfloat16 = x.scalar_type() == ScalarType::BFloat16;
  const ScalarType dtype = r.bfloat16 ? ScalarType::BFloat16 : ScalarType::Float;
  require(x, dtype, "x"), require(positions, ScalarType::Long, "positions"),
      require(turns, ScalarType::Double, "turns");
  STD_TORCH_CHECK((x.stride(3) == 1 || r.width == 1) && positions.is_contiguous() && turns.is_contiguous(),
                  "the last axis of x must have stride 1, and positions and turns must be contiguous");
  const int64_t row = r.heads * r.width;
  Tensor y = allocate({r.batch, r.heads, r.tokens, r.width}, {r.tokens * row, r.width, row, 1}, dtype);
  r.x = x.const_data_ptr(), r.x_strides = strides_of(x);
  r.y = y.mutable_data_ptr(), r.y_strides = strides_of(y);
  r.positions = pointer<int64_t>(positions), r.position_stride = positions.size(0) == 1 ? 0 : r.tokens;
  r.turns = pointer<double>(turns);
  run_rotation(r);
  return y;
}

STABLE_TORCH_LIBRARY_FRAGMENT(headwise, m) {
  m.def("linear_map(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("rotate_few_tokens(Tensor x, Tensor positions, Tensor turns, float factor, bool interleaved) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(headwise, CPU, m) {
  m.impl("linear_map", TORCH_BOX(&linear_map));
  m.impl("rotate_few_tokens", TORCH_BOX(&rotate_few_tokens));
}

}  // namespace
}  // namespace headwise
