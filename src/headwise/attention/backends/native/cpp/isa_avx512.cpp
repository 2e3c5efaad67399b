// The kernels for AVX-512.
#define HEADWISE_ISA avx512
// clang-format off
#include "vector_avx512.h"
#include "arithmetic.h"
#include "kernels_of_isa.h"
// clang-format on

namespace headwise {

const Kernels avx512_kernels = avx512::table("avx512");

}  // namespace headwise
