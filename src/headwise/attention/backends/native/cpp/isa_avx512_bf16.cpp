// The kernels for AVX-512 with products of bfloat16 pairs.
#define HEADWISE_ISA avx512_bf16
#define HEADWISE_PAIRS "pairs_avx512_bf16.h"
// clang-format off
#include "vector_avx512.h"
#include "arithmetic.h"
#include "kernels_of_isa.h"
// clang-format on

namespace headwise {

const Kernels avx512_bf16_kernels = avx512_bf16::table("avx512_bf16");

}  // namespace headwise
