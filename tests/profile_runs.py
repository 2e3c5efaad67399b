"""A small data set for profiles of the tiny models, and runs that are interrupted."""

import math
from pathlib import Path

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
    """Return the bytes of every file in a folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


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
