// The functions of a table of kernels, for the instruction set that this file is compiled for.
#pragma once
#include "bias_gradient.h"
#include "few_rows.h"
#include "few_rows_product.h"
#include "few_rows_rotation.h"
#include "forward.h"
#include "kernels.h"
#include "many_rows_product.h"
#ifdef HEADWISE_PAIRS
#include "bfloat16.h"
#endif

namespace headwise::HEADWISE_ISA {

// Tasks of each key/value head; heads are adjacent.
inline int64_t forward_tasks(const Problem& p) { return blocks_per_kv_head(p); }

template <template <class> class Products, class Element>
inline void forward_any(const Problem& p, const RowBlock& block, void* memory) {
  if (p.statistics) forward_block<Products, Element, true>(p, block, memory);
  else forward_block<Products, Element, false>(p, block, memory);
}

#ifdef HEADWISE_PAIRS
inline int64_t packed_bytes(const Problem& p) {
  return p.bfloat16 && (p.gradients || forward_has_pairs(p)) ? 2 * PackedShape(p).size() : 0;
}
inline int64_t pack_tasks(const Problem& p) { return PackedShape(p).blocks; }
inline void pack(const Problem& p, int64_t task, void* packed, void* memory) {
  const PackedShape shape(p);
  const int64_t unit = p.first_packed + task / shape.blocks, index = task % shape.blocks;
  uint16_t* to = static_cast<uint16_t*>(packed) + task / shape.blocks * shape.size() + index * shape.block_size();
  pack_block(p, unit / p.kv_heads, unit % p.kv_heads, index, to, static_cast<float*>(memory));
}
#else
inline int64_t packed_bytes(const Problem&) { return 0; }
inline int64_t pack_tasks(const Problem&) { return 0; }
inline void pack(const Problem&, int64_t, void*, void*) {}
#endif

inline void forward(const Problem& p, int64_t task, void* memory) {
  const RowBlock block = row_block(p, task);
#ifdef HEADWISE_PAIRS
  if (p.packed) return forward_any<PairProducts, uint16_t>(p, block, memory);
#endif
  if (p.bfloat16) forward_any<FloatProducts, uint16_t>(p, block, memory);
  else forward_any<FloatProducts, float>(p, block, memory);
}

inline int64_t piece_bytes(const Problem& p) {
  return p.bfloat16 ? PieceResult<uint16_t>::bytes(p) : PieceResult<float>::bytes(p);
}
inline void attend_piece(const Problem& p, int64_t unit, int64_t piece, void* result, void* memory) {
  if (p.bfloat16) FewRowsPiece<uint16_t>(p, unit, result, memory).run(piece, piece_count(p));
  else FewRowsPiece<float>(p, unit, result, memory).run(piece, piece_count(p));
}
inline void merge_pieces(const Problem& p, int64_t unit, void* results) {
  if (p.bfloat16) merge_pieces_of<uint16_t>(p, unit, static_cast<char*>(results), piece_count(p));
  else merge_pieces_of<float>(p, unit, static_cast<char*>(results), piece_count(p));
}

inline int64_t backward_memory(const Problem& p) {
#ifdef HEADWISE_PAIRS
  if (p.bfloat16) return GradientTiles<PairGradientProducts, uint16_t>::memory(p);
#endif
  return GradientTiles<FloatGradientProducts, float>::memory(p);
}

inline void backward(const Problem& p, const BackwardTask& task, void* memory) {
#ifdef HEADWISE_PAIRS
  if (p.bfloat16) return backward_task<PairGradientProducts, uint16_t>(p, task, memory);
#endif
  if (p.bfloat16) backward_task<FloatGradientProducts, uint16_t>(p, task, memory);
  else backward_task<FloatGradientProducts, float>(p, task, memory);
}

inline void reduce(const Problem& p, const BackwardTask* tasks, int64_t count, int64_t unit, int64_t part) {
  const KeyRange keys{part * kReducedKeys, smaller((part + 1) * kReducedKeys, p.keys)};
  if (p.bfloat16) reduce_keys<uint16_t>(p, tasks, count, unit, keys);
  else reduce_keys<float>(p, tasks, count, unit, keys);
}

inline int64_t bias_memory(const Problem& p) { return BiasTask<float>::memory(p); }
inline void bias_rows(const Problem& p, int64_t block, void* memory) {
  if (p.bfloat16) write_bias_rows<uint16_t>(p, block, memory);
  else write_bias_rows<float>(p, block, memory);
}
inline void bias(const Problem& p, int64_t task, void* memory) {
  if (p.bfloat16) BiasTask<uint16_t>(p, task, memory).run();
  else BiasTask<float>(p, task, memory).run();
}

inline int64_t linear_tasks(const LinearMap& map) {
  return has_many_rows(map) ? panels(map) * row_parts(map) : few_rows_tasks(map);
}
inline int64_t linear_memory(const LinearMap& map) {
  return has_many_rows(map) ? ManyRowsProduct<float>::memory(map) : 0;
}
inline void linear(const LinearMap& map, int64_t task, void* memory) {
  if (has_many_rows(map) && map.bfloat16) ManyRowsProduct<uint16_t>(map, task, memory).run();
  else if (has_many_rows(map)) ManyRowsProduct<float>(map, task, memory).run();
  else multiply_few_rows(map, task);
}

constexpr Kernels table(const char* name) {
  return {name,         &forward_tasks,   &forward_memory, &forward,         &piece_count,
          &piece_bytes, &attend_piece,    &merge_pieces,   &packed_bytes,    &pack_tasks,
          &pack,        &keys_of_block,   &floats_per_key, &backward_memory, &backward,
          &reduce,      &bias_row_blocks, &bias_rows,      &bias_tasks,      &bias_memory,
          &bias,        &linear_tasks,    &linear_memory,  &linear,          &rotate};
}

}  // namespace headwise::HEADWISE_ISA
