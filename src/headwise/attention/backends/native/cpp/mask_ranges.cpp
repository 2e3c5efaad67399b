// The operator that reads a mask as ranges: the keys that each query attends to, as a few half-open ranges of keys.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <tuple>
#include <vector>

#include "tensors.h"

namespace headwise {
namespace {

using BFloat16 = torch::headeronly::BFloat16;

constexpr float kHiding = -1e30f;      // an additive mask hides a key by any number up to this one
constexpr int64_t kAtOnce = 16;        // elements that are compared with one state
constexpr int64_t kGrain = 64 * 1024;  // elements below which another thread is not worth its start

// What a mask is, from the best to the worst.
enum Reading : int64_t { kRanges, kManyRanges, kFiniteRow, kBias };

// The elements of a mask: whether a key is visible, whether it is hidden, and whether it is hidden by a finite number.
struct Boolean {
  using Element = uint8_t;
  static bool is_visible(uint8_t x) { return x != 0; }
  static bool is_hidden(uint8_t x) { return x == 0; }
  static bool is_finite(uint8_t) { return false; }
};

// An additive mask, whose numbers are first rounded to `Rounded`.
template <class T, class Rounded>
struct Additive {
  using Element = T;
  static float value(T x) { return static_cast<float>(static_cast<Rounded>(x)); }
  static bool is_visible(T x) { return value(x) == 0; }
  static bool is_hidden(T x) { return value(x) <= kHiding; }
  static bool is_finite(T x) { return value(x) > -INFINITY; }
};

// Read the edges of the ranges of one row; element i is at `row[i * step]`. Write them to `edges`, and their number to
// `count`.
template <class Mask>
Reading read_row(const typename Mask::Element* row, int64_t step, int64_t keys, int32_t* edges, int* count) {
  bool inside = false, sees_any = false, hides_by_finite = false, has_many = false;
  *count = 0;
  for (int64_t begin = 0; begin < keys; begin += kAtOnce) {
    const int64_t end = std::min(begin + kAtOnce, keys);
    int visible = 0, hidden = 0, finite = 0;
    for (int64_t i = begin; i < end; ++i) {
      const auto x = row[i * step];
      visible += Mask::is_visible(x), hidden += Mask::is_hidden(x), finite += Mask::is_finite(x);
    }
    if (visible + hidden < end - begin) return kBias;
    hides_by_finite |= finite > visible, sees_any |= visible > 0;
    if (inside ? hidden == 0 : visible == 0) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (Mask::is_visible(row[i * step]) == inside) continue;
      inside = !inside;
      if (*count == 2 * kMostRanges) has_many = true;
      else edges[(*count)++] = int32_t(i);
    }
  }
  if (inside && *count % 2 == 1) edges[(*count)++] = int32_t(keys);
  return !sees_any && hides_by_finite ? kFiniteRow : has_many ? kManyRanges : kRanges;
}

template <class Mask>
std::tuple<Tensor, int64_t> read(const Tensor& mask) {
  std::vector<int64_t> sizes, strides;
  for (int64_t axis = 0; axis < 3; ++axis) {
    const bool repeats = mask.stride(axis) == 0 && mask.size(axis) > 0;
    sizes.push_back(repeats ? 1 : mask.size(axis)), strides.push_back(mask.stride(axis));
  }
  const int64_t rows = sizes[0] * sizes[1] * sizes[2], keys = mask.size(3), step = mask.stride(3);
  const auto* data = static_cast<const typename Mask::Element*>(mask.const_data_ptr());
  std::vector<int32_t> edges(rows * 2 * kMostRanges);
  std::atomic<int64_t> worst{kRanges};
  std::atomic<int> widest{2};
  const auto raise = [](auto& least, auto value) {
    for (auto known = least.load(); known < value && !least.compare_exchange_weak(known, value);) {
    }
  };
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(keys, 1));
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end && worst.load() < kBias; ++row) {
      const int64_t query = row % sizes[2], head = row / sizes[2] % sizes[1], sequence = row / sizes[2] / sizes[1];
      int count = 0;
      const auto* from = data + sequence * strides[0] + head * strides[1] + query * strides[2];
      raise(worst, int64_t(read_row<Mask>(from, step, keys, edges.data() + row * 2 * kMostRanges, &count)));
      raise(widest, count);
    }
  });
  if (worst != kRanges) return {allocate({0}, ScalarType::Int), worst};
  Tensor ranges = allocate({sizes[0], sizes[1], sizes[2], widest / 2, 2}, ScalarType::Int);
  int32_t* to = writable<int32_t>(ranges);
  for (int64_t row = 0; row < rows; ++row) to = std::copy_n(edges.data() + row * 2 * kMostRanges, widest.load(), to);
  return {ranges, kRanges};
}

// The ranges `(batch, heads, queries, ranges, 2)` that contain exactly the visible keys of each query, and what the
// mask is; the ranges are empty if it is not ranges. A boolean mask is true at visible keys. An additive one, which is
// rounded to bfloat16 if the flag is set, is 0 there, and -inf or a large negative number at all others. Axes along
// which the mask repeats have size 1.
std::tuple<Tensor, int64_t> mask_ranges(Tensor mask, bool rounds_to_bfloat16) {
  STD_TORCH_CHECK(mask.dim() == 4 && mask.is_cpu(), "mask must have 4 axes, and be on the CPU");
  if (mask.scalar_type() == ScalarType::Bool) return read<Boolean>(mask);
  if (mask.scalar_type() == ScalarType::BFloat16) return read<Additive<BFloat16, float>>(mask);
  require(mask, ScalarType::Float, "mask");
  return rounds_to_bfloat16 ? read<Additive<float, BFloat16>>(mask) : read<Additive<float, float>>(mask);
}

STABLE_TORCH_LIBRARY_FRAGMENT(headwise, m) {
  m.def("mask_ranges(Tensor mask, bool rounds_to_bfloat16) -> (Tensor, int)");
}

STABLE_TORCH_LIBRARY_IMPL(headwise, CPU, m) { m.impl("mask_ranges", TORCH_BOX(&mask_ranges)); }

}  // namespace
}  // namespace headwise
