"""How much is measured: tiny to try the code, the default, and more."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """The numbers on which the time depends.

    Attributes:
        steps: of each training.
        seeds: trainings of each setting, after the search for a learning rate.
        trials: learning rates that are tried for each setting.
        heads: numbers of heads that are compared, where the width allows.
        held_out: batches to judge by.
        rounds: of timing.
        width: of the layers that are timed; their (batch, length) are `lengths`.
        sequences: of which the heads of real models are compared, and tokens of each.
        models: real ones.
        drawn: random sets of heads that are removed, of each number.
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
