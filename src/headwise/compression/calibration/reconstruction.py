"""Reconstruction: output projections of a changed copy of a model, fitted by least squares to the dense model.

Layers are fitted in the order of the model. The inputs of a layer's output projection come from the copy, whose earlier
layers are fitted already, and the targets from the dense model, so that later layers correct the errors of earlier ones
as far as they can.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from headwise.compression.calibration.calibration_survey import heads_of_batches
from headwise.compression.calibration.cross_validation import reconstructed
from headwise.compression.calibration.folds import FoldedMoments, folds_of
from headwise.compression.calibration.layer_runs import LayerRuns, layer_of_site
from headwise.compression.calibration.output_moments import OutputMoments
from headwise.compression.calibration.projection_inputs import SequenceInputs, projection_inputs
from headwise.compression.calibration.token_weights import token_weights, weights_of
from headwise.errors import InputError
from headwise.families.head_module import HeadModule, KeptHeads
from headwise.families.registry import head_module
from headwise.intercept.layer_index import is_inside
from headwise.progress import progress_bar
from headwise.removal.head_changes import check_parameters


@torch.no_grad()
def reconstruct(
    model: nn.Module,
    changed: nn.Module,
    kept: dict[str, KeptHeads],
    batches: Sequence[dict[str, Any]],
    documents: Sequence[int] | None,
) -> None:
    """Fit the output projections of a changed copy of a model, in place, to the outputs of the model.

    The copy has the shapes of the model. It computes what it will without the heads that do not remain, whose columns
    become 0.

    Args:
        model: the dense model, in evaluation mode.
        changed: the copy, in evaluation mode.
        kept: remaining heads of each attention module that is fitted.
        batches: arguments of the model.
        documents: number of the document of each sequence; None if it is unknown.

    Raises:
        InputError: weights are quantised, or projections share a weight; a module runs on none of the batches; or
            their padding is not stated; or there is one sequence alone.
    """
    check_parameters(changed, [head_module(model, path) for path in kept])
    folds = folds_of(batches, documents)
    paths, sites = dict(model.named_modules()), _in_order_of_runs(model, list(kept), batches)
    layer_of = {path: _layer_with_output(model, path, layer_of_site(paths, path, sites)) for path in sites}
    layers = list(dict.fromkeys(layer_of.values()))
    weights = token_weights(model, {path: head_module(model, path).output for path in sites}, batches)
    dense_runs, changed_runs = (LayerRuns(each, batches, layers) for each in (model, changed))
    with progress_bar("output projections", len(layers), "layers") as bar:
        for layer in bar.track(layers):
            inside = [path for path in sites if layer_of[path] == layer]
            for path in inside:
                module = head_module(model, path)
                targets = _inputs(model, module, dense_runs, layer, batches, store=path == inside[-1])
                inputs = _inputs(changed, module, changed_runs, layer, batches, store=False)
                projection: Any = model.get_submodule(module.output)
                moments = FoldedMoments(module.output)
                for number, (fold_of, xs, ys) in enumerate(zip(folds, inputs, targets, strict=True)):
                    for index, ((sequence, x), (_, y)) in enumerate(zip(xs, ys, strict=True)):
                        own = weights_of(weights[path], number, index, x)
                        moments.add(fold_of[sequence], OutputMoments.of(x, projection(y), own))
                fit_projection(changed.get_submodule(module.output), module, kept[path], moments.checked())
            changed_runs.run(layer, lambda index: nullcontext(), store=True)


def _in_order_of_runs(model: nn.Module, paths: Sequence[str], batches: Sequence[dict[str, Any]]) -> list[str]:
    """Return paths of attention modules in the order in which the model runs them, on the batch on which most of them
    run.

    Raises:
        InputError: a module runs on no batch; or padding is not stated.
    """
    orders: list[list[str]] = []

    def begin(module: nn.Module, arguments: Any) -> None:
        orders.append([])

    def note(path: str) -> Callable[..., None]:
        return lambda module, arguments: orders[-1].append(path) if orders else None

    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(begin).remove)
        for path in paths:
            hook = model.get_submodule(head_module(model, path).output).register_forward_pre_hook(note(path))
            stack.callback(hook.remove)
        heads_of_batches(model, batches)
    orders.sort(key=lambda order: -len(set(order)))
    order = list(dict.fromkeys(path for order in orders for path in order))
    for path in paths:
        if path not in order:
            raise InputError("calibration", expected=f"data on which {path} runs", got="none")
    return order


def _layer_with_output(model: nn.Module, path: str, layer: str) -> str:
    """Return the path of a layer, or of its innermost ancestor that contains the output projection of an attention
    module as well: in BERT the projection is not inside of the module that computes attention.
    """
    output = head_module(model, path).output
    while layer and not is_inside(output, layer):
        layer = layer.rpartition(".")[0]
    return layer


def _inputs(
    model: nn.Module, module: HeadModule, runs: LayerRuns, layer: str, batches: Sequence[dict[str, Any]], *, store: bool
) -> list[list[SequenceInputs]]:
    """Return the inputs of a module's output projection on each batch."""
    recorded: list[list[SequenceInputs]] = []

    @contextmanager
    def recording(index: int) -> Iterator[None]:
        with projection_inputs(model, {"x": module.output}, batches[index]) as inputs:
            yield
        recorded.append(inputs["x"])

    runs.run(layer, recording, store=store)
    return recorded


def fit_projection(
    projection: Any, module: HeadModule, kept: KeptHeads, moments: FoldedMoments, left_out: int | None = None
) -> None:
    """Fit an output projection to targets, in place; columns of heads that do not remain become 0. The fold `left_out`
    is left out of the fit, if given.
    """
    (axis,) = [each for each in module.blocks if each.parameter == f"{module.output}.weight"]
    columns = axis.kept_indices(kept)
    is_transposed = axis.axis == 0
    weight = projection.weight.mT if is_transposed else projection.weight
    bias = getattr(projection, "bias", None)
    fitted, fitted_bias = reconstructed(moments, weight, columns, bias is not None, left_out)
    full = torch.zeros_like(weight)
    full[:, columns] = fitted.to(full)
    projection.weight.copy_(full.mT if is_transposed else full)
    if bias is not None:
        bias.copy_(fitted_bias)
