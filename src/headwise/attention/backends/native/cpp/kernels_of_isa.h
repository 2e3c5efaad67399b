// Fills the table of kernels of the instruction set that this file is compiled for.
#pragma once
#include "forward.h"
#include "kernels.h"

namespace headwise::HEADWISE_ISA {

inline int64_t forward_tasks(const Problem& p) { return p.batch * p.kv_heads * blocks_per_kv_head(p); }

template <class Element>
inline void forward_any(const Problem& p, const RowBlock& block, void* memory) {
  if (p.statistics) forward_block<FloatProducts, Element, true>(p, block, memory);
  else forward_block<FloatProducts, Element, false>(p, block, memory);
}

inline void forward(const Problem& p, int64_t task, void* memory) {
  const RowBlock block = row_block(p, task);
  if (p.bfloat16) forward_any<uint16_t>(p, block, memory);
  else forward_any<float>(p, block, memory);
}

}  // namespace headwise::HEADWISE_ISA
