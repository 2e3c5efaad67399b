// Runs the tasks of a call on torch's threads.
#pragma once
#include "linear_map.h"
#include "problem.h"
#include "rotation.h"

namespace headwise {

void run_forward(const Problem& call);

// The backward pass of a problem with `gradients`.
void run_backward(const Problem& call);

// The gradient of the bias of such a problem.
void run_bias_gradient(const Problem& call);

void run_linear(const LinearMap& call);

void run_rotation(const Rotation& rotation);

}  // namespace headwise
