"""Write docs/reports/torch-differences.md: cases in which torch's layer and the replacement behave differently."""

import datetime
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.compat import MultiheadAttention

REPORT = Path(__file__).parent.parent.parent / "docs" / "reports" / "torch-differences.md"

BATCH, LENGTH, EMBED, HEADS = 2, 5, 12, 2
BY_DESIGN, TORCH_IS_WRONG, TOLD_BETTER = "by design", "torch is wrong", "the same refusal, told with sizes"


@dataclass(frozen=True)
class Difference:
    """A case, why the two differ in it, and what a layer class does there, in words."""

    name: str
    kind: str
    reason: str
    seen: Callable[[type[nn.MultiheadAttention]], str]


DIFFERENCES: list[Difference] = []


def difference(name: str, kind: str, reason: str) -> Callable:
    """Enter a function, which says what a layer class does, into the table."""

    def enter(seen: Callable[[type[nn.MultiheadAttention]], str]) -> Callable:
        DIFFERENCES.append(Difference(name, kind, reason, seen))
        return seen

    return enter


def made(cls: type[nn.MultiheadAttention], **options: Any) -> nn.MultiheadAttention:
    """A layer of the class, from one seed."""
    torch.manual_seed(0)
    return cls(EMBED, HEADS, **({"batch_first": True} | options))


def tokens() -> Tensor:
    """One input, always the same."""
    return torch.randn(BATCH, LENGTH, EMBED, generator=torch.Generator().manual_seed(1))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation, without gradients: where torch has its fast path."""
    module.eval()
    with torch.no_grad():
        yield


def told(call: Callable[[], object]) -> str:
    """The error that a call raises, as its user reads it."""
    try:
        call()
    except Exception as error:
        return f"`{type(error).__name__}`: {' '.join(str(error).split())}"
    return "no error"


def nans(tensor: Tensor) -> str:
    """How many of the numbers are NaN."""
    return f"{int(tensor.isnan().sum())} of {tensor.numel()} numbers NaN"


def causal() -> Tensor:
    """The causal mask that torch makes."""
    return nn.Transformer.generate_square_subsequent_mask(LENGTH)


def row_hidden(row: int = 3) -> Tensor:
    """A mask, True = ignored, in which one query has no key left."""
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    mask[row] = True
    return mask


# -- rows without a key -----------------------------------------------------------------------------------------------

EMPTY = "A query without a key takes nothing: its heads give 0, its weights are 0, the output is `out_proj.bias`."


@difference("A query without a key, with weights", TORCH_IS_WRONG, EMPTY)
def _(cls):
    x = tokens()
    y, weights = made(cls)(x, x, x, attn_mask=row_hidden())
    return f"output: {nans(y)}; weights: {nans(weights)}"


@difference("The same, gradients of the parameters", TORCH_IS_WRONG, EMPTY)
def _(cls):
    layer, x = made(cls), tokens()
    y, _ = layer(x, x, x, attn_mask=row_hidden())
    y[:, :3].sum().backward()  # of rows that do have keys
    return nans(torch.cat([parameter.grad.flatten() for parameter in layer.parameters()]))


@difference("The same in evaluation, without weights", TORCH_IS_WRONG, EMPTY)
def _(cls):
    layer, x = made(cls), tokens()
    with evaluating(layer):
        return nans(layer(x, x, x, attn_mask=row_hidden(), need_weights=False)[0])


@difference("The same through `nn.TransformerEncoderLayer`, in evaluation", TORCH_IS_WRONG, EMPTY)
def _(cls):
    block = nn.TransformerEncoderLayer(EMBED, HEADS, batch_first=True)
    block.self_attn = made(cls)
    with evaluating(block):
        return nans(block(tokens(), src_mask=row_hidden()))


# -- the causal hint --------------------------------------------------------------------------------------------------


def changed_by_the_hint(layer: nn.MultiheadAttention, query: Tensor, key: Tensor, mask: Tensor) -> str:
    """How far the output with `is_causal=True` is from the one with the mask alone."""
    without, with_hint = (
        layer(query, key, key, attn_mask=mask, is_causal=hint, need_weights=False)[0] for hint in (False, True)
    )
    most = (without - with_hint).abs().max().item()
    return "the hint changes nothing" if most < 1e-5 else f"the hint changes the output by up to {most:.2f}"


@difference(
    "`is_causal=True` and the causal mask, with `add_bias_kv`",
    TORCH_IS_WRONG,
    "It drops the mask for its kernel's flag, which hides the appended key. Ours keeps the mask there.",
)
def _(cls):
    x = tokens()
    return changed_by_the_hint(made(cls, add_bias_kv=True), x, x, causal())


@difference(
    "`is_causal=True`, 1 query at the end of 5 keys, mask of zeros",
    TORCH_IS_WRONG,
    "The kernel's flag is aligned top-left, so the query, though the last, sees the first key alone. "
    "Ours takes the flag only where there are as many queries as keys.",
)
def _(cls):
    x = tokens()
    return changed_by_the_hint(made(cls), x[:, -1:], x, torch.zeros(1, LENGTH))


@difference(
    "`is_causal=True` without a mask, in evaluation",
    TORCH_IS_WRONG,
    "Its fast path forgets the hint, and every query sees the future.",
)
def _(cls):
    layer, x = made(cls), tokens()
    with evaluating(layer):
        y = told(lambda: layer(x, x, x, is_causal=True))
        if y != "no error":
            return y
        future = x.clone()
        future[:, -1] += 1.0
        moved = layer(x, x, x, is_causal=True)[0][:, 0] - layer(future, future, future, is_causal=True)[0][:, 0]
        return f"no error; the first output moves by {moved.abs().max():.2f} when the last token does"


@difference("The same in training", TOLD_BETTER, "`InputError` is a `ValueError`.")
def _(cls):
    x = tokens()
    return told(lambda: made(cls)(x, x, x, is_causal=True))


# -- what stands in place of a parameter ------------------------------------------------------------------------------


@difference(
    "A hook on `out_proj`, one call in training and one in evaluation",
    TORCH_IS_WRONG,
    "It reads `out_proj.weight` and does not call the module; ours does.",
)
def _(cls):
    layer, x, ran = made(cls), tokens(), []
    layer.out_proj.register_forward_hook(lambda *_: ran.append(1))
    layer(x, x, x)
    with evaluating(layer):
        layer(x, x, x)
    return f"it ran {len(ran)} times"


class Adapter(nn.Linear):
    """A linear map whose forward adds something to what its weight says."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


@difference(
    "An adapter that adds 1 in place of `out_proj`",
    TORCH_IS_WRONG,
    "The same: it ignores a low-rank adapter there, without an error.",
)
def _(cls):
    layer, x = made(cls), tokens()
    before, _ = layer(x, x, x)
    adapter = Adapter(EMBED, EMBED)
    adapter.load_state_dict(layer.out_proj.state_dict())
    layer.out_proj = adapter
    return f"the output moves by {(layer(x, x, x)[0] - before).abs().max():.2f}"


@difference(
    "`nn.TransformerEncoderLayer` in evaluation without gradients",
    BY_DESIGN,
    "There torch computes the whole block in one operator that calls no layer. "
    "Ours carries a hook that does nothing, which is one of torch's own conditions for calling the layer.",
)
def _(cls):
    block = nn.TransformerEncoderLayer(EMBED, HEADS, batch_first=True)
    ran = []

    class Counted(cls):
        def forward(self, *inputs, **options):
            ran.append(1)
            return super().forward(*inputs, **options)

    block.self_attn = made(Counted)
    with evaluating(block):
        block(tokens())
    return f"the layer's `forward` ran {len(ran)} times"


# -- dropout ----------------------------------------------------------------------------------------------------------


@difference(
    "Weights in training, `dropout=0.5`",
    BY_DESIGN,
    "Ours are those before dropout: where each query looks, not which weights were left out of this step. "
    "Their expected value is the same.",
)
def _(cls):
    x = tokens()
    _, weights = made(cls, dropout=0.5)(x, x, x)
    sums = weights.sum(-1)
    return f"rows add up to {sums.min():.2f} to {sums.max():.2f}; {int((weights == 0).sum())} weights are 0"


@difference("`dropout=1.0` in training", BY_DESIGN, "A layer that leaves out every weight computes nothing.")
def _(cls):
    x = tokens()
    return told(lambda: made(cls, dropout=1.0)(x, x, x))


# -- mistakes ---------------------------------------------------------------------------------------------------------


@difference("An `attn_mask` of the wrong shape", TOLD_BETTER, "")
def _(cls):
    x = tokens()
    return told(lambda: made(cls)(x, x, x, attn_mask=torch.zeros(LENGTH, 7)))


@difference("A `key_padding_mask` of the wrong shape", TOLD_BETTER, "")
def _(cls):
    x = tokens()
    return told(lambda: made(cls)(x, x, x, key_padding_mask=torch.zeros(LENGTH, BATCH)))


@difference("Inputs of the wrong width", TOLD_BETTER, "")
def _(cls):
    x = tokens()
    return told(lambda: made(cls)(x[..., :7], x, x))


@difference("Inputs of the wrong dtype", TOLD_BETTER, "")
def _(cls):
    x = tokens().double()
    return told(lambda: made(cls)(x, x, x))


@difference("Keys of another batch", TOLD_BETTER, "")
def _(cls):
    x = tokens()
    return told(lambda: made(cls)(x, x[:1], x[:1]))


@difference(
    "A boolean padding mask beside a float `attn_mask`",
    BY_DESIGN,
    "Each means what it means alone.",
)
def _(cls):
    x = tokens()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made(cls)(x, x, x, torch.zeros(BATCH, LENGTH, dtype=torch.bool), attn_mask=causal())
    return f"a warning: {said[0].message}" if said else "no warning"


# -- the document -----------------------------------------------------------------------------------------------------


def cell(text: str) -> str:
    """Text that ends no cell of a table."""
    return text.replace("|", "\\|")


def table() -> list[str]:
    """A row for each difference that this torch shows; one that is gone is named on the error stream."""
    lines = ["| case | torch | headwise | |", "| --- | --- | --- | --- |"]
    for each in DIFFERENCES:
        theirs, ours = each.seen(nn.MultiheadAttention), each.seen(MultiheadAttention)
        if theirs == ours:
            print(f"no longer a difference: {each.name} ({ours})", file=sys.stderr)
            continue
        why = f"{each.kind[0].upper()}{each.kind[1:]}. {each.reason}".strip()
        lines.append(f"| {' | '.join(map(cell, (each.name, theirs, ours, why)))} |")
    return lines


def document() -> str:
    """Return the text of docs/reports/torch-differences.md."""
    version, _, _ = torch.__version__.partition("+")
    lines = [
        "# Differences from `torch.nn.MultiheadAttention`",
        "",
        "How to use the replacement is described in [the stand-in](../stand-in.md).",
        "",
        f"Run on {datetime.date.today().isoformat()} with torch {version} on CPU, by",
        f"`research/tables/torch_differences.py`: batch {BATCH}, length {LENGTH}, width {EMBED}, {HEADS} heads.",
        "In every other case the two agree: `tests/nn/test_torch_compat.py` compares outputs, weights and gradients in",
        "float64 to 1e-12.",
        "",
        *table(),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    REPORT.write_text(document(), encoding="utf-8")
