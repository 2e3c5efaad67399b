"""Even attention: each query gives all keys that it may see the same weight, so a head gives the mean of their values.

What a head would do if it could not choose: a gate puts it in the place of a head's own output.
"""

from dataclasses import replace

import torch
from torch import Tensor

from headwise.attention.autocast import without_autocast
from headwise.attention.backend_choice import choose_fastest
from headwise.attention.problem import Problem
from headwise.shapes import Float


def uniform_output(problem: Problem) -> Float[Tensor, "batch heads queries value_dim"]:
    """The output of a problem whose scores are all alike; what forbids keys, by a mask or by -inf, still does."""
    bias = problem.bias
    if bias is not None:
        bias = torch.zeros_like(bias).masked_fill(bias == -torch.inf, -torch.inf)
    alike = replace(
        problem,
        q=torch.zeros_like(problem.q),
        bias=bias,
        scale=1.0,
        softcap=None,
        sinks=None,
        talking=None,
        gate=None,
        dropout=0.0,
        return_lse=False,
        return_weights=False,
    )
    with without_autocast(problem.q.device):
        return choose_fastest(alike).run(alike).out
