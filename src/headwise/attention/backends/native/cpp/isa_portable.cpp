// The kernels for any 64-bit processor.
#define HEADWISE_ISA portable
// clang-format off
#include "vector_portable.h"
#include "arithmetic.h"
#include "kernels_of_isa.h"
// clang-format on

namespace headwise {

const Kernels portable_kernels = portable::table("portable");

}  // namespace headwise
