"""Several processes that share the work, as torchrun starts them; or one."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch

from headwise.errors import HeadwiseError, InputError

TIMEOUT = timedelta(days=7)
"""How long one waits for the others, whose part may be the longer one after a run that was stopped."""

Result = TypeVar("Result")


def rank_and_world_size() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def gather_from_ranks(part: Result) -> list[Result]:
    """What each process has, in their order."""
    parts: list[Any] = [part]
    if rank_and_world_size()[1] > 1:
        parts = [None] * rank_and_world_size()[1]
        torch.distributed.all_gather_object(parts, part)
    return parts


def broadcast_from_rank0(action: Callable[[], Result]) -> Result:
    """What the first process comes to, in all of them; a refusal as well."""
    rank, number = rank_and_world_size()
    if number == 1:
        return action()
    shared: list[Any] = [None, None]  # what it comes to, or why it does not
    refused: HeadwiseError | None = None
    if rank == 0:
        try:
            shared[0] = action()
        except HeadwiseError as error:
            refused, shared[1] = error, str(error)
    torch.distributed.broadcast_object_list(shared)
    if shared[1] is not None:
        raise refused or HeadwiseError(shared[1])
    result: Result = shared[0]
    return result


class LocalProcess(NamedTuple):
    """This process, under the command line."""

    first: bool
    local: int

    def device(self, name: str | None) -> torch.device:
        """What it runs on: the one that is named, or a GPU of its own, or the CPU."""
        if name is None:
            name = f"cuda:{self.local % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
        return usable_device(name)


def usable_device(device: torch.device | str) -> torch.device:
    """A device on which there can be a tensor. `InputError` for another."""
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError, NotImplementedError):  # torch has an error for each kind of device
        raise InputError("device", expected="a device that torch can use", got=repr(str(device))) from None


@contextmanager
def process_group() -> Iterator[LocalProcess]:
    """Meet the other processes that torchrun started, if it did; the first speaks for all."""
    number, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if number == 1:
        yield LocalProcess(True, local)
        return
    torch.distributed.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield LocalProcess(torch.distributed.get_rank() == 0, local)
    finally:
        torch.distributed.destroy_process_group()
