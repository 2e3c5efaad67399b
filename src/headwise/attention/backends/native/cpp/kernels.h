// The kernels of one instruction set, as a table of functions. Each table is made in a source file of its own, which is
// compiled for that instruction set.
#pragma once
#include "problem.h"

namespace headwise {

struct Kernels {
  const char* name;
  // A call is divided into tasks, which write to different rows and can run at the same time. Each needs memory of its
  // own.
  int64_t (*forward_tasks)(const Problem&);
  int64_t (*forward_memory)(const Problem&);
  void (*forward)(const Problem&, int64_t task, void* memory);
};

extern const Kernels avx512_kernels, avx2_kernels, portable_kernels;

}  // namespace headwise
