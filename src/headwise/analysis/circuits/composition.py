"""Composition scores of heads: how much of what a head writes is read by the queries, keys and values of later heads.

All products are computed from factors. With the QR decompositions `B^T = Q S` and `D^T = P T`, the norm of
`B^T (A C) D` is that of `S (A C) T^T`, a matrix of head_dim by head_dim.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.circuits.composition_table import Composition, head_pairs
from headwise.analysis.circuits.matrices import CircuitMatrices
from headwise.analysis.circuits.scores import available
from headwise.errors import InputError
from headwise.progress import ProgressBar, progress_bar
from headwise.settings import COMPOSITION_KINDS
from headwise.shapes import Float

DRAWS = 64
"""Number of pairs of random matrices whose scores give the standard deviation of random scores."""


class ComposingHeads(NamedTuple):
    """Factors of the heads of one module, reduced so that products with them have the norms of the whole matrices.

    Attributes:
        readers: for each kind of composition, what the heads read, `(heads, rank, width)`.
        written: what they write, `(heads, width, rank)`.
    """

    readers: Mapping[str, Float[Tensor, "heads rank width"]]
    written: Float[Tensor, "heads width rank"]


def composing_heads(
    ov: tuple[Tensor, Tensor], qk: tuple[Tensor, Tensor] | None, kinds: Sequence[str] = COMPOSITION_KINDS
) -> ComposingHeads:
    """Return the reduced factors of heads, from the factors `(heads, width, rank)` and `(heads, rank, width)` of their
    OV and QK matrices; `qk` is None if only "v" is needed.
    """
    output, value = ov
    readers = {"v": _triangle(output) @ value}
    if qk is not None:
        query, key = qk
        readers |= {"q": _triangle(key.mT) @ query.mT, "k": _triangle(query) @ key}
    return ComposingHeads({kind: readers[kind] for kind in kinds}, output @ _triangle(value.mT).mT)


def _triangle(matrix: Float[Tensor, "heads width rank"]) -> Float[Tensor, "heads rank rank"]:
    """Return the triangular factor of the QR decomposition, which has the same products of columns."""
    triangle: Tensor = torch.linalg.qr(matrix, mode="r").R
    return triangle


def composition_scores(
    later: Float[Tensor, "later rank width"], written: Float[Tensor, "earlier width rank"]
) -> Float[Tensor, "later earlier"]:
    """Return the composition score of every later with every earlier head, from reduced factors: the norm of the
    product, divided by the product of the norms.
    """
    flat = later.flatten(0, 1) @ written.movedim(0, 1).flatten(1)
    squares = flat.square().view(*later.shape[:2], written.shape[0], written.shape[2]).sum((1, 3))
    norms = later.flatten(1).norm(dim=1)[:, None] * written.flatten(1).norm(dim=1)
    scores: Tensor = squares.sqrt() / norms
    return scores


def composition_table(circuits: CircuitMatrices, kinds: Sequence[str], distance: int) -> Composition:
    """Return the composition scores `kinds` of all pairs of heads of different layers, or of all kinds that the model
    has.

    Raises:
        InputError: the model does not have a kind that is named, or only one layer.
    """
    kinds = available(circuits, kinds, COMPOSITION_KINDS, "composition scores")
    modules = circuits.modules()
    if len(modules) < 2:
        raise InputError("model", expected="at least two attention layers", got=len(modules))
    needs_qk = bool({"q", "k"} & set(kinds))
    heads = [
        composing_heads(circuits.ov_factors(maps), circuits.qk_factors(maps, distance) if needs_qk else None, kinds)
        for maps in modules
    ]
    labels = [[each for each in circuits.heads if each["module"] == maps.path] for maps in modules]
    width = heads[0].written.shape[1]
    measured = {
        "sequences": 1,
        "expected": width**-0.5,
        "random_sd": _random_sd(heads[1].readers[kinds[0]].shape[1], heads[0].written.shape[2], width),
        "heads": [dict(each) for each in circuits.heads],
    }
    settings = {**circuits.metadata["settings"], "distance": distance}
    metadata = {**circuits.metadata, "settings": settings, "measured": measured}
    with progress_bar("composition", len(heads) - 1, "layers") as bar:
        return Composition(head_pairs(_scored_pairs(heads, labels, kinds, bar)), metadata)


def _scored_pairs(
    heads: Sequence[ComposingHeads],
    labels: Sequence[Sequence[Mapping[str, Any]]],
    kinds: Sequence[str],
    bar: ProgressBar,
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], dict[str, float]]]:
    """Yield the labels of every earlier and later head with the scores of the pair, in the order of the later head."""
    for later in bar.track(range(1, len(heads))):
        scores = {
            kind: torch.cat(
                [composition_scores(heads[later].readers[kind], each.written) for each in heads[:later]], 1
            ).tolist()
            for kind in kinds
        }
        earlier_labels = [each for of_module in labels[:later] for each in of_module]
        for row, of_later in enumerate(labels[later]):
            for column, of_earlier in enumerate(earlier_labels):
                yield of_earlier, of_later, {kind: scores[kind][row][column] for kind in kinds}


def _random_sd(reading_rank: int, writing_rank: int, width: int) -> float:
    """Return the standard deviation of the score of two matrices `(width, width)` of these ranks, each a product of
    factors of independent Gaussian numbers.
    """
    generator = torch.Generator().manual_seed(0)

    def factors(rank: int) -> tuple[Tensor, Tensor]:
        draws = torch.randn(2, DRAWS, width, rank, generator=generator, dtype=torch.float64)
        return draws[0], draws[1].mT

    later, earlier = (
        composing_heads(factors(reading_rank), None, ["v"]),
        composing_heads(factors(writing_rank), None, []),
    )
    scores = torch.cat(
        [composition_scores(later.readers["v"][i : i + 1], earlier.written[i : i + 1]) for i in range(DRAWS)]
    )
    return float(scores.std())
