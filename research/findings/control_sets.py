"""Random sets of heads, with which the induction heads are compared."""

import math
import random
from collections import Counter

SETS, FEWER = 100, 50
"""Number of random sets of each kind, and of those that are measured on text and with replacement by means."""

KINDS = ("anywhere", "same layers")
SEED = 0

Heads = list[tuple[int, int]]


def with_controls(heads: Heads, all_heads: Heads, number: int = SETS) -> dict[str, Heads]:
    """Return the given heads as "induction", and `number` random sets of as many other heads of each kind: "anywhere
    N", from all layers, and "same layers N", with as many heads in each layer. No two sets of a kind are equal. With a
    smaller number, the sets are the first ones.

    Raises:
        ValueError: there are fewer different sets.
    """
    others = [head for head in all_heads if head not in heads]
    of_layers, others_of = Counter(layer for layer, _ in heads), Counter(layer for layer, _ in others)
    different = math.prod(math.comb(others_of[layer], count) for layer, count in of_layers.items())
    if different < number:
        raise ValueError(f"expected at least {number} different sets of heads in the same layers, got {different}")
    sets = {"induction": heads}
    for kind in KINDS:
        generator = random.Random(f"{SEED} {kind}")
        drawn: list[Heads] = []
        while len(drawn) < number:
            if kind == "anywhere":
                chosen = generator.sample(others, len(heads))
            else:
                chosen = []
                for layer, count in sorted(of_layers.items()):
                    chosen += generator.sample([head for head in others if head[0] == layer], count)
            if sorted(chosen) not in drawn:
                drawn.append(sorted(chosen))
        sets |= {f"{kind} {index}": chosen for index, chosen in enumerate(drawn)}
    return sets
