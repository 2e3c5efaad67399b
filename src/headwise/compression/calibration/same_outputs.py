"""Check by measurement that heads are where the family of an attention module says: a changed model returns the same.

A class name does not show all that a module does: a function of attention may treat heads by their number, a projection
may normalise over all heads, positions may be rotated in another way. So the change of a model's parameters is compared
with what it should equal, on calibration data.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headwise.compression.calibration.recording import padding_masks
from headwise.data.batches import call_model, copied, count_sequences_and_tokens, evaluation_mode
from headwise.errors import InputError
from headwise.families.head_module import HeadModule, KeptHeads
from headwise.families.registry import head_module
from headwise.intercept.module_calls import module_calls
from headwise.progress import progress_bar
from headwise.removal.remove_heads import remove_heads
from headwise.shapes import Float

SIXTEEN_BITS = 1e-4
"""A rounding error between those of 32 and of 16 bits."""

VECTORS = 256
"""Number of outputs of each module that are compared."""


Sample = tuple[torch.Size, Float[Tensor, "_ _"]]
"""Part of an output: the shape of the whole output, and vectors `(vectors, width)` of it at random tokens that are not
padding, in float64."""

Outputs = dict[str, list[Sample]]
"""Samples of the outputs of attention modules, and of the model under the empty path, in the order of the run."""

REMOVED = "returns the same without heads as with outputs of 0 from these heads"
MERGED = "returns the same with fewer key/value heads as with equal ones"
ALIGNED = "does not change if its heads are reordered and rotated"


def remove_heads_checked(
    model: nn.Module,
    kept: Mapping[str, KeptHeads],
    batches: Sequence[dict[str, Any]],
    *,
    may_record: bool = True,
    claim: str = REMOVED,
) -> None:
    """Remove all heads except those in `kept` from a model, in place, as `remove_heads` does. The outputs on batches
    must then equal the outputs of the model before the removal, computed with the outputs of the removed heads set to
    0. If they differ, raise an `InputError` whose message contains `claim`.
    """
    modules = {path: head_module(model, path) for path in kept}

    def zeroing(module: HeadModule, heads: KeptHeads) -> Any:
        is_kept = torch.zeros(module.num_heads, dtype=torch.bool)
        is_kept[list(heads.query)] = True
        columns = is_kept.repeat_interleave(module.value_dim)

        def hook(projection: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            first, *others = arguments
            return first.masked_fill(~columns.to(first.device), 0.0), *others

        return hook

    with ExitStack() as stack:
        for path, module in modules.items():
            hook = model.get_submodule(module.output).register_forward_pre_hook(zeroing(module, kept[path]))
            stack.callback(hook.remove)
        expected, used = outputs_of(model, modules, batches)
    remove_heads(model, kept, may_record=may_record)
    found, _ = outputs_of(model, modules, used)
    require_same(model, expected, found, claim)


def outputs_of(
    model: nn.Module, modules: Mapping[str, HeadModule], batches: Sequence[dict[str, Any]]
) -> tuple[Outputs, list[dict[str, Any]]]:
    """Run a model in evaluation mode, on the batches with the longest sequences first, until every attention module in
    `modules` has run. Return samples of the outputs of these modules and of the model, and the batches used. The random
    seed is the same for each batch.
    """
    outputs: Outputs = {}
    used: list[dict[str, Any]] = []

    def record(path: str, arguments: Any, output: Any) -> None:
        for owner in owners_of[path]:
            outputs.setdefault(owner, []).extend(_samples(output, used[-1]))

    owners_of: dict[str, list[str]] = {}
    for path, module in modules.items():
        for each in {module.output, path} - {""}:  # the outputs of the model itself are read below
            owners_of.setdefault(each, []).append(path)

    calls = module_calls({path: model.get_submodule(path) for path in owners_of}, record)
    bar = progress_bar("comparison of outputs", None, "batches")
    with calls, evaluation_mode(model), torch.no_grad(), bar as progress:
        counts = map(count_sequences_and_tokens, batches)
        lengths = [tokens / max(1, sequences) for sequences, tokens in counts]
        order = sorted(range(len(batches)), key=lengths.__getitem__, reverse=True)
        for batch in progress.track([batches[index] for index in order], step=1):
            used.append(batch)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                result = call_model(model, copied(batch))
            outputs.setdefault("", []).extend(_samples(result, batch))
            if all(path in outputs for path in modules):
                break
    return outputs, used


def require_same(model: nn.Module, expected: Outputs, found: Outputs, claim: str) -> None:
    """Raise `InputError` if the outputs of a changed model, `found`, differ from the `expected` outputs by more than
    rounding. The error names the first module whose outputs differ.

    Two outputs agree if the relative difference of nine tenths of the tokens is at most the square root of the rounding
    error of the model's dtype; of three quarters in 16 bits. Not of all, because rounding may send tokens to another
    expert.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    rounding = max(torch.finfo(dtype).eps for dtype in {torch.float32, *dtypes} if torch.finfo(dtype).bits >= 16)
    share = 0.9 if rounding < SIXTEEN_BITS else 0.75
    ordered = [*(path for path in expected if path), ""]
    for path in ordered:
        if expected[path] and not any(vectors.isfinite().any() for _, vectors in expected[path]):
            got = f"none from {path or type(model).__name__}"
            remedy = "use other texts, or a dtype with a larger range"
            raise InputError("calibration", expected="texts with finite outputs", got=got, remedy=remedy)
        for (shape, one), (other_shape, other) in zip(expected[path], found.get(path, []), strict=False):
            if shape == other_shape and (difference := _difference(one, other, share)) > rounding**0.5:
                got = f"a relative difference of {difference:.2g} in {path or type(model).__name__}"
                remedy = "this module computes something else than others of its class name"
                raise InputError("model", expected=f"attention that {claim}", got=got, remedy=remedy)


def _difference(one: Float[Tensor, "vectors width"], other: Float[Tensor, "vectors width"], share: float) -> float:
    """Compute the relative difference `|one - other| / |one|` of each pair of corresponding vectors, and return the
    quantile `share` of these differences. Infinite numbers that are equal in both, and vectors of `one` with NaN, are
    ignored. Return 0 if no vectors remain.
    """
    counts = ~one.isnan().any(1)
    is_equal = one.isinf() & (one == other)
    before, after = (each.masked_fill(is_equal, 0.0)[counts] for each in (one, other))
    difference, size = (before - after).norm(dim=1), before.norm(dim=1)
    relative = torch.where(difference == 0, 0.0, difference / size).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(relative.sort().values[int(share * len(relative))]) if len(relative) else 0.0


def _samples(output: Any, batch: dict[str, Any]) -> list[Sample]:
    """Return random sample vectors from the floating-point tensors of a model's or module's output, without padding. If
    the output is a mapping, its attention weights and caches are left out, since their heads may be in another order.
    If the output is not a mapping, only its first tensor is sampled.
    """
    if isinstance(output, Mapping):
        leaves = [value for name, value in output.items() if not name.endswith(("attentions", "past_key_values"))]
        leaves = pytree.tree_leaves(leaves)
    else:
        leaves = pytree.tree_leaves(output)[:1]
    samples = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not leaf.is_nested and leaf.is_floating_point() and leaf.numel():
            vectors = leaf.detach().reshape(-1, leaf.shape[-1] if leaf.ndim else 1)
            is_real = torch.ones(leaf.shape[:-1], dtype=torch.bool, device=leaf.device)
            for mask in padding_masks(batch).values():
                if mask.shape == is_real.shape:
                    is_real &= mask.to(leaf.device)
            vectors = vectors[is_real.flatten()] if is_real.any() else vectors
            places = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(0))[:VECTORS]
            samples.append((leaf.shape, vectors[places.to(vectors.device)].double()))
    return samples
