#include "parallel.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <vector>

#include "backward_plan.h"
#include "dispatch.h"

namespace headwise {
namespace {

// Memory of one thread. It is kept for the thread's next call, since fresh pages cost more than the work done in them.
class ThreadMemory {
 public:
  ~ThreadMemory() { std::free(memory_); }
  void* get(int64_t bytes) {
    if (bytes > size_) {
      std::free(memory_);
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = std::aligned_alloc(4096, size_t(size_));
      STD_TORCH_CHECK(memory_, "attention needs ", size_, " bytes of memory, which are not available");
    }
    return memory_;
  }
  void release_if_large() {
    if (size_ <= kMostKept) return;
    std::free(memory_);
    memory_ = nullptr, size_ = 0;
  }

 private:
  static constexpr int64_t kMostKept = int64_t(16) << 20;
  void* memory_ = nullptr;
  int64_t size_ = 0;
};

constexpr int64_t kMostPackedBytes = int64_t(32) << 20;

// Run `run(task, memory)` for every task. Threads take the next task when they are done with one: tasks differ in
// length.
template <class Run>
void run_tasks(int64_t tasks, int64_t bytes, Run run) {
  std::atomic<int64_t> next{0};
  const int64_t threads = torch::stable::get_num_threads();
  torch::stable::parallel_for(0, threads < tasks ? threads : tasks, 1, [&](int64_t begin, int64_t end) {
    static thread_local ThreadMemory memory;
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t task; (task = next++) < tasks;) run(task, memory.get(bytes));
    memory.release_if_large();
  });
}

// Pieces of the keys of every key/value head; the thread that computes the last piece of a head merges them.
void run_pieces(const Kernels* kernels, const Problem& p, int64_t pieces) {
  const int64_t units = p.batch * p.kv_heads, bytes = kernels->piece_bytes(p);
  std::vector<std::atomic<int64_t>> left(units);
  for (auto& count : left) count = pieces;
  static thread_local ThreadMemory shared;
  char* const results = static_cast<char*>(shared.get(units * pieces * bytes));
  run_tasks(units * pieces, kernels->forward_memory(p), [&](int64_t task, void* memory) {
    const int64_t unit = task / pieces;
    kernels->attend_piece(p, unit, task % pieces, results + task * bytes, memory);
    if (--left[unit] == 0) kernels->merge_pieces(p, unit, results + unit * pieces * bytes);
  });
  shared.release_if_large();
}

}  // namespace

void run_forward(const Problem& call) {
  const Kernels* kernels = chosen_kernels();
  STD_TORCH_CHECK(kernels, "HEADWISE_NATIVE names an instruction set that is not available here");
  if (call.batch * call.heads * call.queries == 0) return;
  if (const int64_t pieces = kernels->pieces(call)) return run_pieces(kernels, call, pieces);
  Problem p = call;
  const int64_t units = p.batch * p.kv_heads, tasks = kernels->forward_tasks(p), bytes = kernels->forward_memory(p);
  const int64_t packed_bytes = kernels->packed_bytes(p);
  if (!packed_bytes) {
    run_tasks(units * tasks, bytes, [&](int64_t task, void* memory) { kernels->forward(p, task, memory); });
    return;
  }
  // Some key/value heads at a time, so that their copies stay small.
  const int64_t most = std::clamp<int64_t>(kMostPackedBytes / packed_bytes, 1, units);
  static thread_local ThreadMemory shared;
  void* packed = shared.get(most * packed_bytes);
  p.packed = packed;
  for (p.first_packed = 0; p.first_packed < units; p.first_packed += most) {
    const int64_t count = std::min(most, units - p.first_packed);
    run_tasks(count * kernels->pack_tasks(p), bytes,
              [&](int64_t task, void* memory) { kernels->pack(p, task, packed, memory); });
    run_tasks(count * tasks, bytes,
              [&](int64_t task, void* memory) { kernels->forward(p, p.first_packed * tasks + task, memory); });
  }
  shared.release_if_large();
}

void run_backward(const Problem& call) {
  const Kernels* kernels = chosen_kernels();
  STD_TORCH_CHECK(kernels, "HEADWISE_NATIVE names an instruction set that is not available here");
  Problem p = call;
  const int64_t units = p.batch * p.kv_heads, blocks = kernels->forward_tasks(p);
  if (units == 0) return;
  const int64_t packed_bytes = kernels->packed_bytes(p), bytes = kernels->backward_memory(p);
  std::vector<KeyRange> keys(size_t(units * blocks));
  run_tasks(units * blocks, 64, [&](int64_t block, void*) { keys[block] = kernels->keys_of_block(p, block); });
  BackwardPlan plan(keys, units, kernels->floats_per_key(p), packed_bytes);
  const int64_t parts = (p.keys + kReducedKeys - 1) / kReducedKeys;
  static thread_local ThreadMemory shared;
  char* packed = static_cast<char*>(shared.get(plan.bytes()));
  if (packed_bytes) p.packed = packed;
  for (const BackwardPlan::Group& group : plan.groups()) {
    p.first_packed = group.first;
    const int64_t count = group.last - group.first;
    run_tasks(packed_bytes ? count * kernels->pack_tasks(p) : 0, bytes,
              [&](int64_t task, void* memory) { kernels->pack(p, task, packed, memory); });
    BackwardTask* tasks = plan.place(group, packed + count * packed_bytes);
    run_tasks(plan.first_task(group.last) - plan.first_task(group.first), bytes,
              [&](int64_t task, void* memory) { kernels->backward(p, tasks[task], memory); });
    run_tasks(count * parts, 64, [&](int64_t task, void*) {
      const int64_t unit = group.first + task / parts, first = plan.first_task(unit);
      kernels->reduce(p, tasks + first - plan.first_task(group.first), plan.first_task(unit + 1) - first, unit,
                      task % parts);
    });
  }
  shared.release_if_large();
}

void run_bias_gradient(const Problem& call) {
  const Kernels* kernels = chosen_kernels();
  STD_TORCH_CHECK(kernels, "HEADWISE_NATIVE names an instruction set that is not available here");
  Problem p = call;
  Gradients gradients = *call.gradients;
  p.gradients = &gradients;
  const int64_t blocks = kernels->bias_row_blocks(p), bytes = kernels->bias_memory(p);
  std::vector<float> rows(size_t(blocks ? kBiasRowNumbers * p.batch * p.heads * p.queries : 0));
  if (blocks) gradients.bias_rows = rows.data();
  run_tasks(blocks, bytes, [&](int64_t block, void* memory) { kernels->bias_rows(p, block, memory); });
  run_tasks(kernels->bias_tasks(p), bytes, [&](int64_t task, void* memory) { kernels->bias(p, task, memory); });
}

void run_linear(const LinearMap& call) {
  const Kernels* kernels = chosen_kernels();
  STD_TORCH_CHECK(kernels, "HEADWISE_NATIVE names an instruction set that is not available here");
  LinearMap map = call;
  map.threads = torch::stable::get_num_threads();
  run_tasks(kernels->linear_tasks(map), kernels->linear_memory(map),
            [&](int64_t task, void* memory) { kernels->linear(map, task, memory); });
}

void run_rotation(const Rotation& rotation) {
  const Kernels* kernels = chosen_kernels();
  STD_TORCH_CHECK(kernels, "HEADWISE_NATIVE names an instruction set that is not available here");
  kernels->rotate(rotation);
}

}  // namespace headwise
