"""`prune`: a copy of a model with fewer heads, whose output projections are fitted to the outputs of the dense model.

Layers are pruned in the order of the model. The inputs of a layer's output projection come from the model whose earlier
layers are pruned already, and the targets from the dense model, so that the errors of earlier layers are corrected as
far as the remaining heads can.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import reduce
from typing import Any

import torch
from torch import nn

from headwise.checks import require_module
from headwise.compression.layer_runs import LayerRuns, layer_of_site
from headwise.compression.output_moments import OutputMoments, reconstructed
from headwise.compression.projection_inputs import projection_inputs
from headwise.compression.pruning_plan import PruningPlan
from headwise.compression.scored_heads import calibration_batches
from headwise.data.batches import evaluation_mode
from headwise.errors import InputError
from headwise.removal.families import head_module
from headwise.removal.head_axes import KeptHeads
from headwise.removal.head_module import HeadModule
from headwise.removal.remove_heads import remove_heads
from headwise.runs.fingerprint import identity_of


def prune(model: nn.Module, plan: PruningPlan, *, calibration: Any = None) -> nn.Module:
    """Return a copy of a model without the heads that a plan removes: rows and columns of its projections are removed,
    and its configuration states the remaining heads.

    With calibration data, the output projection of each attention module is fitted by least squares to what the dense
    module returns; without, the remaining weights are unchanged, and the copy equals the model with the outputs of the
    removed heads set to zero.

    Args:
        model: a model of a known family.
        plan: the heads that remain, of `hw.plan_pruning`.
        calibration: `Texts`, or batches of the model's arguments; None for no reconstruction.

    Raises:
        InputError: the plan is for another model, the model is of no known family, or the calibration data are empty.

    Example:
        >>> pruned = headwise.prune(model, plan, calibration=texts)  # doctest: +SKIP
        >>> pruned.save_pretrained("smaller")  # doctest: +SKIP
    """
    require_module(model)
    kept = _kept_heads(model, plan)
    pruned = deepcopy(model)
    if calibration is not None:
        with evaluation_mode(model), evaluation_mode(pruned):
            _reconstruct(model, pruned, kept, calibration_batches(model, calibration))
    remove_heads(pruned, kept)
    return pruned


def _kept_heads(model: nn.Module, plan: PruningPlan) -> dict[str, KeptHeads]:
    """Return the heads that remain in each attention module.

    Raises:
        InputError: the plan is for another model.
    """
    if not isinstance(plan, PruningPlan):
        raise InputError("plan", expected="a PruningPlan of hw.plan_pruning", got=type(plan).__name__)
    paths, kept = dict(model.named_modules()), {}
    for planned in plan.modules:
        if planned.module not in paths:
            raise InputError("plan", expected="a plan for this model", got=f"one with a module {planned.module}")
        module = head_module(model, planned.module)
        if (module.num_heads, module.num_kv_heads) != (planned.num_heads, planned.num_kv_heads):
            got = f"{planned.num_heads} heads and {planned.num_kv_heads} key/value heads"
            expected = f"{module.num_heads} heads and {module.num_kv_heads} key/value heads in {planned.module}"
            raise InputError("plan", expected=expected, got=got)
        if planned.module in kept:
            got = f"two kinds in {planned.module}"
            raise InputError("plan", expected="one kind of attention in each module", got=got)
        kept[planned.module] = module.kept(planned.kept)
    if plan.identity is not None and plan.identity.is_other(identity_of(model)):
        raise InputError("plan", expected="a plan for this model", got="one for a model with other weights")
    return kept


@torch.no_grad()
def _reconstruct(
    model: nn.Module, pruned: nn.Module, kept: dict[str, KeptHeads], batches: Sequence[dict[str, Any]]
) -> None:
    """Fit the output projections of a copy of a model, in place, such that heads which do not remain have weights of 0.

    The copy still has all heads, and computes what it will without the heads that do not remain.
    """
    paths, sites = dict(model.named_modules()), list(kept)
    layers = list(dict.fromkeys(layer_of_site(paths, path, sites) for path in sites))
    dense_runs, pruned_runs = (LayerRuns(each, batches, layers) for each in (model, pruned))
    for layer in layers:
        inside = [path for path in sites if layer_of_site(paths, path, sites) == layer]
        for path in inside:
            module = head_module(model, path)
            targets = _inputs(model, module, dense_runs, layer, batches, store=path == inside[-1])
            inputs = _inputs(pruned, module, pruned_runs, layer, batches, store=False)
            projection: Any = model.get_submodule(module.output)
            parts = (OutputMoments.of(x, projection(y)) for x, y in zip(inputs, targets, strict=True))
            _fit(pruned.get_submodule(module.output), module, kept[path], _sum(parts))
        pruned_runs.run(layer, lambda index: nullcontext(), store=True)


def _inputs(
    model: nn.Module, module: HeadModule, runs: LayerRuns, layer: str, batches: Sequence[dict[str, Any]], *, store: bool
) -> list[torch.Tensor]:
    """Return the inputs of a module's output projection on each batch."""
    recorded: list[torch.Tensor] = []

    @contextmanager
    def recording(index: int) -> Iterator[None]:
        with projection_inputs(model, {"x": module.output}, batches[index]) as inputs:
            yield
        recorded.append(torch.cat(inputs["x"]))

    runs.run(layer, recording, store=store)
    return recorded


def _fit(projection: Any, module: HeadModule, kept: KeptHeads, moments: OutputMoments) -> None:
    """Fit an output projection to targets, in place; columns of heads that do not remain become 0."""
    (axis,) = [each for each in module.axes if each.parameter == f"{module.output}.weight"]
    columns = axis.kept_indices(kept)
    is_transposed = axis.axis == 0
    weight = projection.weight.mT if is_transposed else projection.weight
    bias = getattr(projection, "bias", None)
    fitted, fitted_bias = reconstructed(moments, weight, columns, bias is not None)
    full = torch.zeros_like(weight)
    full[:, columns] = fitted.to(full)
    projection.weight.copy_(full.mT if is_transposed else full)
    if bias is not None and fitted_bias is not None:
        bias.copy_(fitted_bias)


def _sum(moments: Iterable[OutputMoments]) -> OutputMoments:
    """Return the sum of moments."""
    return reduce(operator.add, moments)
