"""Work of one process of the comparison, which runs the Triton kernels in Triton's interpreter."""

import os

SEEDS_AT_ONCE = 20
"""Seeds that a process compares at a time."""


def start() -> None:
    """Choose Triton's interpreter in a new process, before it imports the kernels."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)


def compare_seeds(first: int) -> dict:
    """Return the agreements of the calls that are drawn with `SEEDS_AT_ONCE` seeds."""
    from research.statistics_operator.agreement import compare

    return compare(range(first, first + SEEDS_AT_ONCE))
