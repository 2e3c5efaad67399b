// The operator that sums the statistics of query rows over the rows of each sequence and head.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "tensors.h"

namespace headwise {
namespace {

// Sums in double precision of some of the numbers of each row, and how many rows were added; the largest of two further
// numbers; and whether all rows are finite. Number `kRowStatistics` is the entropy divided by the logarithm of the
// number of visible keys, in rows with more than one. Rows that see no key, or that `counted` leaves out, are not
// added, nor are those in which `has_value`, (numbers, batch or 1, 1, queries), is false.
std::tuple<Tensor, Tensor, bool> row_sums(Tensor rows, MaybeTensor counted, Tensor numbers, Tensor has_value) {
  require(rows, ScalarType::Float, "rows"), require(counted, ScalarType::Bool, "counted");
  require(numbers, ScalarType::Long, "numbers"), require(has_value, ScalarType::Bool, "has_value");
  STD_TORCH_CHECK(rows.dim() == 4 && rows.is_contiguous() && rows.size(0) == kRowStatistics,
                  "rows must be contiguous, with all numbers of each row");
  const int64_t batch = rows.size(1), heads = rows.size(2), queries = rows.size(3), count = numbers.size(0);
  STD_TORCH_CHECK(!counted || (counted->is_contiguous() && counted->numel() == batch * queries),
                  "counted must be contiguous, with one value for each query");
  STD_TORCH_CHECK(numbers.is_contiguous() && has_value.is_contiguous() && has_value.dim() == 4 &&
                      has_value.size(0) == count && (has_value.size(1) == 1 || has_value.size(1) == batch) &&
                      has_value.size(2) == 1 && has_value.size(3) == queries,
                  "has_value must be contiguous, with one value for each number and query");
  Tensor sums = allocate({2, count, batch, heads}, ScalarType::Double);
  Tensor largest = allocate({2, batch, heads}, ScalarType::Double);
  const float* data = pointer<float>(rows);
  const bool *is_counted = pointer<bool>(counted), *has = pointer<bool>(has_value);
  const int64_t* which = pointer<int64_t>(numbers);
  double *to = writable<double>(sums), *maxima = writable<double>(largest);
  const int64_t all = batch * heads, sequence_step = has_value.size(1) == 1 ? 0 : queries;
  double indicator = 0;
  for (int64_t index = 0; index < all; ++index) {
    const int64_t sequence = index / heads;
    const auto row = [&](int64_t number) { return data + (number * all + index) * queries; };
    const float *visible = row(kVisibleKeys), *entropy = row(kEntropy);
    for (int64_t number : {int64_t(kEntropy), int64_t(kOutputNorm), int64_t(kWrittenNorm)})
      for (int64_t i = 0; i < queries; ++i) indicator += row(number)[i];
    const auto counts = [&](int64_t i) {
      return visible[i] > 0 && (!is_counted || is_counted[sequence * queries + i]);
    };
    for (int64_t n = 0; n < count; ++n) {
      const bool* defined = has + n * has_value.size(1) * queries + sequence * sequence_step;
      const bool is_evenness = which[n] == kRowStatistics;
      const float* values = row(is_evenness ? int64_t(kEntropy) : which[n]);
      double sum = 0, added = 0;
      for (int64_t i = 0; i < queries; ++i) {
        if (!counts(i) || !defined[i] || (is_evenness && visible[i] <= 1)) continue;
        sum += is_evenness ? entropy[i] / std::log(visible[i]) : values[i];
        added += 1;
      }
      to[n * all + index] = sum, to[(count + n) * all + index] = added;
    }
    for (int64_t n = 0; n < 2; ++n) {
      const float* logits = row(kMaxLogit + n);
      double& maximum = maxima[n * all + index] = -std::numeric_limits<double>::infinity();
      for (int64_t i = 0; i < queries; ++i)
        if (counts(i)) maximum = std::isnan(logits[i]) ? logits[i] : std::max<double>(maximum, logits[i]);
    }
  }
  return {sums, largest, std::isfinite(indicator)};
}

STABLE_TORCH_LIBRARY_FRAGMENT(headwise, m) {
  m.def("row_sums(Tensor rows, Tensor? counted, Tensor numbers, Tensor has_value) -> (Tensor, Tensor, bool)");
}

STABLE_TORCH_LIBRARY_IMPL(headwise, CPU, m) { m.impl("row_sums", TORCH_BOX(&row_sums)); }

}  // namespace
}  // namespace headwise
