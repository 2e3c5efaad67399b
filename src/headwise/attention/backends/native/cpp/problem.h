// The description of one attention call: plain pointers, strides and sizes. It knows neither torch nor vectors.
#pragma once
#include <cstdint>

namespace headwise {

// Distances, in elements, between neighbours on each axis of a tensor. An axis along which values repeat has stride 0.
struct Strides {
  int64_t batch = 0, head = 0, row = 0, column = 0;
};

// A half-open range of keys.
struct KeyRange {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

// Inputs of the statistics of attention weights, and the arrays that the kernel fills.
struct Statistics {
  // Inputs: one number for each key, `(batch, keys)`, or for each query, `(batch, queries)`. Null if unknown.
  const uint8_t* special = nullptr;       // 1 at keys that are special tokens
  const int32_t* key_tokens = nullptr;    // dense numbers of the keys' tokens, from 0 to `token_count` - 1
  const int32_t* query_tokens = nullptr;  // those of the queries; -1 where the query has no token
  int32_t token_count = 0;
  const int32_t* positions = nullptr;  // index that a key has, or would have, at the position of each query
  const int32_t* first_key = nullptr;  // index of the first token's key, for each query; -1 if it is not among the keys
  const uint8_t* counted = nullptr;    // 1 at queries that count in `received` and `seen_by`
  const float* gram = nullptr;         // `W^T W` of each head's output projection, `(heads, value_dim, value_dim)`

  // Results: `rows` has one number for each statistic and query row, `(kRowStatistics, batch, heads, queries)`.
  float* rows = nullptr;
  int64_t* received = nullptr;  // sum of the weights on each key, in units of 2^-40, `(batch, heads, keys)`
  uint8_t* locks = nullptr;     // one for each sequence and head, 0 at first
  int32_t* seen_by = nullptr;   // number of counted rows that may attend to each key, `(batch, heads, keys)`
};

// Order of the statistics in `Statistics::rows`.
enum RowStatistic {
  kEntropy,
  kLargest,
  kDistance,
  kSelf,
  kPrevious,
  kNext,
  kFirst,
  kSpecial,
  kDuplicate,
  kInduction,
  kLargestContent,    // largest weight on a key that is not special
  kMaxLogit,          // largest score, after the softcap, with the bias
  kMaxLogitUncapped,  // largest score before the softcap, without the bias; minus infinity without a softcap
  kOutputNorm,
  kWrittenNorm,
  kVisibleKeys,
  kRowStatistics
};

// Fractional bits of the fixed-point numbers in `Statistics::received`. Sums of integers do not depend on the order in
// which threads add them.
constexpr int kReceivedBits = 40;

// Inputs of the backward pass in addition to those of the problem, whose `out` is then an input, and its results.
struct Gradients {
  const float* normalizers;
  const float* lse_gradient = nullptr;  // `(batch, heads, queries)`; null for zeros
  const void* out;                      // gradient of the output
  Strides out_strides;
  void *q, *k, *v;  // results
  Strides q_strides, k_strides, v_strides;
  float* deltas = nullptr;  // delta of each row (backward.h), `(batch, heads, queries)`; null if it is not needed
  // Gradient of the bias, contiguous, zeros at first; its axes are those of the bias, of size 1 where it repeats.
  float* bias = nullptr;
  int64_t bias_batch, bias_heads, bias_queries, bias_keys;
  // Numbers of each row that all tasks of a bias which repeats along the queries need, `(batch, heads, queries,
  // kBiasRowNumbers)`; null where a task computes them.
  float* bias_rows = nullptr;
};

constexpr int kBiasRowNumbers = 3;

// The row blocks of one key/value head, from `first` to `last`, that one thread computes in the backward pass, with
// sums of the gradients of all keys and values that these rows may attend to.
struct BackwardTask {
  int64_t first, last;
  KeyRange keys;
  float* sums;
};

constexpr int kMostRanges = 4;  // ranges of visible keys of a row

// One attention call. Query i of head h attends with key/value head h / (heads / kv_heads).
struct Problem {
  int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
  bool bfloat16;  // elements of q, k, v and out: bfloat16 or float32

  const void *q, *k, *v;
  Strides q_strides, k_strides, v_strides;  // the columns of a row are adjacent

  const float* scale;            // factor of the scores, `(heads)`
  float softcap = 0.0f;          // limit of the scaled scores; 0 for none
  const float* sinks = nullptr;  // sink logit of each head; null for none

  // Visible keys. Row i sees the union of `range_count` disjoint ranges `[ranges[2n], ranges[2n + 1])`, or all keys if
  // `ranges` is null; of these, the keys at which `dense` is not 0 and `bias` is not -inf.
  const int32_t* ranges = nullptr;
  int32_t range_count = 0;
  Strides range_strides;
  const uint8_t* dense = nullptr;
  Strides dense_strides;
  const void* bias = nullptr;  // added to the scores after scale and softcap
  bool bias_bfloat16 = false;  // its elements: bfloat16 or float32
  Strides bias_strides;

  double dropout = 0.0;                    // probability with which a weight is dropped; not with statistics
  uint64_t seed = 0;                       // of the dropout
  int64_t first_query = 0, first_key = 0;  // indices of the first query and key for the dropout

  // Copies of keys and values in the layout of the kernels' products, of the key/value heads from `first_packed` on.
  // Null where the kernels need none.
  const void* packed = nullptr;
  int64_t first_packed = 0;

  void* out = nullptr;
  Strides out_strides;
  float* lse = nullptr;  // log-sum-exp of each row in nats, `(batch, heads, queries)`
  // For the backward pass, `(batch, heads, queries, 2)`: the shift that is subtracted from the scores of a row in units
  // of ln 2, and the inverse of the sum of the powers of two of these differences.
  float* normalizers = nullptr;
  const Statistics* statistics = nullptr;
  const Gradients* gradients = nullptr;  // of the backward pass; null in the forward pass
};

// Factor of the weights that dropout keeps, so that the expected value of each weight stays the same.
inline double dropout_factor(const Problem& p) { return 1.0 / (1.0 - p.dropout); }

}  // namespace headwise
