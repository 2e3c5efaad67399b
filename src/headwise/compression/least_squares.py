"""Scores by least squares: by how much the output of an attention module changes if heads are removed and the output
projection is fitted again to the outputs of the dense model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.losses import Loss, loss_per_example
from headwise.compression.output_moments import OutputMoments, removal_costs
from headwise.compression.projection_inputs import projection_inputs
from headwise.compression.pruning_plan import Head
from headwise.data.batches import (
    call_model,
    copied,
    device_of,
    evaluation_mode,
    iterate_batches,
    to_device,
    with_cache_disabled,
)
from headwise.errors import InputError
from headwise.intercept.survey import survey
from headwise.page.columns import ModelIdentity
from headwise.removal.families import head_module
from headwise.removal.head_module import HeadModule
from headwise.runs.fingerprint import identity_of
from headwise.shapes import Int


class ScoredHead(NamedTuple):
    """Head of a model that has a score.

    Attributes:
        layer, head: zero-based numbers of the head.
        kv_head: the key/value head that it attends with.
        module: path of the attention module.
        kind: "self" or "cross" attention.
    """

    layer: int
    head: int
    kv_head: int
    module: str
    kind: str


def scored_heads(model: nn.Module, batch: Any) -> tuple[ScoredHead, ...]:
    """Return the heads of a model that attend on a batch, in the order of the model."""
    registry = survey(model, lambda: call_model(model, copied(batch)))
    return tuple(ScoredHead(**labels) for _, labels in registry.head_labels())


def calibration_batches(model: nn.Module, calibration: Any) -> list[dict[str, Any]]:
    """Return the batches of a calibration set on the device of a model, without caches.

    Raises:
        InputError: there are none.
    """
    batches = [to_device(batch, device_of(model)) for batch in iterate_batches(calibration)]
    if not batches:
        raise InputError("calibration", expected="at least one batch", got="none")
    return [with_cache_disabled(model, batch) for batch in batches]


class LeastSquaresScores:
    """Scores of sets of heads: the mean squared error of a module's output y that removal of the heads adds if the
    output projection is fitted again, by least squares, to y. The unit is the mean of `|y|^2`.

    With a loss, errors of different modules can be compared: each is multiplied by the summed squares of the loss's
    derivatives with respect to y, divided by the width of y. This is the change of the loss to second order, if the
    empirical Fisher matrix of y is taken as a multiple of the identity.

    Args:
        model: the model.
        calibration: `Texts`, or batches.
        loss: function of model and batch, such as `hw.next_token_loss`; None for errors that cannot be compared between
            modules.

    Attributes:
        name: name of the scores, for display.
        rows: the heads.
        identity: identity of the model.
        is_comparable: True if scores of different modules can be compared.
    """

    rounds = None

    def __init__(self, model: nn.Module, calibration: Any, loss: Loss | None = None) -> None:
        self.name = "least squares" if loss is None else "least squares, weighted by the gradients of the loss"
        self.is_comparable = loss is not None
        with evaluation_mode(model), torch.no_grad():
            batches = calibration_batches(model, calibration)
            self.rows: Sequence[ScoredHead] = scored_heads(model, batches[0])
            self.identity: ModelIdentity | None = identity_of(model)
            self._modules = {row.module: head_module(model, row.module) for row in self.rows}
            self._has_bias = {path: _has_bias(model, module) for path, module in self._modules.items()}
            self._moments = _dense_moments(model, self._modules, batches)
            self._factor_of = dict.fromkeys(self._modules, 1.0)
            if loss is not None:
                squares = _squared_gradients(model, self._modules, batches, loss)
                self._factor_of = {path: squares[path] * each.yy / each.tokens for path, each in self._moments.items()}

    def of(self, units: Sequence[tuple[Head, ...]], removed: frozenset[Head]) -> list[float]:
        """Return the score of each unit, a set of heads of one module, given that some heads were removed before."""
        module_of = {(row.layer, row.head): row.module for row in self.rows}
        scores: dict[tuple[Head, ...], float] = {}
        for path, module in self._modules.items():
            own = [unit for unit in units if module_of[unit[0]] == path]
            if not own:
                continue
            gone = [head for layer, head in removed if module_of[layer, head] == path]
            blocks = [_columns(module, [head for _, head in unit]) for unit in own]
            costs = removal_costs(self._moments[path], blocks, _columns(module, gone), self._has_bias[path])
            scores.update(zip(own, (costs * self._factor_of[path]).tolist(), strict=True))
        return [scores[unit] for unit in units]


class MagnitudeScores:
    """Scores of sets of heads: the Euclidean norm of all their weights. The weights of a key/value head count in equal
    parts for the query heads that attend with it.

    Args:
        model: the model.
        batch: one batch, on which the model shows where it attends.

    Attributes:
        rows: the heads.
        identity: identity of the model.
    """

    name = "magnitude"
    rounds = 1
    is_comparable = True

    def __init__(self, model: nn.Module, batch: Any) -> None:
        with evaluation_mode(model), torch.no_grad():
            self.rows: Sequence[ScoredHead] = scored_heads(model, calibration_batches(model, [batch])[0])
            self.identity: ModelIdentity | None = identity_of(model)
            squares = {row.module: _squares(model, head_module(model, row.module)) for row in self.rows}
            self._square_of = {(row.layer, row.head): float(squares[row.module][row.head]) for row in self.rows}

    def of(self, units: Sequence[tuple[Head, ...]], removed: frozenset[Head]) -> list[float]:
        """Return the score of each unit, which does not depend on heads that were removed before."""
        return [sum(self._square_of[head] for head in unit) ** 0.5 for unit in units]


def _dense_moments(
    model: nn.Module, modules: dict[str, HeadModule], batches: Sequence[dict[str, Any]]
) -> dict[str, OutputMoments]:
    """Return the moments of inputs and outputs of each module's output projection in the dense model."""
    moments: dict[str, OutputMoments] = {}
    outputs = {path: module.output for path, module in modules.items()}
    for batch in batches:
        with projection_inputs(model, outputs, batch) as recorded:
            call_model(model, copied(batch))
        for path, inputs in recorded.items():
            projection = model.get_submodule(outputs[path])
            for x in inputs:
                added = OutputMoments.of(x, projection(x))
                moments[path] = moments[path] + added if path in moments else added
    return moments


def _squared_gradients(
    model: nn.Module, modules: dict[str, HeadModule], batches: Sequence[dict[str, Any]], loss: Loss
) -> dict[str, float]:
    """Return the summed squares of the loss's derivatives with respect to each module's output, divided by its width,
    per batch.
    """
    squares = dict.fromkeys(modules, 0.0)

    def recording_hook(path: str) -> Callable[..., Tensor]:
        def add(gradient: Tensor) -> None:
            squares[path] += float(gradient.double().square().sum()) / gradient.shape[-1] / len(batches)

        def hook(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            output = output if output.requires_grad else output.detach().requires_grad_()
            output.register_hook(add)  # type: ignore[no-untyped-call]
            return output

        return hook

    with ExitStack() as stack, torch.enable_grad(), _without_parameter_gradients(model):
        for path, module in modules.items():
            hook = model.get_submodule(module.output).register_forward_hook(recording_hook(path))
            stack.callback(hook.remove)
        for batch in batches:
            losses = loss_per_example(loss, model, batch)
            losses.nansum().backward()  # type: ignore[no-untyped-call]
    return squares


@contextmanager
def _without_parameter_gradients(model: nn.Module) -> Iterator[None]:
    """Let no parameter of a model require a gradient while the context is open."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)


def _has_bias(model: nn.Module, module: HeadModule) -> bool:
    """Return True if the output projection of a module has a bias."""
    return getattr(model.get_submodule(module.output), "bias", None) is not None


def _columns(module: HeadModule, heads: Sequence[int]) -> Int[Tensor, " columns"]:
    """Return the input columns of the output projection that belong to heads."""
    starts = torch.tensor(sorted(heads), dtype=torch.int64)[:, None] * module.value_dim
    return (starts + torch.arange(module.value_dim)).flatten()


def _squares(model: nn.Module, module: HeadModule) -> Tensor:
    """Return the sum of the squared weights of each query head."""
    squares = torch.zeros(module.num_heads, dtype=torch.float64)
    for axis in module.axes:
        weights = model.get_parameter(axis.parameter).detach().double().movedim(axis.axis, 0)
        start = 0
        for blocks in axis.blocks:
            own = weights[start : start + blocks.length].reshape(blocks.heads, -1).square().sum(1)
            group = module.num_heads // blocks.heads
            squares += own.repeat_interleave(group).cpu() / group
            start += blocks.length
    return squares
