// The kernels for 64-bit Arm processors.
#define HEADWISE_ISA neon
// clang-format off
#include "vector_neon.h"
#include "arithmetic.h"
#include "kernels_of_isa.h"
// clang-format on

namespace headwise {

const Kernels neon_kernels = neon::table("neon");

}  // namespace headwise
