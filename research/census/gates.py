"""Gates against zeroed columns of the output projection."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from research.census.batches import Batch
from research.census.compare import is_related, without_part
from research.census.training import floating, is_close
from research.census.watched import TIMES
from research.dispatcher_truth.element_tags import name_of
from research.dispatcher_truth.module_stack import ModuleStack
from research.dispatcher_truth.recorder import PRODUCTS, Record, TruthCall


def sample(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the second head of the first reported module, and the last head of the last one."""
    modules = list(dict.fromkeys((row["module"], row["kind"]) for row in rows))
    picked = []
    for module, index in ((modules[0], 1), (modules[-1], -1)):
        heads = [row for row in rows if (row["module"], row["kind"]) == module]
        picked.append(heads[min(index, len(heads) - 1)])
    return picked


def check(model: nn.Module, batch: Batch, record: Record, rows: list[dict[str, Any]], tolerance: float) -> list[str]:
    """Return how gated runs differ from runs with zeroed columns, in words. Problems start with "unverified" where the
    truth is unknown, and with "refused" where headwise refuses.
    """
    return [text for row in sample(rows) if (text := _check_head(model, batch, record, rows, row, tolerance))]


def _check_head(
    model: nn.Module,
    batch: Batch,
    record: Record,
    rows: list[dict[str, Any]],
    row: dict[str, Any],
    tolerance: float,
) -> str:
    where = f"gate of {row['module']} head {row['head']}"
    calls = _calls_of(record, row, rows)
    storages = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    matrices = [call.projection.matrix for call in calls]
    if not calls or any(matrix is None or matrix.untyped_storage()._cdata not in storages for matrix in matrices):
        return f"unverified: {where}: its output projection is not a parameter"
    with torch.no_grad(), zeroed_columns(model, calls, row["head"]) as zeroed:
        torch.manual_seed(0)
        expected = floating(model(**batch.inputs))
    if not zeroed.count:
        return f"unverified: {where}: its output projection could not be changed"
    try:
        got = _gated(model, batch, row["layer"], row["head"])
    except hw.InputError:
        try:  # the number of a layer may be that of modules that did not run
            got = _gated(model, batch, row["module"], row["head"])
        except hw.InputError as error:
            return f"refused: {where}: {error}"
    if all(is_close(one, other, tolerance) for one, other in zip(got, expected, strict=True)):
        return ""
    certain = "" if all(call.is_direct for call in calls) else "unverified: "
    off = max(float((one - other).abs().max()) for one, other in zip(got, expected, strict=True))
    return f"{certain}{where}: output differs by {off:.2g} from zeroed columns"


@torch.no_grad()
def _gated(model: nn.Module, batch: Batch, layer: int | str, head: int) -> list[Tensor]:
    with hw.gate(model, {(layer, head): 0.0}):
        for _ in range(TIMES):
            torch.manual_seed(0)
            output = floating(model(**batch.inputs))
    return output


def _calls_of(record: Record, row: dict[str, Any], rows: list[dict[str, Any]]) -> list[TruthCall]:
    """Return the calls of the module that a row belongs to, of the same kind if kinds are known."""
    heads = sum(other["module"] == row["module"] and other["kind"] == row["kind"] for other in rows)
    near = [call for call in record.calls if is_related(call.path, row["module"]) and call.heads == heads]
    exact = [call for call in near if call.path == without_part(row["module"])] or near
    kinds = {other["kind"] for other in rows if other["module"] == row["module"]}
    if len(kinds) > 1:
        exact = [call for call in exact if call.scores.is_self is (row["kind"] == "self")]
    layers = list(dict.fromkeys(call.projection.operand.data_ptr() for call in exact))
    labels = {other["module"] for other in rows if without_part(other["module"]) == without_part(row["module"])}
    if len(labels) > 1:  # several layers that one module computes
        number = int(row["module"].rpartition("[")[2].rstrip("]")) if row["module"].endswith("]") else 0
        exact = [call for call in exact if call.projection.operand.data_ptr() == layers[number]]
    return exact


@contextmanager
def zeroed_columns(model: nn.Module, calls: Sequence[TruthCall], head: int) -> Iterator["_Replacing"]:
    """Within the context, set the columns of a head to zero in the output projection of these calls. The same matrix
    in other modules is not changed. Yield a mode whose `count` is the number of products that were changed.
    """
    stack = ModuleStack(model)
    matrices = []
    for call in calls:
        assert call.projection.matrix is not None
        matrix = call.projection.matrix.clone()
        matrix[call.columns[head]] = 0.0
        matrices.append((call.projection.path, call.projection.matrix, matrix))
    with stack, _Replacing(stack, matrices) as mode:
        yield mode


class _Replacing(TorchDispatchMode):
    """Dispatch mode that replaces matrices in products of certain modules: (path, matrix, replacement)."""

    def __init__(self, stack: ModuleStack, matrices: list[tuple[str, Tensor, Tensor]]) -> None:
        super().__init__()
        self._stack, self._matrices, self.count = stack, matrices, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if name_of(function) in PRODUCTS:
            args = tuple(self._replaced(argument) for argument in args)
        return function(*args, **(kwargs or {}))

    def _replaced(self, argument: Any) -> Any:
        path = self._stack.running[-1] if self._stack.running else ""
        for of_module, matrix, replacement in self._matrices:
            is_same = isinstance(argument, Tensor) and path == of_module
            if not is_same or argument.untyped_storage()._cdata != matrix.untyped_storage()._cdata:
                continue
            for view, other in ((matrix, replacement), (matrix.mT, replacement.mT)):
                if argument.storage_offset() != view.storage_offset() or argument.numel() != view.numel():
                    continue
                mine, its = argument.squeeze(), view.squeeze()
                if mine.shape == its.shape and mine.stride() == its.stride():
                    self.count += 1
                    return other.reshape(argument.shape)
        return argument
