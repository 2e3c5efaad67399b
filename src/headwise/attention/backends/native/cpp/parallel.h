// Runs the tasks of a call on torch's threads.
#pragma once
#include "problem.h"

namespace headwise {

void run_forward(const Problem& p);

void run_backward(const Problem& p, const Gradients& gradients);

}  // namespace headwise
