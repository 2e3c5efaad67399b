"""Regimes of attention on a GPU: lengths, head dims and masks, with batch times length constant; and the exact result
of some query rows.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

import headwise as hw
from benchmarks.regime import Regime

WIDTH, TOKENS = 2048, 65536
"""Width of all heads together, and number of tokens of a batch."""
LENGTHS = (4096, 16384, 65536, 1024)
"""Lengths in the order in which they are measured, so that the most telling ones are not left out."""
WINDOW, NARROW = 4096, 1024
"""Widths of the causal window, and of the windows of half of the heads in the mask "heads"."""
MASKS = ("causal", "dense", "documents", "window", "heads")
"""Masks: causal; none; packed documents, causal; a causal window of 4,096; windows of 1,024 for half of the heads."""
CHECKED_ROWS = 64
"""Number of rows in each block that is compared with float64."""


def attention_regimes(*, tiny: bool = False) -> Iterator[Regime]:
    """Yield every regime, forward alone and with the backward pass. A window that hides nothing is left out."""
    if tiny:
        for mask, training in product(MASKS, (False, True)):
            yield Regime(2, 96, 64, 4, mask, "bfloat16", training)
        return
    for length, heads, training, mask in product(LENGTHS, (32, 16), (True, False), MASKS):
        if mask != "window" or length > WINDOW:
            yield Regime(TOKENS // length, length, WIDTH, heads, mask, "bfloat16", training)


def window_of(regime: Regime) -> tuple[int, int]:
    """Return the widths of the window, and of the windows of half of the heads, for the length of a regime."""
    return (WINDOW, NARROW) if regime.length > 100 else (24, 10)


@lru_cache(maxsize=4)
def document_ids(length: int) -> Tensor:
    """Return the number of the document at each position, `(length,)`. There are about 8 documents of random lengths,
    the same in each sequence.
    """
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, length, (7,), generator=generator)
    return torch.zeros(length, dtype=torch.long).index_fill_(0, starts.unique(), 1).cumsum(0)


def mask_of(regime: Regime) -> hw.Mask | None:
    """Return the mask of a regime for headwise, made on the CPU."""
    wide, narrow = window_of(regime)
    if regime.mask == "dense":
        return None
    if regime.mask == "documents":
        return hw.causal() & hw.segments(document_ids(regime.length))
    if regime.mask == "window":
        return hw.window(wide)
    if regime.mask == "heads":
        return hw.window([narrow] * (regime.heads // 2) + [None] * (regime.heads - regime.heads // 2))
    return hw.causal()


def allowed(regime: Regime, device: str, rows: range | None = None) -> Tensor:
    """Return True where a query of the rows, by default all, attends to a key: `(1, heads or 1, rows, length)`."""
    rows = range(regime.length) if rows is None else rows
    wide, narrow = window_of(regime)
    query, key = torch.arange(rows.start, rows.stop, device=device)[:, None], torch.arange(regime.length, device=device)
    if regime.mask == "dense":
        return torch.ones(1, 1, len(rows), regime.length, dtype=torch.bool, device=device)
    seen = key <= query
    if regime.mask == "documents":
        ids = document_ids(regime.length).to(device)
        seen = seen & (ids[query] == ids)
    if regime.mask == "window":
        seen = seen & (query - key < wide)
    if regime.mask != "heads":
        return seen[None, None]
    is_windowed = torch.arange(regime.heads, device=device) < regime.heads // 2
    return (seen & ((query - key < narrow) | ~is_windowed[:, None, None]))[None]


def checked_blocks(regime: Regime) -> list[range]:
    """Return the rows that are compared with float64: at the start, in the middle and at the end."""
    rows = min(CHECKED_ROWS, regime.length // 3)  # so that no two blocks overlap
    return [range(start, start + rows) for start in (0, (regime.length - rows) // 2, regime.length - rows)]


def plain_rows(
    regime: Regime, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return by plain attention in a dtype the output of the checked rows of the first sequence, and the gradients of
    q, k and v for a gradient of the output that is 0 in other rows.
    """
    first = [tensor.detach()[:1].to(dtype) for tensor in (q, k, v)]
    gradients = [torch.zeros_like(tensor) for tensor in first]
    outputs = []
    for rows in checked_blocks(regime):
        block = slice(rows.start, rows.stop)
        parts = [first[0][:, :, block].clone(), first[1], first[2]]
        parts = [part.detach().requires_grad_() for part in parts]
        scores = parts[0] @ parts[1].mT * regime.head_dim**-0.5
        hidden = ~allowed(replace(regime, batch=1), str(q.device), rows)
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ parts[2]
        outputs.append(out.detach())
        of_q, of_k, of_v = torch.autograd.grad(out, parts, upstream[:1, :, block].to(dtype))
        gradients[0][:, :, block] += of_q
        gradients[1] += of_k
        gradients[2] += of_v
    return {"out": torch.cat(outputs, 2), **dict(zip("qkv", gradients, strict=True))}
