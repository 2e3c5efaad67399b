// Division of the backward pass into tasks, and of its memory.
#pragma once
#include <algorithm>
#include <vector>

#include "problem.h"

namespace headwise {

// Runs of row blocks with about the same number of visible keys. Key/value heads are computed in groups, whose sums and
// copies of keys and values exist at the same time. Everything depends on sizes and masks only, so that the order of
// all sums is the same for any number of threads.
class BackwardPlan {
 public:
  struct Group {
    int64_t first, last;  // key/value heads
  };

  // `keys`: the keys of each row block, head by head. `unit_bytes`: bytes of the copies for each head.
  BackwardPlan(const std::vector<KeyRange>& keys, int64_t units, int64_t floats_per_key, int64_t unit_bytes)
      : floats_per_key_(floats_per_key) {
    const int64_t blocks = units ? int64_t(keys.size()) / units : 0;
    first_task_.push_back(0);
    int64_t used = kMostBytes + 1;
    for (int64_t unit = 0; unit < units; ++unit) {
      // As many heads at a time as fit with one task each; of more tasks for each head, as many as fit then.
      int64_t size = add_tasks(keys, unit * blocks, blocks, 1) + unit_bytes;
      const int64_t at_a_time = std::clamp<int64_t>(kMostBytes / (size + 1), 1, units);
      const int64_t share = std::max(kMostBytes / at_a_time, size);
      for (int64_t splits = (kTasksWanted + at_a_time - 1) / at_a_time; splits > 0; splits /= 2) {
        tasks_.resize(size_t(first_task_.back()));
        size = add_tasks(keys, unit * blocks, blocks, splits) + unit_bytes;
        if (size <= share) break;
      }
      first_task_.push_back(int64_t(tasks_.size()));
      if (used + size > kMostBytes) groups_.push_back({unit, unit}), used = 0;
      groups_.back().last = unit + 1;
      used += size;
      bytes_ = std::max(bytes_, used);
    }
  }

  const std::vector<Group>& groups() const { return groups_; }
  int64_t bytes() const { return bytes_; }  // of the largest group
  int64_t first_task(int64_t unit) const { return first_task_[size_t(unit)]; }

  // Let the tasks of a group use `memory` for their sums; return the first of them.
  BackwardTask* place(const Group& group, char* memory) {
    for (int64_t task = first_task(group.first); task < first_task(group.last); ++task) {
      tasks_[size_t(task)].sums = reinterpret_cast<float*>(memory);
      memory += bytes_of(tasks_[size_t(task)]);
    }
    return tasks_.data() + first_task(group.first);
  }

 private:
  static constexpr int64_t kTasksWanted = 8, kMostBytes = int64_t(48) << 20;
  static constexpr int64_t kWorkOfBlock = 32;  // work of a block that does not depend on its keys, in keys

  int64_t bytes_of(const BackwardTask& task) const {
    return (task.keys.end - task.keys.begin) * floats_per_key_ * int64_t(sizeof(float));
  }

  // Append the tasks of one head, with about the same work; return the bytes of their sums.
  int64_t add_tasks(const std::vector<KeyRange>& keys, int64_t first, int64_t blocks, int64_t count) {
    int64_t total = 0, done = 0, bytes = 0, block = first;
    for (int64_t n = 0; n < blocks; ++n) total += work_of(keys[size_t(first + n)]);
    for (int64_t part = 1; block < first + blocks; ++part) {
      BackwardTask task{block, block, {0, 0}, nullptr};
      do {
        const KeyRange range = keys[size_t(block)];
        if (task.keys.empty()) task.keys = range;
        if (!range.empty()) task.keys = {std::min(task.keys.begin, range.begin), std::max(task.keys.end, range.end)};
        done += work_of(range);
        task.last = ++block;
      } while (block < first + blocks && done * count < total * part);
      bytes += bytes_of(task);
      tasks_.push_back(task);
    }
    return bytes;
  }
  static int64_t work_of(KeyRange keys) { return keys.end - keys.begin + kWorkOfBlock; }

  int64_t floats_per_key_, bytes_ = 0;
  std::vector<BackwardTask> tasks_;
  std::vector<int64_t> first_task_;  // of each head, and the end
  std::vector<Group> groups_;
};

}  // namespace headwise
