// The operators of attention, registered with torch through its stable ABI, so that one build serves all later versions
// of torch and of Python.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "dispatch.h"
#include "parallel.h"
#include "tensors.h"

namespace headwise {
namespace {

// Arguments that all operators have in common.
struct Call {
  Tensor q, k, v;
  double scale;
  MaybeTensor head_scale;
  double softcap;
  MaybeTensor sinks, ranges, dense, bias;
};

// The call as a problem, and the tensors that it points to. `scales` must outlive the problem.
Problem problem_of(const Call& call, float* scales) {
  const Tensor &q = call.q, &k = call.k, &v = call.v;
  Problem p{};
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v must have 4 axes");
  p.batch = q.size(0), p.heads = q.size(1), p.queries = q.size(2), p.head_dim = q.size(3);
  p.kv_heads = k.size(1), p.keys = k.size(2), p.value_dim = v.size(3);
  STD_TORCH_CHECK(k.size(0) == p.batch && v.size(0) == p.batch && v.size(1) == p.kv_heads && v.size(2) == p.keys &&
                      k.size(3) == p.head_dim && p.kv_heads > 0 && p.heads % p.kv_heads == 0,
                  "the sizes of q, k and v do not fit together");
  p.bfloat16 = q.scalar_type() == ScalarType::BFloat16;
  const ScalarType dtype = p.bfloat16 ? ScalarType::BFloat16 : ScalarType::Float;
  require(q, dtype, "q"), require(k, dtype, "k"), require(v, dtype, "v");
  for (const Tensor* x : {&q, &k, &v})
    STD_TORCH_CHECK(x->stride(3) == 1 || x->size(3) == 1, "the last axis of q, k and v must have stride 1");
  require(call.head_scale, ScalarType::Float, "head_scale"), require(call.sinks, ScalarType::Float, "sinks");
  require(call.ranges, ScalarType::Int, "ranges"), require(call.dense, ScalarType::Bool, "dense");
  p.bias_bfloat16 = call.bias && call.bias->scalar_type() == ScalarType::BFloat16;
  require(call.bias, p.bias_bfloat16 ? ScalarType::BFloat16 : ScalarType::Float, "bias");
  p.q = q.const_data_ptr(), p.k = k.const_data_ptr(), p.v = v.const_data_ptr();
  p.q_strides = strides_of(q), p.k_strides = strides_of(k), p.v_strides = strides_of(v);
  const float* head_scale = pointer<float>(call.head_scale);
  for (int64_t h = 0; h < p.heads; ++h) scales[h] = float(call.scale) * (head_scale ? head_scale[h] : 1.0f);
  p.scale = scales;
  p.softcap = float(call.softcap);
  p.sinks = pointer<float>(call.sinks);
  if (call.ranges) {  // (batch, heads, queries, ranges, 2)
    const Tensor& ranges = *call.ranges;
    STD_TORCH_CHECK(ranges.dim() == 5 && ranges.size(3) <= kMostRanges && ranges.size(4) == 2 && ranges.is_contiguous(),
                    "ranges must be contiguous, with up to 4 pairs for each row");
    p.ranges = pointer<int32_t>(ranges);
    p.range_count = int32_t(ranges.size(3));
    p.range_strides = strides_of(ranges);
  }
  p.dense = reinterpret_cast<const uint8_t*>(pointer<bool>(call.dense));
  if (call.dense) p.dense_strides = strides_of(*call.dense);
  if (call.bias) p.bias = call.bias->const_data_ptr(), p.bias_strides = strides_of(*call.bias);
  return p;
}

// Set the probability of dropout, its seed, and the indices of the first query and key in a larger matrix of which the
// call is a part. The seed is a tensor with one element, since the compiler would make a number a constant.
void set_dropout(Problem& p, double dropout, const MaybeTensor& seed, int64_t first_query, int64_t first_key) {
  STD_TORCH_CHECK(dropout >= 0 && dropout < 1, "dropout must be 0 or more and less than 1");
  if (dropout == 0) return;
  STD_TORCH_CHECK(seed && seed->numel() == 1, "dropout needs a seed with one element");
  require(*seed, ScalarType::Long, "seed");
  p.dropout = dropout;
  p.seed = uint64_t(*pointer<int64_t>(*seed));
  p.first_query = first_query, p.first_key = first_key;
}

// Allocate the output, with the heads of one position adjacent in memory, as output projections need them, and the
// log-sum-exp. The layout does not depend on that of q, which torch's compiler may change.
std::tuple<Tensor, Tensor, Tensor> allocate_results(Problem& p, ScalarType dtype) {
  const int64_t row = p.heads * p.value_dim, rows = p.heads * p.queries;
  Tensor out = allocate({p.batch, p.heads, p.queries, p.value_dim}, {p.queries * row, p.value_dim, row, 1}, dtype);
  Tensor lse = allocate({p.batch, p.heads, p.queries}, {rows, p.queries, 1}, ScalarType::Float);
  Tensor normalizers = allocate({p.batch, p.heads, p.queries, 2}, {2 * rows, 2 * p.queries, 2, 1}, ScalarType::Float);
  p.out = out.mutable_data_ptr();
  p.out_strides = strides_of(out);
  p.lse = writable<float>(lse), p.normalizers = writable<float>(normalizers);
  return {out, lse, normalizers};
}

std::tuple<Tensor, Tensor, Tensor> attend_forward(Tensor q, Tensor k, Tensor v, double scale, MaybeTensor head_scale,
                                                  double softcap, MaybeTensor sinks, MaybeTensor ranges,
                                                  MaybeTensor dense, MaybeTensor bias, double dropout, MaybeTensor seed,
                                                  int64_t first_query, int64_t first_key) {
  std::vector<float> scales(q.size(1));
  Problem p = problem_of({q, k, v, scale, head_scale, softcap, sinks, ranges, dense, bias}, scales.data());
  set_dropout(p, dropout, seed, first_query, first_key);
  auto results = allocate_results(p, q.scalar_type());
  run_forward(p);
  return results;
}

// The results of the forward pass and their gradients, which both operators of the backward pass have.
struct Upstream {
  Tensor out_gradient;
  MaybeTensor lse_gradient;
  Tensor out, normalizers;
};

// Let a problem point to these tensors.
void set_upstream(const Upstream& upstream, Problem& p, Gradients& g) {
  const Tensor &out_gradient = upstream.out_gradient, &out = upstream.out;
  const ScalarType dtype = p.bfloat16 ? ScalarType::BFloat16 : ScalarType::Float;
  require(out_gradient, dtype, "out_gradient"), require(out, dtype, "out");
  STD_TORCH_CHECK(out_gradient.stride(3) == 1 || p.value_dim == 1, "the last axis of out_gradient must have stride 1");
  const Tensor& normalizers = upstream.normalizers;
  require(normalizers, ScalarType::Float, "normalizers");
  STD_TORCH_CHECK(normalizers.is_contiguous() && normalizers.numel() == 2 * p.batch * p.heads * p.queries,
                  "normalizers must be contiguous, with two numbers for each row");
  require(upstream.lse_gradient, ScalarType::Float, "lse_gradient");
  STD_TORCH_CHECK(!upstream.lse_gradient || upstream.lse_gradient->is_contiguous(), "lse_gradient must be contiguous");
  p.out = const_cast<void*>(out.const_data_ptr()), p.out_strides = strides_of(out);
  g.normalizers = pointer<float>(normalizers);
  g.lse_gradient = pointer<float>(upstream.lse_gradient);
  g.out = out_gradient.const_data_ptr(), g.out_strides = strides_of(out_gradient);
  p.gradients = &g;
}

// The gradients of q, k and v and, with sinks, delta of each row, from which the gradient of the sinks follows.
std::tuple<Tensor, Tensor, Tensor, Tensor> attend_backward(Tensor out_gradient, MaybeTensor lse_gradient, Tensor out,
                                                           Tensor normalizers, Tensor q, Tensor k, Tensor v,
                                                           double scale, MaybeTensor head_scale, double softcap,
                                                           MaybeTensor sinks, MaybeTensor ranges, MaybeTensor dense,
                                                           MaybeTensor bias, double dropout, MaybeTensor seed,
                                                           int64_t first_query, int64_t first_key) {
  std::vector<float> scales(q.size(1));
  Problem p = problem_of({q, k, v, scale, head_scale, softcap, sinks, ranges, dense, bias}, scales.data());
  set_dropout(p, dropout, seed, first_query, first_key);
  Gradients g{};
  set_upstream({out_gradient, lse_gradient, out, normalizers}, p, g);
  Tensor q_gradient = torch::stable::empty_like(q), k_gradient = torch::stable::empty_like(k);
  Tensor v_gradient = torch::stable::empty_like(v);
  g.q = q_gradient.mutable_data_ptr(), g.q_strides = strides_of(q_gradient);
  g.k = k_gradient.mutable_data_ptr(), g.k_strides = strides_of(k_gradient);
  g.v = v_gradient.mutable_data_ptr(), g.v_strides = strides_of(v_gradient);
  const std::vector<int64_t> sizes =
      sinks ? std::vector<int64_t>{p.batch, p.heads, p.queries} : std::vector<int64_t>{0};
  const std::vector<int64_t> strides =
      sinks ? std::vector<int64_t>{p.heads * p.queries, p.queries, 1} : std::vector<int64_t>{1};
  Tensor deltas = allocate(sizes, strides, ScalarType::Float);
  if (sinks) g.deltas = writable<float>(deltas);
  run_backward(p);
  return {q_gradient, k_gradient, v_gradient, deltas};
}

// The same without what the backward pass needs.
std::tuple<Tensor, Tensor> attend(Tensor q, Tensor k, Tensor v, double scale, MaybeTensor head_scale, double softcap,
                                  MaybeTensor sinks, MaybeTensor ranges, MaybeTensor dense, MaybeTensor bias) {
  const auto results = attend_forward(q, k, v, scale, head_scale, softcap, sinks, ranges, dense, bias, 0.0, {}, 0, 0);
  return {std::get<0>(results), std::get<1>(results)};
}

Tensor attend_bias_gradient(Tensor out_gradient, MaybeTensor lse_gradient, Tensor out, Tensor normalizers, Tensor q,
                            Tensor k, Tensor v, double scale, MaybeTensor head_scale, double softcap, MaybeTensor sinks,
                            MaybeTensor ranges, MaybeTensor dense, MaybeTensor bias, double dropout, MaybeTensor seed,
                            int64_t first_query, int64_t first_key) {
  STD_TORCH_CHECK(bias && bias->dim() == 4, "a gradient of the bias needs a bias of 4 axes");
  std::vector<float> scales(q.size(1));
  Problem p = problem_of({q, k, v, scale, head_scale, softcap, sinks, ranges, dense, bias}, scales.data());
  const int64_t sizes[] = {p.batch, p.heads, p.queries, p.keys};
  for (int64_t axis = 0; axis < 4; ++axis)
    STD_TORCH_CHECK(bias->size(axis) == 1 || bias->size(axis) == sizes[axis], "the sizes of the bias do not fit");
  set_dropout(p, dropout, seed, first_query, first_key);
  Gradients g{};
  set_upstream({out_gradient, lse_gradient, out, normalizers}, p, g);
  g.bias_batch = bias->size(0), g.bias_heads = bias->size(1);
  g.bias_queries = bias->size(2), g.bias_keys = bias->size(3);
  Tensor gradient = allocate({g.bias_batch, g.bias_heads, g.bias_queries, g.bias_keys}, ScalarType::Float);
  torch::stable::zero_(gradient);
  if (gradient.numel() == 0) return gradient;
  g.bias = writable<float>(gradient);
  run_bias_gradient(p);
  return gradient;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attend_statistics(
    Tensor q, Tensor k, Tensor v, double scale, MaybeTensor head_scale, double softcap, MaybeTensor sinks,
    MaybeTensor ranges, MaybeTensor dense, MaybeTensor bias, Tensor positions, Tensor first_key, MaybeTensor special,
    MaybeTensor key_tokens, MaybeTensor query_tokens, int64_t token_count, MaybeTensor counted, MaybeTensor gram) {
  std::vector<float> scales(q.size(1));
  Problem p = problem_of({q, k, v, scale, head_scale, softcap, sinks, ranges, dense, bias}, scales.data());
  auto [out, lse, normalizers] = allocate_results(p, q.scalar_type());
  for (const MaybeTensor* x : {&special, &key_tokens, &query_tokens, &counted, &gram})
    STD_TORCH_CHECK(!*x || (*x)->is_contiguous(), "the inputs of statistics must be contiguous");
  for (const Tensor* x : {&positions, &first_key}) {
    require(*x, ScalarType::Int, "positions or first_key");
    STD_TORCH_CHECK(x->is_contiguous() && x->dim() == 2 && x->size(0) == p.batch && x->size(1) == p.queries,
                    "positions and first_key must be contiguous, with one number for each query");
  }
  require(special, ScalarType::Bool, "special");
  require(key_tokens, ScalarType::Int, "key_tokens"), require(query_tokens, ScalarType::Int, "query_tokens");
  require(counted, ScalarType::Bool, "counted"), require(gram, ScalarType::Float, "gram");
  Tensor rows = allocate({kRowStatistics, p.batch, p.heads, p.queries}, ScalarType::Float);
  Tensor received = allocate({p.batch, p.heads, p.keys}, ScalarType::Long);
  Tensor locks = allocate({p.batch, p.heads}, ScalarType::Byte);
  torch::stable::zero_(locks);
  Tensor seen_by = allocate({p.batch, p.heads, p.keys}, ScalarType::Int);
  torch::stable::zero_(received), torch::stable::zero_(seen_by);
  Statistics statistics;
  statistics.special = reinterpret_cast<const uint8_t*>(pointer<bool>(special));
  statistics.key_tokens = pointer<int32_t>(key_tokens), statistics.query_tokens = pointer<int32_t>(query_tokens);
  statistics.token_count = int32_t(token_count);
  statistics.positions = pointer<int32_t>(positions), statistics.first_key = pointer<int32_t>(first_key);
  statistics.counted = reinterpret_cast<const uint8_t*>(pointer<bool>(counted));
  statistics.gram = pointer<float>(gram);
  statistics.rows = writable<float>(rows), statistics.received = writable<int64_t>(received);
  statistics.locks = writable<uint8_t>(locks);
  statistics.seen_by = writable<int32_t>(seen_by);
  p.statistics = &statistics;
  run_forward(p);
  return {out, lse, rows, received, seen_by};
}

// Name of the instruction set in use; empty if the one that HEADWISE_NATIVE names is not available.
std::string instruction_set() {
  const Kernels* kernels = chosen_kernels();
  return kernels ? kernels->name : "";
}

// Checksum of the sources that the library was compiled from.
std::string sources_checksum() { return HEADWISE_SOURCES; }

// True if no number of x has the exponent of infinity and NaN.
template <class Bits>
bool has_no_exponent(const Tensor& x, Bits exponent) {
  const int64_t axes = x.dim();
  int64_t count = 1, extent = 1;
  for (int64_t axis = 0; axis < axes; ++axis) {
    if (x.size(axis) == 0) return true;
    if (x.stride(axis) != 0) count *= x.size(axis), extent += (x.size(axis) - 1) * x.stride(axis);
  }
  const Bits* data = pointer<Bits>(x);
  const auto is_bad = [&](const Bits* from, int64_t numbers, int64_t step) {
    Bits bad = 0;
    if (step == 1)
      for (int64_t n = 0; n < numbers; ++n) bad |= Bits((from[n] & exponent) == exponent);
    else
      for (int64_t n = 0; n < numbers; ++n) bad |= Bits((from[n * step] & exponent) == exponent);
    return bad != 0;
  };
  if (extent == count) return !is_bad(data, count, 1);  // dense, in any order of its axes, of which some may repeat
  std::vector<int64_t> index(axes, 0);
  while (true) {
    const Bits* row = data;
    for (int64_t axis = 0; axis < axes - 1; ++axis) row += index[axis] * x.stride(axis);
    if (is_bad(row, x.size(axes - 1), x.stride(axes - 1))) return false;
    int64_t axis = axes - 2;
    while (axis >= 0 && ++index[axis] == x.size(axis)) index[axis--] = 0;
    if (axis < 0) return true;
  }
}

bool is_finite(const Tensor& x) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() >= 1, "x must be a tensor on the CPU with 1 axis or more");
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return has_no_exponent<uint32_t>(x, 0x7f800000);
    case ScalarType::BFloat16:
      return has_no_exponent<uint16_t>(x, 0x7f80);
    case ScalarType::Half:
      return has_no_exponent<uint16_t>(x, 0x7c00);
    case ScalarType::Double:
      return has_no_exponent<uint64_t>(x, 0x7ff0000000000000);
    default:
      STD_TORCH_CHECK(false, "x must be of floating point, with 16, 32 or 64 bits");
  }
  return false;
}

// True if all numbers of both tensors are finite.
bool all_finite(Tensor x, Tensor y) { return is_finite(x) && is_finite(y); }

STABLE_TORCH_LIBRARY_FRAGMENT(headwise, m) {
  m.def(
      "attend_forward(Tensor q, Tensor k, Tensor v, float scale, Tensor? head_scale, float softcap, Tensor? sinks, "
      "Tensor? ranges, Tensor? dense, Tensor? bias, float dropout=0.0, Tensor? seed=None, "
      "SymInt first_query=0, SymInt first_key=0) "
      "-> (Tensor out, Tensor lse, Tensor normalizers)");
  m.def(
      "attend(Tensor q, Tensor k, Tensor v, float scale, Tensor? head_scale, float softcap, Tensor? sinks, "
      "Tensor? ranges, Tensor? dense, Tensor? bias) -> (Tensor out, Tensor lse)");
  m.def(
      "attend_backward(Tensor out_gradient, Tensor? lse_gradient, Tensor out, Tensor normalizers, Tensor q, "
      "Tensor k, Tensor v, float scale, Tensor? head_scale, float softcap, Tensor? sinks, Tensor? ranges, "
      "Tensor? dense, Tensor? bias, float dropout=0.0, Tensor? seed=None, "
      "SymInt first_query=0, SymInt first_key=0) "
      "-> (Tensor q_gradient, Tensor k_gradient, Tensor v_gradient, Tensor deltas)");
  m.def(
      "attend_bias_gradient(Tensor out_gradient, Tensor? lse_gradient, Tensor out, Tensor normalizers, Tensor q, "
      "Tensor k, Tensor v, float scale, Tensor? head_scale, float softcap, Tensor? sinks, Tensor? ranges, "
      "Tensor? dense, Tensor? bias, float dropout=0.0, Tensor? seed=None, "
      "SymInt first_query=0, SymInt first_key=0) -> Tensor");
  m.def(
      "attend_statistics(Tensor q, Tensor k, Tensor v, float scale, Tensor? head_scale, float softcap, Tensor? sinks, "
      "Tensor? ranges, Tensor? dense, Tensor? bias, Tensor positions, Tensor first_key, Tensor? special, Tensor? "
      "key_tokens, "
      "Tensor? query_tokens, int token_count, Tensor? counted, Tensor? gram) "
      "-> (Tensor out, Tensor lse, Tensor rows, Tensor received, Tensor seen_by)");
  m.def("all_finite(Tensor x, Tensor y) -> bool");
  m.def("instruction_set() -> str");
  m.def("sources_checksum() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(headwise, CPU, m) {
  m.impl("attend_forward", TORCH_BOX(&attend_forward));
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("attend_backward", TORCH_BOX(&attend_backward));
  m.impl("attend_bias_gradient", TORCH_BOX(&attend_bias_gradient));
  m.impl("attend_statistics", TORCH_BOX(&attend_statistics));
}
STABLE_TORCH_LIBRARY_IMPL(headwise, CompositeImplicitAutograd, m) {
  m.impl("all_finite", TORCH_BOX(&all_finite));  // nothing to differentiate, so that autograd need not see it
}
STABLE_TORCH_LIBRARY_IMPL(headwise, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&instruction_set));
  m.impl("sources_checksum", TORCH_BOX(&sources_checksum));
}

}  // namespace
}  // namespace headwise
