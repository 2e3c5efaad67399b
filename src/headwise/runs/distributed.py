"""Work shared by several processes, as torchrun starts them; a single process needs no setup."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch

from headwise.checks import device_argument
from headwise.errors import HeadwiseError

TIMEOUT = timedelta(days=7)
"""Longest wait of a process for the others: after a resumed run one of them may have most of the work left."""

ResultT = TypeVar("ResultT")


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process and the number of processes: (0, 1) without torch.distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def gather_from_ranks(part: ResultT) -> list[ResultT]:
    """Collect one value from every process. Return the list of all values, ordered by rank, on every process."""
    parts: list[Any] = [part]
    world_size = rank_and_world_size()[1]
    if world_size > 1:
        parts = [None] * world_size
        torch.distributed.all_gather_object(parts, part)
    return parts


def broadcast_from_rank0(action: Callable[[], ResultT]) -> ResultT:
    """Call `action` on the process of rank 0 only, and return its result on every process. If `action` raises a
    `HeadwiseError`, every process raises one, so that no process waits forever.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return action()
    result_and_message: list[Any] = [None, None]
    error: HeadwiseError | None = None
    if rank == 0:
        try:
            result_and_message[0] = action()
        except HeadwiseError as raised:
            error, result_and_message[1] = raised, str(raised)
    torch.distributed.broadcast_object_list(result_and_message)
    result, message = result_and_message
    if message is not None:
        raise error or HeadwiseError(message)
    shared: ResultT = result
    return shared


class LocalProcess(NamedTuple):
    """Position of this process among the processes that torchrun started: `is_first` is True for rank 0, and
    `local_rank` is the rank on this machine.
    """

    is_first: bool
    local_rank: int

    def device(self, name: str | None) -> torch.device:
        """Return the torch device called `name`; raise `InputError` if torch cannot use it. By default return a GPU, or
        the CPU if there is no GPU. The processes on this machine get different GPUs, as far as there are enough.
        """
        if name is None:
            has_gpu = torch.cuda.is_available()
            name = f"cuda:{self.local_rank % torch.cuda.device_count()}" if has_gpu else "cpu"
        return device_argument("device", name)


@contextmanager
def process_group() -> Iterator[LocalProcess]:
    """While the context is open, join torch's process group if torchrun has started several processes. Yield this
    process's position among them.
    """
    world_size, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if world_size == 1:
        yield LocalProcess(True, local_rank)
        return
    torch.distributed.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield LocalProcess(torch.distributed.get_rank() == 0, local_rank)
    finally:
        torch.distributed.destroy_process_group()
