// The kernels for 64-bit Arm processors with products of bfloat16 pairs.
#define HEADWISE_ISA neon_bf16
#define HEADWISE_PAIRS "pairs_neon_bf16.h"
// clang-format off
#include "vector_neon.h"
#include "arithmetic.h"
#include "kernels_of_isa.h"
// clang-format on

namespace headwise {

const Kernels neon_bf16_kernels = neon_bf16::table("neon_bf16");

}  // namespace headwise
