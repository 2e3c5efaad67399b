#include "dispatch.h"

#include <cstdlib>
#include <cstring>

namespace headwise {
namespace {

struct Candidate {
  const Kernels* kernels;
  bool is_supported;
};

const Kernels* choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const Candidate candidates[] = {{&avx512_kernels, has_avx512}, {&avx2_kernels, has_avx2}, {&portable_kernels, true}};
#else
  const Candidate candidates[] = {{&portable_kernels, true}};
#endif
  const char* wanted = std::getenv("HEADWISE_NATIVE");
  for (const Candidate& candidate : candidates)
    if (candidate.is_supported && (!wanted || !*wanted || !std::strcmp(wanted, candidate.kernels->name)))
      return candidate.kernels;
  return nullptr;
}

}  // namespace

const Kernels* chosen_kernels() {
  static const Kernels* const kernels = choose();
  return kernels;
}

}  // namespace headwise
