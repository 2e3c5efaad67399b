"""Uniform attention: every visible key has the same weight, so a head's output is the mean of the visible values.

As a replacement of a head's output it shows what the head would compute if it could not choose between keys.
"""

from torch import Tensor

from headwise.attention.autocast import without_autocast
from headwise.attention.backend_choice import choose_fastest
from headwise.attention.nonfinite import run_contained
from headwise.attention.problem import Problem
from headwise.shapes import Float


def uniform_output(problem: Problem) -> Float[Tensor, "batch heads queries value_dim"]:
    """Return each head's output if every visible key had the same weight: the mean of the visible keys' values.
    A key is visible unless the mask or a bias of -inf hides it. Sinks, talking heads, gate and dropout are left out.
    """
    uniform = problem.with_uniform_weights()
    with without_autocast(problem.q.device):
        return run_contained(uniform, choose_fastest(uniform).run).out
