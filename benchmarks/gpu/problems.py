"""Attention problems that are drawn from seeds, and plain attention, which defines their results.

Nothing here imports headwise but for the masks of a problem. Each problem states independently, as a boolean tensor,
which keys each query attends to.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import headwise as hw

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
HEAD_DIMS = (64, 128, 32, 40, 96, 8, 16, 80)
EXTRAS = ("nothing", "log-sum-exp", "bias", "softcap", "sinks", "scale per head", "hiding bias", "sinks and softcap")


@dataclass(frozen=True, eq=False)
class DrawnProblem:
    """One attention problem in float64 on the CPU.

    Attributes:
        name: mask, further options and sizes.
        dtype: dtype in which it is computed.
        tensors: q, k and v, and a bias and sinks where it has them, by name; gradients are taken of all.
        allowed: True where a query attends to a key, `(batch, heads, queries, keys)`.
        mask: function that returns the mask on a device.
        options: further options of `hw.attend`.
        scale_per_head: factor of the scores of each head; None for the default.
    """

    name: str
    dtype: torch.dtype
    tensors: dict[str, Tensor]
    allowed: Tensor
    mask: Callable[[str], Any]
    options: dict[str, Any] = field(default_factory=dict)
    scale_per_head: Tensor | None = None

    def arguments(self, device: str, dtype: torch.dtype | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the further options of `hw.attend` on a device, in the problem's dtype."""
        tensors = {name: tensor.to(device, dtype or self.dtype) for name, tensor in self.tensors.items()}
        options = {**self.options, "mask": self.mask(device)}
        if self.scale_per_head is not None:
            options["scale"] = self.scale_per_head.to(device, torch.float32)
        return tensors, options


def drawn_problems(*, largest: int = 300) -> Iterator[DrawnProblem]:
    """Yield problems of every mask in every dtype, each with another one of the extras. Lengths are up to `largest`."""
    for dtype_number, dtype in enumerate(DTYPES):
        for mask_number, kind in enumerate(MASKS):
            seed = dtype_number * len(MASKS) + mask_number
            yield draw(kind, EXTRAS[(seed + dtype_number) % len(EXTRAS)], dtype, seed, largest)


def draw(kind: str, extra: str, dtype: torch.dtype, seed: int, largest: int) -> DrawnProblem:
    """Return the problem of a seed with a kind of mask and an extra option."""
    numbers, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, kv_heads, group = numbers.randint(1, 3), numbers.randint(1, 3), numbers.randint(1, 3)
    keys = numbers.randint(2, largest) if seed % 5 == 0 else numbers.randint(largest // 3, largest)
    queries = keys if kind in SQUARE or numbers.random() < 0.5 else numbers.choice([1, numbers.randint(1, keys)])
    head_dim, heads = HEAD_DIMS[seed % len(HEAD_DIMS)], kv_heads * group

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).double()

    tensors = {
        "q": normal(batch, heads, queries, head_dim),
        "k": normal(batch, kv_heads, keys, head_dim),
        "v": normal(batch, kv_heads, keys, head_dim),
    }
    mask, allowed = MASKS[kind](numbers, batch, heads, queries, keys)
    allowed = allowed.expand(batch, heads, queries, keys).clone()
    options: dict[str, Any] = {}
    if "bias" in extra:
        tensors["bias"] = normal(1, heads, queries, keys)
        if "hiding" in extra:
            hidden = torch.rand(queries, keys, generator=generator) < 0.3
            tensors["bias"] = tensors["bias"].masked_fill(hidden, -torch.inf)
            allowed &= ~hidden
    if "softcap" in extra:
        options["softcap"] = 2.0
    if "sinks" in extra:
        tensors["sinks"] = normal(heads)
    if extra == "log-sum-exp":
        options["return_lse"] = True
    scale = 0.05 + 0.2 * torch.rand(heads, generator=generator) if extra == "scale per head" else None
    sizes = f"({batch}, {heads}/{kv_heads}, {queries}, {keys}, {head_dim})"
    name = f"{kind}, {extra}, {sizes}, {str(dtype).removeprefix('torch.')}"
    return DrawnProblem(name, dtype, tensors, allowed, mask, options, scale)


# -- masks: (numbers, batch, heads, queries, keys) -> the mask on a device, and its values ----------------------------


def _positions(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Return the positions of queries, `(queries, 1)`, and of keys, `(keys,)`; the last ones are aligned."""
    return torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)


def _causal(_: random.Random, batch: int, heads: int, queries: int, keys: int) -> tuple[Callable, Tensor]:
    query, key = _positions(queries, keys)
    return lambda device: hw.causal(), key <= query


def _none(_: random.Random, batch: int, heads: int, queries: int, keys: int) -> tuple[Callable, Tensor]:
    return lambda device: None, torch.ones(queries, keys, dtype=torch.bool)


def _window(numbers: random.Random, batch: int, heads: int, queries: int, keys: int) -> tuple[Callable, Tensor]:
    width, ahead = numbers.randint(1, keys), numbers.randint(0, 5)
    query, key = _positions(queries, keys)
    distance = query - key
    return lambda device: hw.window(width, ahead=ahead), (distance < width) & (distance >= -ahead)


def _per_head(numbers: random.Random, batch: int, heads: int, queries: int, keys: int) -> tuple[Callable, Tensor]:
    widths = [numbers.choice([None, numbers.randint(1, keys)]) for _ in range(heads)]
    query, key = _positions(queries, keys)
    values = [(key <= query) & (query - key < (width or keys + queries)) for width in widths]
    return lambda device: hw.window(widths), torch.stack(values)


def _ids(numbers: random.Random, batch: int, keys: int) -> Tensor:
    """Return ascending document numbers, `(batch, keys)`."""
    return torch.tensor([sorted(numbers.randint(0, 4) for _ in range(keys)) for _ in range(batch)])


def _documents(numbers: random.Random, batch: int, heads: int, queries: int, keys: int) -> tuple[Callable, Tensor]:
    ids = _ids(numbers, batch, keys)
    same = ids[:, None, keys - queries :, None] == ids[:, None, None, :]
    return lambda device: hw.segments(ids), same


def _causal_documents(
    numbers: random.Random, batch: int, heads: int, queries: int, keys: int
) -> tuple[Callable, Tensor]:
    ids = _ids(numbers, batch, keys)
    query, key = _positions(queries, keys)
    same = ids[:, None, keys - queries :, None] == ids[:, None, None, :]
    return lambda device: hw.causal() & hw.segments(ids.to(device)), same & (key <= query)


def _padding(numbers: random.Random, batch: int, heads: int, queries: int, keys: int) -> tuple[Callable, Tensor]:
    lengths = torch.tensor([numbers.randint(0, keys) for _ in range(batch)])
    return lambda device: hw.padding(lengths), torch.arange(keys) < lengths[:, None, None, None]


def _left_padding(numbers: random.Random, batch: int, heads: int, queries: int, keys: int) -> tuple[Callable, Tensor]:
    lengths = torch.tensor([numbers.randint(0, keys) for _ in range(batch)])
    query, key = _positions(queries, keys)
    real = key >= keys - lengths[:, None, None, None]
    return lambda device: hw.causal() & hw.padding(lengths, side="left"), real & (key <= query)


def _prefix(numbers: random.Random, batch: int, heads: int, queries: int, keys: int) -> tuple[Callable, Tensor]:
    length = numbers.randint(0, keys)
    query, key = _positions(queries, keys)
    return lambda device: hw.causal() | hw.prefix(length), (key <= query) | (key < length)


def _dilated(numbers: random.Random, batch: int, heads: int, queries: int, keys: int) -> tuple[Callable, Tensor]:
    query, key = _positions(queries, keys)
    distance = query - key
    values = (distance >= 0) & (distance < 15) & (distance % 3 == 0)
    return lambda device: hw.window(5, dilation=3), values


def _rule(_: random.Random, batch: int, heads: int, queries: int, keys: int) -> tuple[Callable, Tensor]:
    query, key = _positions(queries, keys)
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    values = (query >= key) & ((query + key + h) % 3 != b % 3)
    return lambda device: hw.mask_rule(lambda b, h, q, k: (q >= k) & ((q + k + h) % 3 != b % 3)), values


def _tensor(numbers: random.Random, batch: int, heads: int, queries: int, keys: int) -> tuple[Callable, Tensor]:
    generator = torch.Generator().manual_seed(numbers.randint(0, 2**31))
    values = torch.rand(batch, 1, queries, keys, generator=generator) > 0.5
    return values.to, values


def _empty_rows(_: random.Random, batch: int, heads: int, queries: int, keys: int) -> tuple[Callable, Tensor]:
    query, key = _positions(queries, keys)
    values = (key < query) & (query % 3 > 0)
    return lambda device: hw.mask_rule(lambda b, h, q, k: (k < q) & (q % 3 > 0)), values


def _chunks(numbers: random.Random, batch: int, heads: int, queries: int, keys: int) -> tuple[Callable, Tensor]:
    size = numbers.randint(1, keys)
    query, key = _positions(queries, keys)
    same = query.div(size, rounding_mode="floor") == key // size
    return lambda device: hw.causal() & hw.chunked(size), same & (key <= query)


MASKS: dict[str, Callable[[random.Random, int, int, int, int], tuple[Callable, Tensor]]] = {
    "causal": _causal,
    "no mask": _none,
    "window": _window,
    "window per head": _per_head,
    "causal documents": _causal_documents,
    "padding": _padding,
    "documents": _documents,
    "left padding": _left_padding,
    "prefix": _prefix,
    "rows without keys": _empty_rows,
    "boolean tensor": _tensor,
    "rule": _rule,
    "chunks": _chunks,
    "dilated window": _dilated,
}
SQUARE = ("causal", "causal documents")
"""Masks that are drawn with as many queries as keys, so that each kernel's own causal flag is tested."""


# -- plain attention --------------------------------------------------------------------------------------------------


def plain(
    tensors: dict[str, Tensor], allowed: Tensor, options: dict[str, Any], scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of attention by its definition, in the dtype of the tensors, with the whole
    matrix in memory. A row without a key has output 0 and log-sum-exp -inf.
    """
    q, k, v = (tensors[name] for name in "qkv")
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale.to(q.dtype)[:, None, None])
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if "bias" in tensors:
        scores = scores + tensors["bias"].masked_fill(tensors["bias"] == -torch.inf, 0.0)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if "sinks" in tensors:
        sinks = tensors["sinks"][:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    is_empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(is_empty, 0.0)
    weights = scores.softmax(-1).masked_fill(is_empty, 0.0)
    out = weights[..., : k.shape[2]] @ v
    return out, scores.logsumexp(-1).masked_fill(is_empty[..., 0], -torch.inf)
