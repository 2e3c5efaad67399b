#include "dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <cstdlib>
#include <cstring>

namespace headwise {
namespace {

struct Candidate {
  const Kernels* kernels;
  bool is_supported;
};

#if defined(__x86_64__)
// True if the processor has AMX with bfloat16, and Linux lets this process use its registers, which a process must ask
// for (Linux, Documentation/arch/x86/xstate.rst).
bool may_use_amx() {
  unsigned eax, ebx, ecx, edx;
  if (!__builtin_cpu_supports("avx512bf16") || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const bool has_tiles = edx >> 24 & 1, has_bfloat16 = edx >> 22 & 1;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return has_tiles && has_bfloat16 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

const Kernels* choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const Candidate candidates[] = {{&amx_kernels, has_avx512 && may_use_amx()},
                                  {&avx512_bf16_kernels, has_avx512 && __builtin_cpu_supports("avx512bf16")},
                                  {&avx512_kernels, has_avx512},
                                  {&avx2_kernels, has_avx2},
                                  {&portable_kernels, true}};
#elif defined(__aarch64__)
  constexpr unsigned long kBfloat16 = 1 << 14;  // HWCAP2_BF16 (Linux, Documentation/arch/arm64/elf_hwcaps.rst)
  const Candidate candidates[] = {
      {&neon_bf16_kernels, (getauxval(AT_HWCAP2) & kBfloat16) != 0}, {&neon_kernels, true}, {&portable_kernels, true}};
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
