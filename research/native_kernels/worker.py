"""Work of one process, whose kernels use one instruction set."""

import os

import torch

from headwise.attention.backends.native import library
from research.native_kernels.judge import Verdict, judge
from research.native_kernels.problems import draw_problem

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def start_worker(instruction_set: str) -> None:
    """Choose the instruction set of a new process, before it loads the kernels."""
    os.environ[library.VARIABLE] = instruction_set
    torch.set_num_threads(1)


def judge_seeds(seeds: range, dtype: str) -> list[Verdict]:
    """Return the verdicts on the problems of some seeds."""
    return [judge(draw_problem(seed), DTYPES[dtype]) for seed in seeds]


def missing(_: None) -> str | None:
    """Return the reason that the kernels of this process cannot run; None if they can."""
    return library.load()
