"""Uniform attention: every visible key has the same weight, so a head's output is the mean of the visible values.

As a replacement of a head's output it shows what the head would compute if it could not choose between keys.
"""

from dataclasses import replace

import torch
from torch import Tensor

from headwise.attention.autocast import without_autocast
from headwise.attention.backend_choice import choose_fastest
from headwise.attention.problem import Problem
from headwise.shapes import Float


def uniform_output(problem: Problem) -> Float[Tensor, "batch heads queries value_dim"]:
    """Return each head's output if every visible key had the same weight: the mean of the visible keys' values.
    A key is visible unless the mask or a bias of -inf hides it. Sinks, talking heads, gate and dropout are left out.
    """
    bias = problem.bias
    if bias is not None:
        bias = torch.zeros_like(bias).masked_fill(bias == -torch.inf, -torch.inf)
    uniform = replace(
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
        return choose_fastest(uniform).run(uniform).out
