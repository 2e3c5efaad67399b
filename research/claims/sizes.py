"""Sizes of the measurements: tiny (a test of the code), default, and full."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Amounts of training, data and timing.

    Attributes:
        name: tiny, default or full.
        steps: number of steps of each training.
        seeds: number of trainings of each setting, after the search for a learning rate.
        trials: number of learning rates that are tried for each setting.
        heads: numbers of heads that are compared, as far as the width allows.
        held_out: number of held-out batches.
        rounds: number of samples of each timing.
        width: of the layers that are timed.
        lengths: pairs of batch and length of the layers that are timed.
        sequences: number of sequences for the real models.
        tokens: number of tokens of each of these sequences.
        models: names of the real models.
        drawn: number of random sets of heads that are removed, for each size of the set.
        large: whether the larger models are trained too.
    """

    name: str
    steps: int
    seeds: int
    trials: int
    heads: tuple[int, ...]
    held_out: int
    rounds: int
    width: int
    lengths: tuple[tuple[int, int], ...]
    sequences: int
    tokens: int
    models: tuple[str, ...]
    drawn: int
    large: bool


BOTH = ("minilm", "smollm2")

SIZES = {
    "tiny": Size("tiny", 12, 2, 1, (1, 4, 8, 16), 2, 3, 64, ((2, 16),), 2, 32, BOTH[:1], 2, large=False),
    "default": Size(
        "default", 650, 4, 3, (1, 2, 4, 8, 16, 32), 16, 11, 512, ((8, 128), (1, 1024)), 6, 64, BOTH, 6, large=False
    ),
    "full": Size(
        "full", 2000, 5, 4, (1, 2, 4, 8, 16, 32), 32, 41, 512, ((8, 128), (1, 1024)), 16, 256, BOTH, 12, large=True
    ),
}
