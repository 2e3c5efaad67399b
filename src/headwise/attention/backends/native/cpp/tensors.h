// Torch's tensors as the operators use them: allocation, strides, pointers and checks.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "problem.h"

namespace headwise {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline Tensor allocate(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::empty(torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), dtype);
}

// Allocate a tensor with given strides, without torch's dispatcher, which takes longer than a short call's attention.
inline Tensor allocate(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType dtype) {
  AtenTensorHandle handle;
  const int32_t type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(), type,
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// Strides of a tensor of four axes; an axis of size 1 repeats.
inline Strides strides_of(const Tensor& x) {
  const auto step = [&](int64_t axis) { return x.size(axis) == 1 ? 0 : x.stride(axis); };
  return {step(0), step(1), step(2), step(3)};
}

template <class T>
inline const T* pointer(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}
template <class T>
inline const T* pointer(const MaybeTensor& x) {
  return x ? pointer<T>(*x) : nullptr;
}
template <class T>
inline T* writable(Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

inline void require(const Tensor& x, ScalarType dtype, const char* name) {
  STD_TORCH_CHECK(x.scalar_type() == dtype && x.is_cpu(), name, " has another dtype or device than it must have");
}
inline void require(const MaybeTensor& x, ScalarType dtype, const char* name) {
  if (x) require(*x, dtype, name);
}

}  // namespace headwise
