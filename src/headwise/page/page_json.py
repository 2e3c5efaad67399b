"""Contents of a page as JSON values, and its arrays as compact text: integers, compressed with gzip, in base64.

`docs/architecture.md` describes the format, which the page's script reads.
"""

import gzip
import math
import sys
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from headwise.page.contents import AllWeights, Contents, HeadAttention, LargestWeights, Passage, Side
from headwise.shapes import Float

DENSE_WEIGHTS = 1 << 20
"""Number of weights of a page up to which none is left out."""

LISTED_WEIGHTS = 2_400_000
"""Number of weights in pages that leave small weights out."""

LISTED_KEYS = 32
"""Largest number of keys that are listed for a query."""


def page_json(contents: Contents) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the contents of a page as JSON values, and its arrays: compressed text by the names that the values have
    for them.
    """
    estimates = [model.estimates for model in contents.models]
    parts = ("means", "errors", "counts")
    arrays = {"values": _float32(*(getattr(each, part) for part in parts for each in estimates))}
    role_indices = {role.name: place for place, role in enumerate(contents.roles)} | {None: None}
    rows = iter(
        stored_rows([head for passage in contents.passages for heads in passage.heads for head in heads if head])
    )
    values = {
        "title": contents.title,
        "notes": contents.notes,
        "opening": dict(contents.opening),
        "roles": [asdict(role) for role in contents.roles],
        "statistics": [asdict(statistic) for statistic in contents.statistics],
        "models": [
            {"name": model.name, "heads": [asdict(head) | {"role": role_indices[head.role]} for head in model.heads]}
            for model in contents.models
        ],
        "passages": [_passage_json(passage, number, rows, arrays) for number, passage in enumerate(contents.passages)],
        "foci": [asdict(focus) for focus in contents.foci],
    }
    return values, arrays


def _passage_json(
    passage: Passage, number: int, rows: Iterator[tuple[str, bytes]], arrays: dict[str, str]
) -> dict[str, Any]:
    """Return passage `number` as JSON values, and add its arrays to `arrays`. `rows` yields the stored weights of its
    heads, model by model.
    """
    arrays[f"p{number}-values"] = _float32(*passage.means)
    visibility: dict[bytes, str] = {}
    models: list[list[dict[str, Any] | None]] = [[None] * len(heads) for heads in passage.heads]
    for model, heads in enumerate(passage.heads):
        tiles = [angular(head.tiles, torch.uint8) for head in heads if head is not None]
        arrays[f"p{number}-tiles-{model}"] = compressed(as_bytes(*tiles))
        for index, head in enumerate(heads):
            if head is None:
                continue
            storage, data = next(rows)
            arrays[name := f"r{number}-{model}-{index}"] = compressed(data)
            # The number of runs; their number for each query; the first key of each run, and the key after its last.
            visible = head.visible
            runs = as_bytes(
                torch.tensor([len(visible.starts)], dtype=torch.int32),
                visible.runs.to(torch.uint16),
                visible.starts.to(torch.uint32),
                visible.stops.to(torch.uint32),
            )
            if runs not in visibility:
                visibility[runs] = f"v{number}-{len(visibility)}"
                arrays[visibility[runs]] = compressed(runs)
            models[model][index] = {
                "queries": head.queries,
                "keys": head.keys,
                "tiles": list(head.tiles.shape),
                "visible": list(visibility).index(runs),
                "storage": storage,
                "rows": name,
            }
    sides = [_side_json(side) for side in passage.sides]
    return {"title": passage.title, "sides": sides, "heads": models, "visibility": list(visibility.values())}


def _side_json(side: Side) -> dict[str, Any]:
    """Return a side of a passage as JSON values."""
    return {
        "name": side.name,
        "tokens": side.tokens,
        "space": [int(follows) for follows in side.follows_blank],
        "break": side.line_starts,
        "special": [int(special) for special in side.special],
        "words": side.words,
        "wordOf": side.word_of,
        "generated": side.first_generated,
        "image": None if side.picture is None else asdict(side.picture),
    }


def stored_rows(heads: Sequence[HeadAttention]) -> list[tuple[str, bytes]]:
    """Return the weights of all heads of a page, on all passages, as bytes, each with its format: "dense" for all
    weights, "sparse" for the largest ones.

    If there are at most `DENSE_WEIGHTS` of them, all are stored, with 16 bits. Otherwise the `LISTED_WEIGHTS` largest
    are stored, with 8 bits, rounded down: first the same number for every query, as far as half of the budget allows,
    then the largest others.
    """
    dense = [head.weights.weights for head in heads if isinstance(head.weights, AllWeights)]
    if len(dense) == len(heads) and sum(weights.numel() for weights in dense) <= DENSE_WEIGHTS:
        return [("dense", as_bytes(angular(weights, torch.uint16))) for weights in dense]
    listed = []
    for head in heads:
        if isinstance(head.weights, LargestWeights):
            listed.append(head.weights)
        else:
            weights = head.weights.weights
            top = weights.topk(min(LISTED_KEYS, weights.shape[-1]))
            listed.append(LargestWeights(top.indices, top.values, weights.sum(-1)))
    queries = sum(len(each.weights) for each in listed)
    least = LISTED_WEIGHTS // 2 // max(queries, 1)
    others = torch.cat([each.weights[:, least:].flatten() for each in listed])
    excess = len(others) - (LISTED_WEIGHTS - least * queries)
    threshold = float(others.kthvalue(excess).values) if excess > 0 else 0.0
    return [
        ("sparse", _sparse_bytes(each, head.number_of_keys, least, threshold))
        for each, head in zip(listed, heads, strict=True)
    ]


def _sparse_bytes(listed: LargestWeights, number_of_keys: int, least: int, threshold: float) -> bytes:
    """Return the stored weights of one head as bytes: their number; for each query their number and the sum of all its
    weights; then the keys, ascending for each query, and the weights. Keys have two bytes if that is enough for
    `number_of_keys`, otherwise four. The `least` largest weights of each query are stored, and those above `threshold`.
    """
    rank = torch.arange(listed.weights.shape[1])
    is_stored = (listed.weights > 0) & ((rank < least) | (listed.weights > threshold))
    past_all_keys = torch.iinfo(listed.keys.dtype).max
    keys, order = listed.keys.masked_fill(~is_stored, past_all_keys).sort(dim=1)  # those that are stored come first
    is_stored, weights = is_stored.gather(1, order), listed.weights.gather(1, order)
    keys = keys[is_stored]
    key_type = torch.uint16 if number_of_keys <= 1 << 16 else torch.uint32
    return as_bytes(
        torch.tensor([len(keys)], dtype=torch.int32),
        is_stored.sum(1).to(torch.uint16),
        angular(listed.totals, torch.uint16),
        keys.to(key_type),
        angular(weights[is_stored], torch.uint8, down=True),
    )


def angular(weights: Float[Tensor, "*shape"], dtype: torch.dtype, *, down: bool = False) -> Tensor:
    """Return attention weights as integers of type `dtype`, uint8 or uint16: arcsin(sqrt(weight)) in units of a right
    angle divided by the type's largest number Q.

    The weight is sin(q / Q * pi / 2) squared. The rounding error is at most pi / 4 / Q, for a weight of 1/2, and
    vanishes near 0 and 1, which are exact (variance-stabilising transform of a share). If `down`, weights are rounded
    down, so that sums of them are lower bounds; the error is then at most twice as large.
    """
    largest = torch.iinfo(dtype).max
    units = weights.double().clamp(0, 1).sqrt().asin() * (largest * 2 / math.pi)
    # Without the small number, rounding in the arcsine would turn a weight of 1 into the next smaller one.
    return (units + 1e-9).floor().to(dtype) if down else units.round().to(dtype)


def as_bytes(*tensors: Tensor) -> bytes:
    """Return the elements of tensors one after the other as little-endian bytes."""
    parts = (tensor.detach().cpu().contiguous().numpy() for tensor in tensors)
    return b"".join((part if sys.byteorder == "little" else part.byteswap()).tobytes() for part in parts)


def compressed(data: bytes) -> str:
    """Return bytes compressed with gzip, as base64. Equal bytes give equal text."""
    return b64encode(gzip.compress(data, compresslevel=9, mtime=0)).decode("ascii")


def _float32(*tensors: Tensor) -> str:
    """Return tensors one after the other as compressed numbers of 32 bits."""
    return compressed(as_bytes(*(tensor.float() for tensor in tensors)))
