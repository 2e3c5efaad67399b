"""Write docs/backends.md: what each backend can do, as `why_not` says, and every combination tried.

python -m research.tables.backends
"""

import itertools
from datetime import date
from pathlib import Path

import torch

import headwise as hw
from headwise.attention import backend_choice
from headwise.attention.attend import BACKENDS
from headwise.attention.backends.blockwise import scores_bf16, scores_fp32

DOCS = Path(__file__).parent.parent.parent / "docs"

BATCH, HEADS, KV_HEADS, LENGTH, HEAD_DIM, VALUE_DIM = 2, 6, 2, 7, 5, 3


def bias(requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(BATCH, HEADS, LENGTH, LENGTH).requires_grad_(requires_grad)


OPTIONS = {
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
"""What a call may ask for, beside grouped heads and values of a width of their own, which all have."""


def tensors(requires_grad: bool) -> tuple[torch.Tensor, ...]:
    shapes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM))
    return tuple(torch.randn(BATCH, heads, LENGTH, width).requires_grad_(requires_grad) for heads, width in shapes)


def reason(backend: str, options: dict, gradient: bool) -> str | None:
    """Why not; where there is nothing against it, it is done."""
    with torch.set_grad_enabled(gradient):
        q, k, v = tensors(requires_grad=gradient)
        why = hw.why_not(backend, q, k, v, **options)
        if why is not None:
            return why
        attended = hw.attend(q, k, v, **options, backend=backend)
        results = attended if isinstance(attended, tuple) else (attended,)
        assert not any(result.isnan().any() for result in results)
        if gradient:
            loss = sum(result[result.isfinite()].sum() for result in results)
            gradients = torch.autograd.grad(loss, (q, k, v), allow_unused=True, materialize_grads=True)
            assert not any(each.isnan().any() for each in gradients)
    return None


def cell(backend: str, options: dict) -> str:
    forward, backward = (reason(backend, options, gradient) for gradient in (False, True))
    if forward is None and backward is None:
        return "yes"
    return f"no: {forward}" if forward is not None else f"forward only: {backward}"


def table() -> list[str]:
    """One row an option, one column a backend."""
    lines = [f"| asked for | {' | '.join(f'`{name}`' for name in BACKENDS)} |", f"|{' --- |' * (len(BACKENDS) + 1)}"]
    for name, options in OPTIONS.items():
        lines.append(f"| {name} | {' | '.join(cell(backend, options) for backend in BACKENDS)} |")
    return lines


def combinations(size: int) -> dict[str, int]:
    """How many combinations of so many options each backend does, forward and backward; and all there are."""
    counts = dict.fromkeys(BACKENDS, 0)
    counts["all"] = counts["some backend"] = 0
    for chosen in itertools.combinations(OPTIONS.values(), size):
        options = {}
        if sum(map(len, chosen)) > len({name for each in chosen for name in each}):
            continue  # two values of one argument
        for each in chosen:
            options |= each
        can = [backend for backend in BACKENDS if cell(backend, options) == "yes"]
        for backend in [*can, "all", *(["some backend"] if can else [])]:
            counts[backend] += 1
    return counts


CHOICE = f"""\
## Which is taken

`backend=None` takes the faster of `fused` and `blockwise`; `hw.explain(q, k, v, ...)` says which and why. The unit of
cost is a score that torch's kernel computes, head_dim 64, two CPU cores with AVX-512:

| | costs |
| --- | --- |
| `fused` | every score of the square, hidden or not |
| `fused`, plain causal | {backend_choice.CAUSAL_FLAG_SHARE} of them |
| `fused`, with dropout or a bias that learns, where torch makes the matrix \
| {backend_choice.FULL_MATRIX_COST} times as much |
| `fused`, values of another width than keys | as if both had the larger |
| `blockwise` | {backend_choice.FLOAT32_SCORE_COST} a score of its blocks, \
and each block as much as {scores_fp32.BLOCK_OVERHEAD:,} scores |
| `blockwise`, scores in bfloat16 | {backend_choice.BFLOAT16_SCORE_COST} a score, \
and each block as much as {scores_bf16.BLOCK_OVERHEAD:,} |

Scores are computed in bfloat16 for inputs in bfloat16 without a softcap, bias, sinks, dropout,
log-sum-exp or a scale for each head.

The kernel is taken without asking the mask for fewer than
{backend_choice.SMALLEST_PLANNED:,} scores, for masks that are a matrix for
each sequence or head, where the weights are asked for, and on devices where nothing has been measured, which is every
other than a CPU. There torch chooses between its own kernels.
""".splitlines()


def main() -> None:
    torch.manual_seed(0)
    counts = {size: combinations(size) for size in (1, 2, 3)}
    text = [
        "# What each backend can do",
        "",
        f"Written by `research/tables/backends.py` on {date.today().isoformat()}, torch {torch.__version__}, on CPU:",
        "each cell is what `headwise.why_not` answers, with gradients and without; each *yes* was run, both ways.",
        "",
        *table(),
        "",
        "`reference` keeps the whole matrix in memory, and runs only when it is asked for by name. Only it has second",
        "derivatives. On other devices than the CPU `fused` refuses the log-sum-exp; while compiling `blockwise`",
        "refuses all. Nothing has run on a GPU yet.",
        "",
        *CHOICE,
        "",
        "## Together",
        "",
        "Every combination of the rows above that does not give one argument twice, forward and backward:",
        "",
        f"| options at once | combinations | {' | '.join(f'`{name}`' for name in BACKENDS)} | some backend |",
        f"|{' --- |' * (len(BACKENDS) + 3)}",
    ]
    for size, found in counts.items():
        can = " | ".join(str(found[name]) for name in BACKENDS)
        text.append(f"| {size} | {found['all']} | {can} | {found['some backend']} |")
    (DOCS / "backends.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
