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
BY_DESIGN, TORCH_IS_WRONG = "by design", "torch is wrong"
CLEARER_ERROR = "same error, with sizes in the message"


@dataclass(frozen=True)
class Difference:
    """Case in which torch's layer and the replacement behave differently.

    Attributes:
        name: title of the row in the table.
        kind: by design, a mistake of torch, or a clearer error.
        reason: why the two differ.
        behaviour: runs the case with a layer class and describes the result.
    """

    name: str
    kind: str
    reason: str
    behaviour: Callable[[type[nn.MultiheadAttention]], str]


DIFFERENCES: list[Difference] = []


def difference(name: str, kind: str, reason: str) -> Callable:
    """Return a decorator that adds a row to the table; the function runs the case and describes the result."""

    def add_row(behaviour: Callable[[type[nn.MultiheadAttention]], str]) -> Callable:
        DIFFERENCES.append(Difference(name, kind, reason, behaviour))
        return behaviour

    return add_row


def build(cls: type[nn.MultiheadAttention], **options: Any) -> nn.MultiheadAttention:
    """Return a layer of the class, always with the same parameters."""
    torch.manual_seed(0)
    return cls(EMBED, HEADS, **({"batch_first": True} | options))


def tokens() -> Tensor:
    """Return an input, always the same."""
    return torch.randn(BATCH, LENGTH, EMBED, generator=torch.Generator().manual_seed(1))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put the module in evaluation mode and switch gradients off, where torch has its fast path."""
    module.eval()
    with torch.no_grad():
        yield


def error_text(call: Callable[[], object]) -> str:
    """Return type and message of the error that a call raises, or "no error"."""
    try:
        call()
    except Exception as error:
        return f"`{type(error).__name__}`: {' '.join(str(error).split())}"
    return "no error"


def count_nans(tensor: Tensor) -> str:
    """Return the number of NaNs in a tensor, in words."""
    return f"{int(tensor.isnan().sum())} of {tensor.numel()} numbers NaN"


def causal() -> Tensor:
    """Return the causal mask of `nn.Transformer`."""
    return nn.Transformer.generate_square_subsequent_mask(LENGTH)


def mask_without_keys(row: int = 3) -> Tensor:
    """Return a mask, True = ignored, in which one query may attend to no key."""
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    mask[row] = True
    return mask


# -- rows without a key -----------------------------------------------------------------------------------------------

EMPTY = "The heads of a query without a key have output 0 and weights 0, so the output is `out_proj.bias`."


@difference("A query without a key, with weights", TORCH_IS_WRONG, EMPTY)
def _(cls):
    x = tokens()
    y, weights = build(cls)(x, x, x, attn_mask=mask_without_keys())
    return f"output: {count_nans(y)}; weights: {count_nans(weights)}"


@difference("The same, gradients of the parameters", TORCH_IS_WRONG, EMPTY)
def _(cls):
    layer, x = build(cls), tokens()
    y, _ = layer(x, x, x, attn_mask=mask_without_keys())
    y[:, :3].sum().backward()  # of rows that do have keys
    return count_nans(torch.cat([parameter.grad.flatten() for parameter in layer.parameters()]))


@difference("The same in evaluation, without weights", TORCH_IS_WRONG, EMPTY)
def _(cls):
    layer, x = build(cls), tokens()
    with evaluating(layer):
        return count_nans(layer(x, x, x, attn_mask=mask_without_keys(), need_weights=False)[0])


@difference("The same through `nn.TransformerEncoderLayer`, in evaluation", TORCH_IS_WRONG, EMPTY)
def _(cls):
    block = nn.TransformerEncoderLayer(EMBED, HEADS, batch_first=True)
    block.self_attn = build(cls)
    with evaluating(block):
        return count_nans(block(tokens(), src_mask=mask_without_keys()))


@difference(
    "A float `attn_mask` of 3 axes that hides all keys of a query in one head, in evaluation", TORCH_IS_WRONG, EMPTY
)
def _(cls):
    layer, x = build(cls), tokens()
    mask = torch.zeros(BATCH * HEADS, LENGTH, LENGTH)
    mask[1, 3] = -torch.inf
    with evaluating(layer):
        y, weights = layer(x, x, x, attn_mask=mask)
    return f"output: {count_nans(y)}; weights: {count_nans(weights)}"


# -- the causal hint --------------------------------------------------------------------------------------------------


def changed_by_the_hint(layer: nn.MultiheadAttention, query: Tensor, key: Tensor, mask: Tensor) -> str:
    """Return in words how much `is_causal=True` changes the output for the same mask."""
    without, with_hint = (
        layer(query, key, key, attn_mask=mask, is_causal=hint, need_weights=False)[0] for hint in (False, True)
    )
    most = (without - with_hint).abs().max().item()
    return "the hint changes nothing" if most < 1e-5 else f"the hint changes the output by up to {most:.2f}"


@difference(
    "`is_causal=True` and the causal mask, with `add_bias_kv` and `add_zero_attn`",
    TORCH_IS_WRONG,
    "It replaces the mask by its kernel's causal flag, which hides the appended keys. Ours keeps the mask.",
)
def _(cls):
    x = tokens()
    return changed_by_the_hint(build(cls, add_bias_kv=True, add_zero_attn=True), x, x, causal())


@difference(
    "`is_causal=True`, 1 query at the end of 5 keys, mask of zeros",
    TORCH_IS_WRONG,
    "The kernel's flag is aligned top-left, so the last query sees only the first key. "
    "Ours uses the flag only if there are as many queries as keys.",
)
def _(cls):
    x = tokens()
    return changed_by_the_hint(build(cls), x[:, -1:], x, torch.zeros(1, LENGTH))


@difference(
    "`is_causal=True` without a mask, in evaluation",
    TORCH_IS_WRONG,
    "Its fast path ignores the hint, and every query sees later tokens.",
)
def _(cls):
    layer, x = build(cls), tokens()
    with evaluating(layer):
        y = error_text(lambda: layer(x, x, x, is_causal=True))
        if y != "no error":
            return y
        future = x.clone()
        future[:, -1] += 1.0
        moved = layer(x, x, x, is_causal=True)[0][:, 0] - layer(future, future, future, is_causal=True)[0][:, 0]
        return f"no error; the first output moves by {moved.abs().max():.2f} when the last token does"


@difference("The same in training", CLEARER_ERROR, "`InputError` is a `ValueError`.")
def _(cls):
    x = tokens()
    return error_text(lambda: build(cls)(x, x, x, is_causal=True))


# -- what stands in place of a parameter ------------------------------------------------------------------------------


@difference(
    "A hook on `out_proj`, one call in training and one in evaluation",
    TORCH_IS_WRONG,
    "It reads `out_proj.weight` and does not call the module. Ours calls it.",
)
def _(cls):
    layer, x, ran = build(cls), tokens(), []
    layer.out_proj.register_forward_hook(lambda *_: ran.append(1))
    layer(x, x, x)
    with evaluating(layer):
        layer(x, x, x)
    return f"it ran {len(ran)} times"


class Adapter(nn.Linear):
    """Linear map whose forward adds 1, as an adapter adds a correction."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear map of x, plus 1."""
        return super().forward(x) + 1.0


@difference(
    "An adapter that adds 1 in place of `out_proj`",
    TORCH_IS_WRONG,
    "For the same reason it ignores a low-rank adapter there, without an error.",
)
def _(cls):
    layer, x = build(cls), tokens()
    before, _ = layer(x, x, x)
    adapter = Adapter(EMBED, EMBED)
    adapter.load_state_dict(layer.out_proj.state_dict())
    layer.out_proj = adapter
    return f"the output moves by {(layer(x, x, x)[0] - before).abs().max():.2f}"


@difference(
    "`nn.TransformerEncoderLayer` in evaluation without gradients",
    BY_DESIGN,
    "Torch computes the whole block in one operator that calls no layer. "
    "Ours contains a module with a hook that does nothing, because torch calls a layer with hooks inside.",
)
def _(cls):
    block = nn.TransformerEncoderLayer(EMBED, HEADS, batch_first=True)
    ran = []

    class Counted(cls):
        def forward(self, *inputs, **options):
            ran.append(1)
            return super().forward(*inputs, **options)

    block.self_attn = build(Counted)
    with evaluating(block):
        block(tokens())
    return f"the layer's `forward` ran {len(ran)} times"


# -- dropout ----------------------------------------------------------------------------------------------------------


@difference(
    "Weights in training, `dropout=0.5`",
    BY_DESIGN,
    "Ours are the weights before dropout, which show where each query attends. The expected value is the same.",
)
def _(cls):
    x = tokens()
    _, weights = build(cls, dropout=0.5)(x, x, x)
    sums = weights.sum(-1)
    return f"rows add up to {sums.min():.2f} to {sums.max():.2f}; {int((weights == 0).sum())} weights are 0"


@difference("`dropout=1.0` in training", BY_DESIGN, "A layer that drops every weight computes nothing.")
def _(cls):
    x = tokens()
    return error_text(lambda: build(cls, dropout=1.0)(x, x, x))


# -- mistakes ---------------------------------------------------------------------------------------------------------


@difference("An `attn_mask` of the wrong shape", CLEARER_ERROR, "")
def _(cls):
    x = tokens()
    return error_text(lambda: build(cls)(x, x, x, attn_mask=torch.zeros(LENGTH, 7)))


@difference("A `key_padding_mask` of the wrong shape", CLEARER_ERROR, "")
def _(cls):
    x = tokens()
    return error_text(lambda: build(cls)(x, x, x, key_padding_mask=torch.zeros(LENGTH, BATCH)))


@difference("Inputs of the wrong width", CLEARER_ERROR, "")
def _(cls):
    x = tokens()
    return error_text(lambda: build(cls)(x[..., :7], x, x))


@difference("Inputs of the wrong dtype", CLEARER_ERROR, "")
def _(cls):
    x = tokens().double()
    return error_text(lambda: build(cls)(x, x, x))


@difference("Keys of another batch", CLEARER_ERROR, "")
def _(cls):
    x = tokens()
    return error_text(lambda: build(cls)(x, x[:1], x[:1]))


@difference(
    "A boolean padding mask together with a float `attn_mask`",
    BY_DESIGN,
    "Each mask has the meaning that it has alone.",
)
def _(cls):
    x = tokens()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(cls)(x, x, x, torch.zeros(BATCH, LENGTH, dtype=torch.bool), attn_mask=causal())
    return f"a warning: {caught[0].message}" if caught else "no warning"


# -- the document -----------------------------------------------------------------------------------------------------


def cell(text: str) -> str:
    """Return text with escaped vertical bars, for a cell of a table."""
    return text.replace("|", "\\|")


def table() -> list[str]:
    """Return the table: a row per difference; one that this torch no longer shows goes to the error stream."""
    lines = ["| case | torch | headwise | reason |", "| --- | --- | --- | --- |"]
    for case in DIFFERENCES:
        theirs, ours = case.behaviour(nn.MultiheadAttention), case.behaviour(MultiheadAttention)
        if theirs == ours:
            print(f"no longer a difference: {case.name} ({ours})", file=sys.stderr)
            continue
        why = f"{case.kind[0].upper()}{case.kind[1:]}. {case.reason}".strip()
        lines.append(f"| {' | '.join(map(cell, (case.name, theirs, ours, why)))} |")
    return lines


def document() -> str:
    """Return the text of docs/reports/torch-differences.md."""
    version, _, _ = torch.__version__.partition("+")
    lines = [
        "# Differences from `torch.nn.MultiheadAttention`",
        "",
        "`headwise.compat.MultiheadAttention` replaces `torch.nn.MultiheadAttention`. This page lists every known case",
        "in which the two layers behave differently. [Replacing torch's layer](../torch-layer.md) describes its use.",
        "",
        "For each row of the table, `research/tables/torch_differences.py` ran two layers: "
        "`torch.nn.MultiheadAttention`",
        f"and its replacement in headwise. It ran them on {datetime.date.today().isoformat()}, with torch {version} "
        "on CPU. The layers have",
        f"width {EMBED} and {HEADS} heads; the inputs have batch {BATCH} and length {LENGTH}. In cases that are not in "
        "the table the two layers",
        "agree: `tests/nn/test_torch_compat.py` compares their outputs, weights and gradients in float64 to 1e-12.",
        "",
        *table(),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    REPORT.write_text(document(), encoding="utf-8")
