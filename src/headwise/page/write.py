"""Writer of a page: the contents as JSON and compressed numbers, with the page's style and script, in one HTML file.

Notebooks show the file in a frame.

The page loads nothing. Its content security policy allows the one style and the one script that it contains, by their
hashes, and images inside the file. `docs/architecture.md` describes the format of the JSON, which the script reads.
"""

import gzip
import hashlib
import json
import math
import re
import sys
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from headwise.errors import require
from headwise.page.columns import Columns
from headwise.page.contents import AllWeights, Contents, HeadAttention, LargestWeights, Passage, Side
from headwise.shapes import Bool, Float, Int
from headwise.wording import counted

DENSE_WEIGHTS = 1 << 20
"""Number of weights of a page up to which none is left out."""

LISTED_WEIGHTS = 2_400_000
"""Number of weights in pages that leave small weights out."""

LISTED_OF_WORDS, LISTED_OF_PATCHES = 600_000, 400_000
"""Numbers of weights, of queries that are words and of those that are patches, in such pages of texts with pictures."""

LISTED_KEYS = 32
"""Largest number of keys that are listed for a query."""


def page_json(contents: Contents) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the contents of a page in the form that is stored in its HTML file: JSON values, and a dictionary of
    arrays. The arrays are compressed text, and the JSON values refer to them by name.
    """
    arrays = {"values": _float32(*(model.estimates[part] for part in range(3) for model in contents.models))}
    role_indices = {role.name: place for place, role in enumerate(contents.roles)} | {None: None}
    attention = [
        (head, _of_patches(passage.sides[head.queries]))
        for passage in contents.passages
        for heads in passage.heads
        for head in heads
        if head
    ]
    rows = iter(stored_rows([head for head, _ in attention], [patches for _, patches in attention]))
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
    """Return passage number `number` (one or more texts) as JSON values, and add its arrays to `arrays`.
    `rows` yields the stored attention weights of the passage's heads, model by model.
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
    sides = [
        {
            "name": side.name,
            "tokens": side.tokens,
            "space": [int(follows) for follows in side.follows_blank],
            "break": side.line_starts,
            "special": [int(special) for special in side.special],
            "words": side.words,
            "wordOf": side.word_of,
            "generated": side.first_generated,
            "pictures": [asdict(picture) for picture in side.pictures],
            "patches": side.patches,
        }
        for side in passage.sides
    ]
    maps = [
        {
            "method": each.method,
            "meaning": each.meaning,
            "side": each.side,
            "targetSide": each.target_side,
            "target": each.target,
            "agreement": each.agreement and [None if math.isnan(number) else number for number in each.agreement],
            "curves": [(name, len(curve)) for name, curve in each.curves.items()],
        }
        for each in passage.maps
    ]
    if maps:
        numbers = (array for each in passage.maps for array in (each.values, *map(torch.tensor, each.curves.values())))
        arrays[f"p{number}-maps"] = _float32(*numbers)
    return {
        "title": passage.title,
        "sides": sides,
        "heads": models,
        "visibility": list(visibility.values()),
        "maps": maps,
    }


def _of_patches(side: Side) -> Bool[Tensor, " tokens"]:
    """Return which tokens of a side are patches; none if all are patches or special tokens."""
    is_patch = torch.tensor([patch is not None for patch in side.patches or (None,) * len(side.tokens)])
    return is_patch & bool((~is_patch & ~torch.tensor(side.special)).any())


def stored_rows(heads: Sequence[HeadAttention], of_patches: Sequence[Tensor] | None = None) -> list[tuple[str, bytes]]:
    """Return the attention weights of each head as bytes, with the name of their format. If a page has at most
    `DENSE_WEIGHTS` weights, all are stored, with 16 bits each ("dense"). Otherwise about `LISTED_WEIGHTS` weights are
    stored, with 8 bits each, rounded down ("sparse"). Half of them are the largest weights of each query, the same
    number for every query. The other half are the largest of the remaining weights.

    `of_patches` has a boolean tensor for each head, which is True at queries that are patches of a text with other
    words. Such queries are many, and their weights are rarely read. If there are any, `LISTED_OF_PATCHES` of the
    weights are theirs, and `LISTED_OF_WORDS` are those of other queries.
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
    if of_patches is None:
        of_patches = [torch.zeros(len(each.weights), dtype=torch.bool) for each in listed]
    budgets = {False: LISTED_WEIGHTS, True: 0}
    if any(patches.any() for patches in of_patches):
        budgets = {False: LISTED_OF_WORDS, True: LISTED_OF_PATCHES}
    least, threshold = [torch.zeros(2, dtype=dtype) for dtype in (torch.int64, torch.float32)]
    for is_patch, budget in budgets.items():
        rows = [each.weights[patches == is_patch] for each, patches in zip(listed, of_patches, strict=True)]
        queries = sum(map(len, rows))
        least[int(is_patch)] = number = budget // 2 // max(queries, 1)
        others = torch.cat([each[:, number:].flatten() for each in rows]) if rows else torch.empty(0)
        excess = len(others) - (budget - number * queries)
        threshold[int(is_patch)] = float(others.kthvalue(excess).values) if excess > 0 else 0.0
    return [
        ("sparse", _sparse_bytes(each, head.number_of_keys, least[group], threshold[group]))
        for each, head, group in zip(listed, heads, (patches.long() for patches in of_patches), strict=True)
    ]


def _sparse_bytes(
    listed: LargestWeights,
    number_of_keys: int,
    least: Int[Tensor, " queries"],
    threshold: Float[Tensor, " queries"],
) -> bytes:
    """Return the stored attention weights of one head in the format "sparse", as bytes. These are: the number of stored
    weights; for each query, the number of its stored weights and the sum of all its weights; the keys, ascending for
    each query; and the weights. Stored are the `least` largest weights of each query, and those above `threshold`. A
    key has two bytes if that is enough for `number_of_keys`, otherwise four.
    """
    rank = torch.arange(listed.weights.shape[1])
    is_stored = (listed.weights > 0) & ((rank < least[:, None]) | (listed.weights > threshold[:, None]))
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
    """Return attention weights as integers of type `dtype`, uint8 or uint16. The integer q is arcsin(sqrt(weight)),
    scaled and rounded, so that a weight of 1 becomes Q, the largest number of the type.

    The weight is sin(q / Q * pi / 2) squared. The rounding error is at most pi / 4 / Q, for a weight of 1/2, and
    vanishes near 0 and 1, which are exact (variance-stabilising transform of a share). If `down`, weights are rounded
    down, so that sums of them are lower bounds; the error is then at most twice as large.
    """
    largest = torch.iinfo(dtype).max
    units = weights.double().clamp(0, 1).sqrt().asin() * (largest * 2 / math.pi)
    # Without the small number, rounding in the arcsine would turn a weight of 1 into the next smaller one.
    return (units + 1e-9).floor().to(dtype) if down else units.round().to(dtype)


def as_bytes(*tensors: Tensor) -> bytes:
    """Return the elements of several tensors as little-endian bytes, one tensor after the other."""
    parts = (tensor.detach().cpu().contiguous().numpy() for tensor in tensors)
    return b"".join((part if sys.byteorder == "little" else part.byteswap()).tobytes() for part in parts)


def compressed(data: bytes) -> str:
    """Return bytes compressed with gzip, as base64. Equal bytes give equal text."""
    return b64encode(gzip.compress(data, compresslevel=9, mtime=0)).decode("ascii")


def _float32(*tensors: Tensor) -> str:
    """Return the elements of several tensors as text: float32 numbers, compressed with gzip and encoded in base64."""
    return compressed(as_bytes(*(tensor.float() for tensor in tensors)))


IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
"""Import statement of a module of the page's script."""

COMMENTS_AND_INDENTS = re.compile(r"^[ ]*/\*\*.*?\*/\n|^[ ]*//[^\n]*\n|^[ ]+|^\n", re.MULTILINE | re.DOTALL)
"""Comments on lines of their own, empty lines, and blanks at the start of lines."""

ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
"""Characters of JSON that could end a script element or start a comment in it, and what they are replaced by."""

ENTRY = "main.js"
"""Module of the script that imports all others."""


def require_jinja() -> None:
    """Raise `MissingExtra` if jinja2, which is needed to write a page, is not installed."""
    require("jinja2", purpose="writing a page", extra="plot")


def page_html(contents: Contents) -> str:
    """Return the HTML file of a page, which contains its data, style and script and works offline."""
    require_jinja()
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("headwise", "page")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    style, script = (files("headwise.page") / "style.css").read_text("utf-8"), joined_script()
    values, arrays = page_json(contents)
    data = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    script_hash, style_hash = (
        f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'" for text in (script, style)
    )
    policy = f"default-src 'none'; script-src {script_hash}; style-src {style_hash}; img-src data:; "
    policy += "base-uri 'none'; form-action 'none'"
    page: str = environment.get_template("template.html.jinja").render(
        title=contents.title,
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        contents=Markup(data.translate(ESCAPES)),
        blobs=list(arrays.items()),
    )
    return page


def joined_script() -> str:
    """Return the page's script as one text: all its modules, each after the modules that it imports. Import statements,
    the word `export`, comments and indentation are removed. Names in different modules are all different.
    """
    sources: dict[str, str] = {}

    def add(name: str) -> None:
        if name in sources:
            return
        source = (files("headwise.page") / "script" / name).read_text("utf-8")
        for imported in IMPORT.findall(source):
            add(imported)
        sources[name] = re.sub(r"^export ", "", IMPORT.sub("", source), flags=re.MULTILINE).strip()

    add(ENTRY)
    return "\n" + re.sub(COMMENTS_AND_INDENTS, "", "\n".join(sources.values())) + "\n"


SHOWN_ROWS = 12
"""Number of rows of the table."""

SHOWN_STATISTICS = 8
"""Number of columns of numbers."""

LARGEST_PAGE = 4_000_000
"""Number of characters of a page above which a notebook shows the table alone."""

FRAME_HEIGHT = 760
"""Height of the frame, in pixels."""


def notebook_html(caption: str, columns: Columns, contents: Contents) -> str:
    """Return HTML for a notebook: the first rows of `columns` as a table, and below it the interactive page with
    `contents` in a sandboxed frame. If the page has more than 4 million characters, or jinja2 is missing, a sentence
    replaces it.
    """
    table = _table(caption, columns)
    if find_spec("jinja2") is None:
        return table + "<p>To show the page of these heads, install jinja2.</p>"
    page = page_html(contents)
    if len(page) > LARGEST_PAGE:
        size = f"{len(page) / 1e6:.0f} MB"
        return table + f"<p>The page of these heads has {size}; headwise.write_page writes it to a file.</p>"
    return table + (
        f'<iframe title="{escape(caption)}" sandbox="allow-scripts allow-downloads" srcdoc="{escape(page)}" '
        f'style="width: 100%; height: {FRAME_HEIGHT}px; border: 1px solid #8888; border-radius: 6px"></iframe>'
    )


def _table(caption: str, columns: Columns) -> str:
    """Return an HTML table with the first 12 heads and the first 8 statistics of `columns`, with all text escaped."""
    has_roles = any(role is not None for role in columns.roles)
    statistics = columns.statistics[:SHOWN_STATISTICS]
    names = ["head", *(["role"] if has_roles else []), *(statistic.name for statistic in statistics)]
    lines = []
    for index, head in enumerate(columns.page_heads()[:SHOWN_ROWS]):
        numbers = [_number(value) for value in columns.estimates.means[: len(statistics), index].tolist()]
        labels = [head.name, *([head.role or ""] if has_roles else [])]
        text = "".join(f'<td style="text-align: left">{escape(label)}</td>' for label in labels)
        lines.append(text + "".join(f'<td style="text-align: right">{number}</td>' for number in numbers))
    hidden = [
        counted(count, noun)
        for count, noun in (
            (len(columns.places) - SHOWN_ROWS, "more row"),
            (len(columns.statistics) - SHOWN_STATISTICS, "more column"),
        )
        if count > 0
    ]
    more = f"<p>{' and '.join(hidden)} in the result's table().</p>" if hidden else ""
    return (
        f"<table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr></thead>"
        f"<tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table>{more}"
    )


def _number(value: float) -> str:
    """Return a number with two decimals, or with two significant digits if it is small; empty for NaN."""
    if math.isnan(value):
        return ""
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.01 else f"{value:.1e}"
