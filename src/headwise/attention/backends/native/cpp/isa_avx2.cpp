// The kernels for AVX2.
#define HEADWISE_ISA avx2
// clang-format off
#include "vector_avx2.h"
#include "arithmetic.h"
#include "kernels_of_isa.h"
// clang-format on

namespace headwise {

const Kernels avx2_kernels = avx2::table("avx2");

}  // namespace headwise
