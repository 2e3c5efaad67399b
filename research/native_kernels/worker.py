"""A process whose kernels use one instruction set. It computes results for the process that judges them."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context

import numpy as np
import torch

from headwise.attention.backends.native import installed, library
from research.native_kernels.problems import Draw, draw_problem
from research.native_kernels.results import Results, native_results

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Arrays = dict[str, np.ndarray]
"""Results as arrays in float32, which are sent from process to process without shared memory."""


class Worker:
    """Process of one instruction set, and the first results of problems that it computes in advance."""

    def __init__(self, instruction_set: str) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _start, (instruction_set,))
        self._first: dict[tuple[int, str], Future[Arrays]] = {}

    def why_not(self) -> str | None:
        """Return the reason that the kernels cannot run in this process; None if they can."""
        return self._pool.submit(library.load).result()

    def prepare(self, seed: int, dtype: str) -> None:
        """Begin to compute the first set of values of a problem."""
        self._first[seed, dtype] = self._pool.submit(_compute, seed, dtype, Draw(0))

    def compute(self, seed: int, dtype: str, draws: list[Draw]) -> Iterator[Results]:
        """Yield the results of a problem for each of some draws, while the process computes the next ones."""
        first = self._first.pop((seed, dtype), None)  # the problem is judged by this draw before it is by others
        prepared = [] if first is None else [first]
        futures = [self._pool.submit(_compute, seed, dtype, draw) for draw in draws[len(prepared) :]]
        for future in prepared + futures:
            yield {name: torch.from_numpy(array) for name, array in future.result().items()}

    def stop(self) -> None:
        """End the process."""
        self._pool.shutdown()


def _start(instruction_set: str) -> None:
    """Choose the instruction set of a new process, before it loads the kernels."""
    os.environ[installed.VARIABLE] = instruction_set
    torch.set_num_threads(1)


_problem = lru_cache(64)(draw_problem)


def _compute(seed: int, dtype: str, draw: Draw) -> Arrays:
    """Return the results of the problem of a seed for a draw of its values."""
    results = native_results(_problem(seed), DTYPES[dtype], draw)
    return {name: result.float().numpy() for name, result in results.items()}
