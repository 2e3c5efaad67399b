"""Heads that a user chooses for a plot."""

from typing import Any

from headwise.checks import collection_of, head_pair


def head_pairs(heads: Any) -> list[tuple[int, int]]:
    """Return heads as pairs of layer and head.

    Raises:
        InputError: not a collection of pairs.
    """
    of = "heads (layer, head)"
    return [head_pair("heads", head, of=of) for head in collection_of("heads", heads, of=of)]
