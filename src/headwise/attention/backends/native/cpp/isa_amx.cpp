// The kernels for AVX-512 with the matrix unit AMX.
#define HEADWISE_ISA amx
#define HEADWISE_PAIRS "pairs_amx.h"
// clang-format off
#include "vector_avx512.h"
#include "arithmetic.h"
#include "kernels_of_isa.h"
// clang-format on

namespace headwise {

const Kernels amx_kernels = amx::table("amx");

}  // namespace headwise
