"""A small data set for passes of the tiny models, and runs that are interrupted or shared by two processes."""

import math
import multiprocessing
import pickle
from pathlib import Path

import torch

import headwise as hw
import tiny

TEXTS = tiny.texts(11, 5, 23, 7, 11, 2, 11)
"""Seven documents; as sequences of equal length, at most two at a time, they are six batches."""

REPEATS = hw.random_repeats(97, tokens=5, times=2, samples=2)
"""Random tokens that repeat, fewer than by default, so that runs are short."""


def texts(kind="decoder", **options):
    """Return the documents as sequences of a tiny model, in batches of two by default."""
    return hw.Texts(TEXTS, tiny.tokenizer(kind), **{"batch": 2} | options)


def run(model, out, dataset=None, **options):
    """Profile a model on the documents, with the output folder `out`."""
    return hw.profile(model, texts() if dataset is None else dataset, out=out, **{"repeats": REPEATS} | options)


def contents(folder):
    """Return the bytes of every file in a folder, and in the folders there, by its path."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def values(profile):
    """Return every number of a profile, with None for NaN so that equal profiles have equal lists."""
    return [
        [None if isinstance(number, float) and math.isnan(number) else number for number in estimate]
        for head in profile.heads
        for estimate in head.statistics.values()
    ]


class Interrupted(BaseException):
    """Stands for a key press or signal that ends a run."""


def interrupt_after(model, batches):
    """Make a model raise `Interrupted` in the middle of the forward pass after `batches` complete ones.

    Returns:
        the handle that removes the hook, and a list with one item per forward pass that has begun.
    """
    begun = []

    def hook(*_):
        begun.append(None)
        if len(begun) > batches:
            raise Interrupted

    return model.layers[1].register_forward_pre_hook(hook), begun


def results_of_two_processes(action, folder):
    """Return the results of a function of the rank in two processes of one group, in the order of the ranks."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_as_one_of_two, args=(action, rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


def _as_one_of_two(action, rank, folder):
    """Call a function as one of two processes, and write its result."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(action(rank)))
    torch.distributed.destroy_process_group()
