"""Contents of a page as JSON values, and its arrays as compressed text.

`docs/architecture.md` describes the format, which the page's script reads.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from headwise.page.contents import Contents, HeadAttention, Passage, Side, VisibleKeys
from headwise.page.encoding import angular, as_bytes, compressed
from headwise.page.row_storage import StoredRows, stored_rows


def page_json(contents: Contents) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the contents of a page as JSON values, and its arrays: compressed text by the names that the values have
    for them.
    """
    estimates = [model.estimates for model in contents.models]
    arrays = {
        "values": _float32(
            *(each.means for each in estimates),
            *(each.errors for each in estimates),
            *(each.counts for each in estimates),
        )
    }
    rows = iter(
        stored_rows([head for passage in contents.passages for heads in passage.heads for head in heads if head])
    )
    values = {
        "title": contents.title,
        "notes": contents.notes,
        "opening": dict(contents.opening),
        "roles": [asdict(role) for role in contents.roles],
        "statistics": [asdict(statistic) for statistic in contents.statistics],
        "models": [_model_json(contents, index) for index in range(len(contents.models))],
        "passages": [_passage_json(passage, number, rows, arrays) for number, passage in enumerate(contents.passages)],
        "foci": [
            {
                "name": focus.name,
                "kind": focus.kind,
                "words": focus.words,
                "verdict": focus.verdict,
                "scores": [asdict(score) for score in focus.scores],
            }
            for focus in contents.foci
        ],
    }
    return values, arrays


def _model_json(contents: Contents, index: int) -> dict[str, Any]:
    """Return the name and the heads of one of the models, each head's role as an index into the page's roles."""
    role_indices = {role.name: place for place, role in enumerate(contents.roles)}
    model = contents.models[index]
    heads = [asdict(head) | {"role": None if head.role is None else role_indices[head.role]} for head in model.heads]
    return {"name": model.name, "heads": heads}


def _passage_json(passage: Passage, number: int, rows: Iterator[StoredRows], arrays: dict[str, str]) -> dict[str, Any]:
    """Return passage `number` as JSON values, and add its arrays to `arrays`. `rows` yields the stored weights of its
    heads, model by model.
    """
    arrays[f"p{number}-values"] = _float32(*passage.means)
    visibility: dict[bytes, str] = {}
    for model, heads in enumerate(passage.heads):
        tiles = [angular(head.tiles, torch.uint8) for head in heads if head is not None]
        arrays[f"p{number}-tiles-{model}"] = compressed(as_bytes(*tiles))

    def head_json(head: HeadAttention | None, name: str) -> dict[str, Any] | None:
        if head is None:
            return None
        storage, data = next(rows)
        arrays[name] = compressed(data)
        runs = _visible_bytes(head.visible)
        if runs not in visibility:
            visibility[runs] = f"v{number}-{len(visibility)}"
            arrays[visibility[runs]] = compressed(runs)
        return {
            "queries": head.queries,
            "keys": head.keys,
            "tiles": list(head.tiles.shape),
            "visible": list(visibility).index(runs),
            "storage": storage,
            "rows": name,
        }

    heads_json = [
        [head_json(head, f"r{number}-{model}-{index}") for index, head in enumerate(heads)]
        for model, heads in enumerate(passage.heads)
    ]
    return {
        "title": passage.title,
        "sides": [_side_json(side) for side in passage.sides],
        "heads": heads_json,
        "visibility": list(visibility.values()),
    }


def _side_json(side: Side) -> dict[str, Any]:
    """Return a side of a passage as JSON values."""
    picture = side.picture
    return {
        "name": side.name,
        "tokens": side.tokens,
        "space": [int(follows) for follows in side.follows_blank],
        "break": side.line_starts,
        "special": [int(special) for special in side.special],
        "words": side.words,
        "wordOf": side.word_of,
        "generated": side.first_generated,
        "image": None if picture is None else asdict(picture),
    }


def _visible_bytes(visible: VisibleKeys) -> bytes:
    """Return the visible keys of each query as bytes: the number of runs; their number for each query; then the first
    key of each run, and the key after its last.
    """
    count = torch.tensor([len(visible.starts)], dtype=torch.int32)
    runs, starts, stops = visible.runs.to(torch.uint16), visible.starts.to(torch.uint32), visible.stops.to(torch.uint32)
    return as_bytes(count, runs, starts, stops)


def _float32(*tensors: Tensor) -> str:
    """Return tensors one after the other as compressed numbers of 32 bits."""
    return compressed(as_bytes(*(tensor.float() for tensor in tensors)))
