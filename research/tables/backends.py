"""Write docs/reports/backends.md: the options that each backend supports, alone and combined.

python -m research.tables.backends
"""

import itertools
from datetime import date
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.attention import attend, backend_choice
from headwise.attention.backends.blockwise import scores

REPORT = Path(__file__).parent.parent.parent / "docs" / "reports" / "backends.md"

BACKENDS = [name for name in attend.BACKENDS if name != "flex"]
"""Backends of the report, which is for the CPU. There, `flex` serves to test its rules (docs/gpu.md)."""

BATCH, HEADS, KV_HEADS, LENGTH, HEAD_DIM, VALUE_DIM = 2, 6, 2, 7, 5, 3


def bias(requires_grad: bool = False) -> torch.Tensor:
    """Return a random additive bias with different values for every sequence, head, query and key."""
    return torch.randn(BATCH, HEADS, LENGTH, LENGTH).requires_grad_(requires_grad)


OPTIONS: dict[str, dict[str, Any]] = {
    "a mask, any rule": {"mask": hw.mask_rule(lambda b, h, q, k: (q >= k) | (h == 0))},
    "a mask for each head": {"mask": hw.window([1, 2, 3, 4, 5, None])},
    "positions of a cache": {
        "query_positions": torch.arange(LENGTH),
        "key_positions": torch.tensor([0, 1, 2, 3, 4, -1, -1]),
    },
    "an additive bias": {"bias": bias()},
    "an additive bias that learns": {"bias": bias(requires_grad=True)},
    "a scale for each head": {"scale": torch.rand(HEADS)},
    "a softcap": {"softcap": 20.0},
    "sinks": {"sinks": torch.randn(HEADS, requires_grad=True)},
    "talking heads": {"talking_heads": (torch.eye(HEADS), torch.eye(HEADS))},
    "a gate": {"gate": torch.rand(BATCH, HEADS, LENGTH)},
    "dropout": {"dropout": 0.1},
    "the log-sum-exp": {"return_lse": True},
    "the weights": {"return_weights": True},
}
"""Options of a call, by name, that a backend may not support. All calls also have grouped heads, and values whose width
differs from that of the keys.
"""


def tensors(requires_grad: bool) -> tuple[torch.Tensor, ...]:
    """Return random q, k and v with grouped heads and values whose width differs from that of the keys."""
    shapes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM))
    return tuple(torch.randn(BATCH, heads, LENGTH, width).requires_grad_(requires_grad) for heads, width in shapes)


def reason(backend: str, options: dict, gradient: bool) -> str | None:
    """Return the reason why a backend does not support the options, with or without gradients; None if it does, in
    which case the call is run and checked for NaN.
    """
    with torch.set_grad_enabled(gradient):
        q, k, v = tensors(requires_grad=gradient)
        why = hw.why_not(backend, q, k, v, **options)
        if why is not None:
            return why
        attended = hw.attend(q, k, v, **options, backend=backend)
        results = attended if isinstance(attended, tuple) else (attended,)
        assert not any(result.isnan().any() for result in results)
        if gradient:
            loss = torch.stack([result[result.isfinite()].sum() for result in results]).sum()
            gradients = torch.autograd.grad(loss, (q, k, v), allow_unused=True, materialize_grads=True)
            assert not any(gradient.isnan().any() for gradient in gradients)
    return None


def cell(backend: str, options: dict) -> str:
    """Return the table's text for a backend and options: yes, no with the reason, or forward only with the reason."""
    forward, backward = (reason(backend, options, gradient) for gradient in (False, True))
    if forward is None and backward is None:
        return "yes"
    return f"no: {forward}" if forward is not None else f"forward only: {backward}"


def table() -> list[str]:
    """Return the table of options, with a row per option and a column per backend."""
    lines = [f"| asked for | {' | '.join(f'`{name}`' for name in BACKENDS)} |", f"|{' --- |' * (len(BACKENDS) + 1)}"]
    for name, options in OPTIONS.items():
        lines.append(f"| {name} | {' | '.join(cell(backend, options) for backend in BACKENDS)} |")
    return lines


def combinations(size: int) -> dict[str, int]:
    """Return the number of combinations of `size` options that each backend supports forward and backward, and as "all"
    and "some backend" the number of combinations and of those that any backend supports.
    """
    counts = dict.fromkeys(BACKENDS, 0)
    counts["all"] = counts["some backend"] = 0
    for chosen in itertools.combinations(OPTIONS.values(), size):
        options: dict[str, Any] = {}
        if sum(map(len, chosen)) > len({name for option in chosen for name in option}):
            continue  # two values of one argument
        for option in chosen:
            options |= option
        can = [backend for backend in BACKENDS if cell(backend, options) == "yes"]
        for backend in [*can, "all", *(["some backend"] if can else [])]:
            counts[backend] += 1
    return counts


FUSED_COSTS = f"""\
## How the fastest backend is predicted

By default (`backend=None`), headwise computes an attention call on a CPU with the backend `native` if this backend
supports the call. docs/backends.md lists the exceptions, in which `fused` runs. For most calls that `native` does not
support, headwise predicts the costs of `fused` and `blockwise`, and uses the cheaper one. The unit of cost is the time
that torch's fused kernel needs for one attention score at head_dim 64. The costs were measured on two CPU cores with
AVX-512:

| `fused` | predicted cost |
| --- | --- |
| any mask | 1 for each score of the matrix, hidden or not |
| plain causal mask | {backend_choice.CAUSAL_FLAG_SHARE} of that |
| dropout, or a bias that requires gradients (whole matrix) | {backend_choice.FULL_MATRIX_COST} times as much |
| values and keys of different width | as if both had the larger width |
""".splitlines()

BLOCKWISE_COSTS = f"""\
| `blockwise` | cost of each score | cost of each block |
| --- | --- | --- |
| float32 scores | {backend_choice.FLOAT32_SCORE_COST} | {scores.FLOAT32_BLOCK_OVERHEAD:,} |
| bfloat16 scores | {backend_choice.BFLOAT16_SCORE_COST} | {scores.BFLOAT16_BLOCK_OVERHEAD:,} |

The `blockwise` backend computes attention scores in bfloat16 only if three conditions hold. The queries are bfloat16.
The scale is one positive number for all heads. The call uses no softcap, bias, sinks or dropout, and does not return
the log-sum-exp. In all other cases the scores are float32, or float64 if the queries are float64.

If the backend `native` does not support an attention call, headwise predicts which of the backends `fused` and
`blockwise` is faster. If both support the call, it uses `fused` without a prediction in five cases: (1) the
call has fewer than {backend_choice.SMALLEST_PLANNED:,} attention scores; (2) the mask is stored as a matrix for each
sequence or head; (3) the call returns the attention weights; (4) the mask is plain causal or hides nothing,
`blockwise` would not compute the scores in bfloat16, and the call has neither dropout nor a bias that requires
gradients; (5) the device is not a CPU. No costs have been measured on other devices, where torch chooses between its
own kernels.
""".splitlines()


def main() -> None:
    """Write docs/reports/backends.md."""
    torch.manual_seed(0)
    counts = {size: combinations(size) for size in (1, 2, 3)}
    text = [
        "# What each backend supports",
        "",
        "This page lists the options that each backend (implementation of attention in headwise) supports, and the",
        "rule that predicts the faster backend.",
        f"`research/tables/backends.py` wrote it on {date.today().isoformat()} with torch {torch.__version__}, on "
        "CPU. The",
        "page [Backends](../backends.md) describes how to choose a backend.",
        "",
        "## Options",
        "",
        "The table shows the options of an attention call that each backend supports. A cell is *yes*, or",
        "has the reason why the backend refuses the call, from `headwise.why_not`. Each call was checked with and",
        "without gradients. Each call whose cell is *yes* was also run, with and without gradients.",
        "",
        *table(),
        "",
        *FUSED_COSTS,
        "",
        *BLOCKWISE_COSTS,
        "",
        "## Combinations of options",
        "",
        "The table counts combinations of one, two and three options of an attention call, such as a softcap with",
        "dropout. A backend supports a combination if it can compute both the forward and the backward pass of a call",
        "with these options. The options are the rows of the table in the section Options. Two options that need",
        "different values of the same argument of the call, such as two masks, are not combined.",
        "",
        f"| options at once | combinations | {' | '.join(f'`{name}`' for name in BACKENDS)} | some backend |",
        f"|{' --- |' * (len(BACKENDS) + 3)}",
    ]
    for size, by_backend in counts.items():
        supported = " | ".join(str(by_backend[name]) for name in BACKENDS)
        text.append(f"| {size} | {by_backend['all']} | {supported} | {by_backend['some backend']} |")
    REPORT.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
