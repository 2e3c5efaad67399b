// The kernels of one instruction set, as a table of functions. Each table is made in a source file of its own, which is
// compiled for that instruction set.
#pragma once
#include "linear_map.h"
#include "problem.h"
#include "rotation.h"

namespace headwise {

struct Kernels {
  const char* name;
  // A call is divided into tasks, which write to different rows and can run at the same time. Each needs memory of its
  // own.
  int64_t (*forward_tasks)(const Problem&);
  int64_t (*forward_memory)(const Problem&);
  void (*forward)(const Problem&, int64_t task, void* memory);
  // With few rows, a call is divided into pieces of the keys instead: their number for each key/value head, 0 if the
  // call has too many rows, the bytes of the result of each piece, and functions that compute a piece and that merge
  // all pieces of a head, `unit` of (batch, kv_heads), whose results are adjacent.
  int64_t (*pieces)(const Problem&);
  int64_t (*piece_bytes)(const Problem&);
  void (*attend_piece)(const Problem&, int64_t unit, int64_t piece, void* result, void* memory);
  void (*merge_pieces)(const Problem&, int64_t unit, void* results);
  // Copies of the keys and values of one key/value head in the layout of the products: their size, 0 if none are
  // needed, and a function that makes a part of them, with the same memory.
  int64_t (*packed_bytes)(const Problem&);
  int64_t (*pack_tasks)(const Problem&);
  void (*pack)(const Problem&, int64_t task, void* packed, void* memory);
  // The backward pass: the keys of each row block, of `forward_tasks` for each key/value head, the floats of a task's
  // sums for each key, the task itself, and the sum of the tasks of one key/value head for `kReducedKeys` keys.
  KeyRange (*keys_of_block)(const Problem&, int64_t block);
  int64_t (*floats_per_key)(const Problem&);
  int64_t (*backward_memory)(const Problem&);
  void (*backward)(const Problem&, const BackwardTask& task, void* memory);
  void (*reduce)(const Problem&, const BackwardTask* tasks, int64_t count, int64_t unit, int64_t part);
  // The gradient of the bias. Before its tasks run, numbers of the rows of each of these blocks are computed, with the
  // same memory.
  int64_t (*bias_row_blocks)(const Problem&);
  void (*bias_rows)(const Problem&, int64_t block, void* memory);
  int64_t (*bias_tasks)(const Problem&);
  int64_t (*bias_memory)(const Problem&);
  void (*bias)(const Problem&, int64_t task, void* memory);
  // A linear map.
  int64_t (*linear_tasks)(const LinearMap&);
  int64_t (*linear_memory)(const LinearMap&);
  void (*linear)(const LinearMap&, int64_t task, void* memory);
  // A rotation of few tokens.
  void (*rotate)(const Rotation&);
};

constexpr int64_t kReducedKeys = 256;

extern const Kernels amx_kernels, avx512_bf16_kernels, avx512_kernels, avx2_kernels;
extern const Kernels neon_bf16_kernels, neon_kernels;
extern const Kernels portable_kernels;

}  // namespace headwise
