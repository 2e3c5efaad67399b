"""Reconstruction: output projections of a changed copy of a model, fitted by least squares to the dense model.

Layers are fitted in the order of the model. The inputs of a layer's output projection come from the copy, whose earlier
layers are fitted already, and the targets from the dense model, so that later layers correct the errors of earlier ones
as far as they can.

The layers of a transformer form a chain, in which each takes the output of the one before. If that output is known, a
run up to layer i needs embeddings, masks and layer i alone. `LayerRuns` checks on two batches that this holds, by a
comparison with complete runs; in a model for which it does not hold, all layers are computed each time.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headwise.compression.calibration.calibration_data import folds_of, heads_of_batches
from headwise.compression.calibration.derivatives import token_weights, weights_of
from headwise.compression.calibration.least_squares_fits import FoldedMoments, OutputMoments
from headwise.compression.calibration.recording import SequenceVectors, projection_inputs
from headwise.data.batches import call_model, copied, count_sequences_and_tokens
from headwise.errors import InputError
from headwise.families.head_module import HeadModule, KeptHeads
from headwise.families.registry import head_module
from headwise.intercept.layer_index import is_inside
from headwise.intercept.module_calls import module_calls, swap_forward
from headwise.progress import progress_bar
from headwise.removal.head_changes import check_parameters
from headwise.shapes import Float, Int


@torch.no_grad()
def reconstruct(
    model: nn.Module,
    changed: nn.Module,
    kept: dict[str, KeptHeads],
    batches: Sequence[dict[str, Any]],
    documents: Sequence[int] | None,
) -> None:
    """Fit the output projections of `changed`, a copy of `model`, by least squares, in place. `kept` has the heads that
    remain in each attention module, by path. The targets are the outputs of the same projections in `model`. All shapes
    stay the same: the input columns of all other heads become 0, which has the same effect as their removal. Both
    models must be in evaluation mode.
    """
    modules = {path: head_module(model, path) for path in kept}
    check_parameters(changed, list(modules.values()))
    folds = folds_of(batches, documents)
    sites = _in_order_of_runs(model, modules, batches)
    submodules = dict(model.named_modules())
    layer_of: dict[str, str] = {}
    for path in sites:
        layer_of[path] = layer_of_site(submodules, path, sites)
        # In BERT the output projection is not inside of the module that computes attention.
        while layer_of[path] and not is_inside(modules[path].output, layer_of[path]):
            layer_of[path] = layer_of[path].rpartition(".")[0]
    layers = list(dict.fromkeys(layer_of.values()))
    weights = token_weights(model, [modules[path].output for path in sites], batches)
    dense_runs, changed_runs = (LayerRuns(each, batches, layers) for each in (model, changed))
    with progress_bar("output projections", len(layers), "layers") as bar:
        for layer in bar.track(layers):
            inside = [path for path in sites if layer_of[path] == layer]
            for path in inside:
                output = modules[path].output
                targets = dense_runs.run(layer, output, store=path == inside[-1])
                inputs = changed_runs.run(layer, output, store=False)
                projection, moments = model.get_submodule(output), moments_of(changed, modules[path])
                for number, (fold_of, xs, ys) in enumerate(zip(folds, inputs, targets, strict=True)):
                    for index, ((sequence, x), (_, y)) in enumerate(zip(xs, ys, strict=True)):
                        own = weights_of(weights[output], number, index, x)
                        moments.add(fold_of[sequence], OutputMoments.of(x, projection(y), own))
                fit_projection(changed, modules[path], kept[path].query, moments.checked())
            changed_runs.run(layer, store=True)


def _in_order_of_runs(
    model: nn.Module, modules: Mapping[str, HeadModule], batches: Sequence[dict[str, Any]]
) -> list[str]:
    """Return the paths of attention modules in the order in which the model runs them, on the batch on which most of
    these modules run. Modules that do not run on this batch come last.
    """
    orders: list[list[str]] = []
    paths_of: dict[str, list[str]] = {}
    for path, module in modules.items():
        paths_of.setdefault(module.output, []).append(path)

    def note(output: str, *_: Any) -> None:
        if orders:
            orders[-1].extend(paths_of[output])

    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(lambda *_: orders.append([])).remove)
        stack.enter_context(module_calls({output: model.get_submodule(output) for output in paths_of}, note))
        heads_of_batches(model, batches)
    orders.sort(key=lambda order: -len(set(order)))
    order = list(dict.fromkeys(path for order in orders for path in order))
    for path in modules:
        if path not in order:
            raise InputError("calibration", expected=f"data on which {path} runs", got="none")
    return order


def output_weight(model: nn.Module, module: HeadModule) -> Float[Tensor, "out width"]:
    """Return the weight of a module's output projection in the layout of `nn.Linear`, `(out, in)`. The returned tensor
    is a view that shares the memory of the parameter.
    """
    (axis,) = [each for each in module.blocks if each.parameter == f"{module.output}.weight"]
    weight = model.get_parameter(axis.parameter).detach()
    return weight.mT if axis.axis == 0 else weight


def moments_of(model: nn.Module, module: HeadModule) -> FoldedMoments:
    """Return a new `FoldedMoments` (sums over tokens, for a least-squares fit) for the output projection of an
    attention module. It contains no tokens yet.
    """
    has_bias = getattr(model.get_submodule(module.output), "bias", None) is not None
    return FoldedMoments(module.output, output_weight(model, module), has_bias)


def columns_of_heads(module: HeadModule, heads: Sequence[int]) -> Int[Tensor, " columns"]:
    """Return the input columns of a module's output projection that read the outputs of `heads`, in ascending order."""
    starts = torch.tensor(sorted(heads), dtype=torch.int64)[:, None] * module.value_dim
    return (starts + torch.arange(module.value_dim)).flatten()


def fit_projection(
    model: nn.Module, module: HeadModule, kept: Sequence[int], moments: FoldedMoments, left_out: int | None = None
) -> None:
    """Fit the output projection of an attention module, in place, to the target outputs, of which `moments` has sums
    over tokens. The columns of heads that are not in `kept` become 0. The fit does not use the cross-validation fold
    `left_out`, if one is stated.
    """
    weight, bias = output_weight(model, module), getattr(model.get_submodule(module.output), "bias", None)
    columns = columns_of_heads(module, kept)
    fitted, fitted_bias = moments.fit(columns, left_out)
    weight.zero_()
    weight[:, columns] = fitted.to(weight)
    if bias is not None:
        bias.copy_(fitted_bias)


class _EndOfRunError(Exception):
    """Exception raised inside of a model's forward pass, to stop it after the last layer that is needed."""


_DID_NOT_RUN = object()
"""Stands for the output of a layer that did not run."""


def layer_of_site(modules: Mapping[str, nn.Module], path: str, sites: Sequence[str]) -> str:
    """Return the path of the transformer layer that contains the attention module at `path`. The layer is the outermost
    item of a `ModuleList` or `Sequential` in which several items contain attention modules (the paths in `sites`). If
    there is no such `ModuleList` or `Sequential`, return `path`.
    """
    parts = path.split(".")
    for stop in range(1, len(parts) + 1):
        parent = ".".join(parts[: stop - 1])
        if isinstance(modules.get(parent), nn.ModuleList | nn.Sequential):
            inside = {site[len(parent) + 1 :].partition(".")[0] for site in sites if is_inside(site, parent)}
            if len(inside) > 1:
                return ".".join(parts[:stop])
    return path


class LayerRuns:
    """Runs of a model on the batches of a data set, one layer after the other: a run up to a layer reuses the stored
    outputs of earlier layers. The model is in evaluation mode. `layers` lists the paths of its layers in the order in
    which they run.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Mapping[str, Any]], layers: Sequence[str]) -> None:
        self._model, self._batches, self._layers = model, batches, layers
        self._modules = dict(model.named_modules())
        self._outputs: list[dict[str, Any]] = [{} for _ in batches]  # of the latest layer of each list
        self._reuses = True
        tokens = [count_sequences_and_tokens(batch)[1] for batch in batches]
        self._reuses = all(map(self._is_chain_on, sorted({tokens.index(min(tokens)), tokens.index(max(tokens))})))

    def run(self, layer: str, projection: str | None = None, *, store: bool) -> list[list[SequenceVectors]]:
        """Run the model on each batch until `layer` ends. Return the inputs of the output projection at the path
        `projection` for each batch; without a projection, an empty list. With `store`, the output of `layer` is kept,
        and runs up to later layers start from it.
        """
        recorded: list[list[SequenceVectors]] = []
        for index, (batch, outputs) in enumerate(zip(self._batches, self._outputs, strict=True)):
            with projection_inputs(self._model, [] if projection is None else [projection], batch) as inputs:
                output = self._run(layer, index)
            recorded += inputs.values()
            if store and output is not _DID_NOT_RUN:
                outputs[layer.rpartition(".")[0]] = output
        return recorded

    @torch.no_grad()
    def _run(self, layer: str, index: int) -> Any:
        """Run the model on one batch until `layer` ends, and return the output of `layer`, or `_DID_NOT_RUN`. Earlier
        layers return their stored outputs instead of being computed. If stored outputs would change what the model
        returns, the whole model is computed instead.
        """
        before = self._layers[: self._layers.index(layer)] if self._reuses else []
        module, outputs = self._modules[layer], []
        forward = module.forward

        def last_forward(*args: Any, **kwargs: Any) -> Any:
            outputs.append(forward(*args, **kwargs))
            if self._reuses:
                raise _EndOfRunError
            return outputs[-1]

        with suppress(_EndOfRunError), ExitStack() as stack:
            for path in before:
                stored = self._outputs[index].get(path.rpartition(".")[0])  # None if no layer of the list ran
                stack.enter_context(swap_forward(self._modules[path], lambda *_, _stored=stored, **__: _stored))
            stack.enter_context(swap_forward(module, last_forward))
            call_model(self._model, copied(self._batches[index]))
        return outputs[-1] if outputs else _DID_NOT_RUN

    @torch.no_grad()
    def _is_chain_on(self, index: int) -> bool:
        """Return True if, on one batch, each layer runs once, and a run that starts from stored outputs returns the
        same layer outputs as a complete run.
        """
        expected: dict[str, list[Any]] = {path: [] for path in self._layers}
        layers = {path: self._modules[path] for path in self._layers}
        with module_calls(layers, lambda path, _, output: expected[path].append(output)):
            call_model(self._model, copied(self._batches[index]))
        if any(len(outputs) != 1 for outputs in expected.values()):
            return False
        try:
            with progress_bar("runs of single layers", len(self._layers), "layers") as bar:
                for path in bar.track(self._layers):
                    output = self._run(path, index)
                    tensors, others = (
                        [leaf for leaf in pytree.tree_leaves(each) if isinstance(leaf, Tensor)]
                        for each in (output, expected[path][0])
                    )
                    if len(tensors) != len(others) or not all(map(torch.equal, tensors, others)):
                        return False
                    self._outputs[index][path.rpartition(".")[0]] = output
        except Exception:  # such as a KeyError, for a value that a skipped layer did not leave
            return False
        finally:
            self._outputs[index].clear()
        return True
