// Choice of the instruction set at run time.
#pragma once
#include "kernels.h"

namespace headwise {

// The kernels of the best instruction set that this library has and this processor supports, or of the one that the
// environment variable HEADWISE_NATIVE names. Null if that one is not available here.
const Kernels* chosen_kernels();

}  // namespace headwise
