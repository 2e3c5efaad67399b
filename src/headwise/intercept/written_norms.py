"""Maps from the heads' outputs to what an attention module writes, confirmed while the model runs.

The output projection of a module is found by its name. The first call of the module confirms that the model applies it
to the heads' outputs: the input of the projection consists of these, and its output is the map of its input. Otherwise
`written_norm` is left out. While gates are active, each head's part of the input may be its output times a factor. In
training mode, in which dropout changes both, a difference shows nothing; the next call in evaluation mode decides. If
there is none, the weights of the function that maps the heads' outputs decide. If a later call of the model applies
other parameters to the heads' outputs, `written_norm` is left out, too.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from headwise.convert.layers import LinearMap
from headwise.intercept.trace.projection import (
    PROJECTION_NAMES,
    gram_of,
    has_convolution,
    linear_map,
    may_fit,
    output_projection,
)
from headwise.intercept.unreadable_tensors import has_no_numbers, has_usual_values
from headwise.shapes import Bool, Float
from headwise.statistics.tally import HeadSlices

NOT_CONFIRMED = (
    "the output projection was not seen to map the outputs of the heads of these modules, so written_norm is left out"
)
"""Reason for modules whose projection has another input, or another output than its map."""

LARGEST_DIFFERENCE = 1e-3
"""Largest difference between two vectors, relative to the norm of the second, that counts as rounding in float32. In
other dtypes, four times the distance between 1 and the next number may be more.
"""


class _ProjectionCall(NamedTuple):
    """Three rows of the input, and the same rows of the output, from one call of a module that may be an output
    projection.

    Attributes:
        inputs: rows of the input.
        outputs: the same rows of the output.
        rows: indices of these rows.
        row_count: number of all rows.
        is_training: True if the module was in training mode, in which dropout may change the output.
    """

    inputs: Float[Tensor, "rows width"]
    outputs: Tensor
    rows: list[int]
    row_count: int
    is_training: bool


class _HeadOutputs(NamedTuple):
    """Outputs of all heads in one attention call, before the output projection.

    Attributes:
        by_token: the outputs.
        may_be_gated: True if an interceptor may change the outputs before they are projected.
    """

    by_token: Float[Tensor, "tokens heads value_dim"]
    may_be_gated: bool


@dataclass(frozen=True)
class _ModelCall:
    """Data of the current call of the model in one thread: head outputs that still have to be compared with the input
    of their output projection, and calls of modules that may be output projections.

    Attributes:
        head_outputs: outputs of heads that wait for their projection, by the path of the attention module.
        projection_calls: calls of modules that may be projections, by path.
        projected_by: parameters that are applied to head outputs, by the path of the attention module and by identity.
    """

    head_outputs: dict[str, _HeadOutputs] = field(default_factory=dict)
    projection_calls: dict[str, _ProjectionCall] = field(default_factory=dict)
    projected_by: dict[str, dict[int, ref[Tensor]]] = field(default_factory=dict)


class WrittenNorms:
    """Matrices from which the statistic `written_norm` (norm of a head's output after the output projection) is
    computed, for each attention module of a model. The output projection is found by its name. A call of that module
    must then confirm that it is applied to the head outputs.

    Args:
        model: the model.
        leave_out: function that removes `written_norm` from the results of the module at a path.
    """

    def __init__(self, model: nn.Module, leave_out: Callable[[str], None]) -> None:
        self._leave_out = leave_out
        self._modules = dict(model.named_modules(remove_duplicate=False))  # one may be found by its other name
        self._projection_paths: dict[str, str | None] = {}
        self._grams: dict[str, tuple[Any, LinearMap, Tensor]] = {}
        self._model_calls: defaultdict[int, _ModelCall] = defaultdict(_ModelCall)  # by thread
        self._settled: set[str] = set()  # paths of attention modules that are confirmed or left out
        self._left_out: set[str] = set()
        self._first_projected_by: dict[str, dict[int, ref[Tensor]]] = {}  # as in `_ModelCall`
        self._projected_by: dict[str, set[int]] = {}  # ids of the weights, by the path of the attention module
        self._projected_by_others: dict[str, set[int]] = {}  # the same without a projection that was found by name

    def gram(self, path: str, heads: int, value_dim: int | None) -> Float[Tensor, "heads value_dim value_dim"] | None:
        """Return the matrix `W_h^T W_h` for each head h, where `W_h` is the head's slice of the output projection of
        the attention module at `path`. Return None if no projection is found, if a call of the model did not confirm
        the projection, or if `value_dim` is unknown.
        """
        if value_dim is None or path in self._left_out:
            return None
        width = heads * value_dim
        if path not in self._projection_paths:
            projection = output_projection(self._modules, path, width)
            self._projection_paths[path] = None if projection is None else projection.path
            if projection is None:
                self._settle(path, is_confirmed=not self._has_other_projection(path, width))
        projection_path = self._projection_paths[path]
        if projection_path is None:
            return None
        if _normalises_by_batch(self._modules[projection_path]):
            self._settle(path, is_confirmed=False)
            return None
        versions = _versions(self._modules[projection_path])
        if path not in self._grams or versions is None or self._grams[path][0] != versions:
            found = self._map(path, projection_path, width)
            if found is None:
                self._settle(path, is_confirmed=False)
                return None
            self._grams[path] = versions, found, gram_of(found.weight, heads, value_dim)
        return self._grams[path][2]

    def slices(self, path: str, heads: int, value_dim: int | None) -> HeadSlices | None:
        """Return each head's slice of the output projection of the attention module at `path`: the weights that
        multiply the head's output. Return None if no projection is found, if a call of the model did not confirm the
        projection, or if `value_dim` is unknown.
        """
        if value_dim is None or self.gram(path, heads, value_dim) is None:
            return None
        weight = self._grams[path][1].weight.detach()
        by_head = weight.to(torch.promote_types(weight.dtype, torch.float32)).unflatten(1, (heads, value_dim))  # type: ignore[no-untyped-call]
        slices: Tensor = by_head.permute(1, 2, 0)
        return slices

    def _has_other_projection(self, path: str, width: int) -> bool:
        """Return True if the attention module at `path` contains a module that looks like an output projection of
        `width` features, by its name and size. The caller has already found that no such module computes a linear map.
        """
        for name, child in self._modules[path].named_children():
            sizes = {size for tensor in (*child.parameters(), *child.buffers()) for size in tensor.shape}
            sizes |= {getattr(each, "in_features", None) for each in child.modules()}  # weights may be packed
            if name in PROJECTION_NAMES and (width in sizes or may_fit(child, width)):
                return True
        return False

    def _map(self, path: str, projection_path: str, width: int) -> LinearMap | None:
        """Return the linear map that the output projection at `projection_path` computes, or None if the projection is
        not linear. In `nn.MultiheadAttention`, the map is read from the projection's weight, since the projection is
        not called as a module.
        """
        attention = self._modules[path]
        if type(attention).forward is nn.MultiheadAttention.forward:
            self._settled.add(path)
            return LinearMap(attention.out_proj.weight, attention.out_proj.bias)
        return linear_map(self._modules[projection_path], width)

    def needs_outputs(self, path: str) -> bool:
        """Return True if it is not yet decided whether the output projection found for the attention module at `path`
        is the right one. The head outputs of the next call are then needed for the decision.
        """
        return path not in self._settled

    def on_model_call(self) -> None:
        """Finish the previous call of the model in this thread, because a new one starts. Remove the statistic
        `written_norm` of modules that attended in the previous call, but whose output projection did not run afterwards
        and was never confirmed.
        """
        self._end(threading.get_ident())

    def on_head_outputs(
        self, path: str, out: Float[Tensor, "batch heads queries value_dim"], *, may_be_gated: bool
    ) -> None:
        """Compare the head outputs `out` of the attention module at `path` with the input of its output projection. If
        the projection has not run yet, store `out` until it does. `may_be_gated` is True if an interceptor may change
        the outputs before the projection.
        """
        model_call = self._model_calls[threading.get_ident()]
        model_call.head_outputs[path] = _HeadOutputs(out.transpose(1, 2).flatten(0, 1), may_be_gated)
        call = model_call.projection_calls.get(self._projection_paths[path] or "")
        if call is not None:
            self._check(path, call, model_call)

    def on_projected(self, path: str, weights: Sequence[Tensor]) -> None:
        """Record the parameters of a linear map that the model applies to the head outputs of the module at `path`. If
        the model runs only in training mode, they show if the projection that was found by its name is the right one.
        If no projection was found, they show that there is one nevertheless.
        """
        bases = [weight if weight._base is None else weight._base for weight in weights]
        of_call = self._model_calls[threading.get_ident()].projected_by.setdefault(path, {})
        of_call.update({id(base): ref(base) for base in bases})
        if path not in self._grams:
            self._projected_by_others.setdefault(path, set()).update(map(id, bases))
        if path not in self._settled:
            self._projected_by.setdefault(path, set()).update(map(id, bases))

    def waits_for(self, path: str) -> bool:
        """Return True if head outputs of this call of the model are stored until the module at `path`, their
        projection, runs.
        """
        model_call = self._model_calls.get(threading.get_ident())
        waiting = {} if model_call is None else model_call.head_outputs
        return bool(waiting) and any(self._projection_paths[each] == path for each in waiting)

    def on_module_end(self, path: str, arguments: Mapping[str, Any], output: Any) -> None:
        """If the module at `path` is the output projection of attention that ran before, compare its input and output
        with the stored head outputs. If it may be the projection of attention that is observed only later, store some
        rows of its input and output.
        """
        model_call = self._model_calls[threading.get_ident()]
        waiting = [each for each in model_call.head_outputs if self._projection_paths[each] == path]
        if waiting or _is_named_projection(path):
            call = _projection_call(self._modules[path], arguments.values(), output)
            if call is not None:
                model_call.projection_calls[path] = call
                for attention_path in waiting:
                    self._check(attention_path, call, model_call)

    def finish(self) -> None:
        """End the observation. Remove the statistic `written_norm` of modules whose output projection did not run after
        their attention. In training mode, no call can refute the projection that was found by its name. In this mode,
        also remove `written_norm` if the head outputs were multiplied by other parameters than those of the projection.
        """
        for thread in list(self._model_calls):
            self._end(thread)
        for path, weights in self._projected_by.items():
            projection = self._modules[self._projection_paths.get(path) or path]
            is_its_own = bool(weights.intersection(map(id, projection.parameters())))
            if weights and not is_its_own and path in self._grams and path not in self._settled:
                self._settle(path, is_confirmed=False)
        for path, weights in self._projected_by_others.items():
            if weights and path not in self._left_out and path not in self._grams:
                self._settle(path, is_confirmed=False)  # the projection has an unusual name or place

    def _end(self, thread: int) -> None:
        """End the call of the model in one thread. Remove the statistic `written_norm` of two kinds of modules: those
        whose output projection was never confirmed and did not run after their attention in this call, and those whose
        head outputs are projected by other parameters than in the first call.
        """
        model_call = self._model_calls.pop(thread, _ModelCall())
        for path in model_call.head_outputs:
            if path not in self._settled:
                self._settle(path, is_confirmed=False)
        for path, parameters in model_call.projected_by.items():
            first = self._first_projected_by.setdefault(path, parameters) if parameters else parameters
            is_first = first.keys() == parameters.keys() and all(each() is not None for each in first.values())
            if not is_first and path in self._grams:
                self._settle(path, is_confirmed=False)

    def _check(self, path: str, call: _ProjectionCall, model_call: _ModelCall) -> None:
        """Decide from one call of an output projection whether it is the right one for the attention module at `path`.
        The projection's input must consist of the module's head outputs, and its output must be the linear map of its
        input. If this call cannot show it, leave the decision to a later call.
        """
        head_outputs, projection = model_call.head_outputs.pop(path), self._grams[path][1]
        is_confirmed = _consists_of(call, head_outputs) and _maps(projection, call)
        # Dropout changes inputs and outputs. Zeros of closed gates, and NaN, show nothing: the next call decides.
        if is_confirmed or not (call.is_training or _shows_nothing(call, head_outputs)):
            self._settle(path, is_confirmed=is_confirmed)

    def _settle(self, path: str, *, is_confirmed: bool) -> None:
        """Record that it is now decided whether the output projection found for the attention module at `path` is the
        right one. If `is_confirmed` is False, remove the statistic `written_norm` from the module's results.
        """
        self._settled.add(path)
        if not is_confirmed:
            self._left_out.add(path)
            self._leave_out(path)


def _normalises_by_batch(module: nn.Module) -> bool:
    """Return True if a module contains a batch norm in training mode, which computes another map in each call."""
    return any(isinstance(each, nn.modules.batchnorm._BatchNorm) and each.training for each in module.modules())


def _is_named_projection(path: str) -> bool:
    """Return True if a module has a usual name of output projections, such as `o_proj`. If the last name in its path is
    a number, as in a sequence of modules, the name before it counts, too.
    """
    names = path.split(".")
    return any(name in PROJECTION_NAMES for name in (names[-2:] if names[-1].isdigit() else names[-1:]))


def _projection_call(module: nn.Module, arguments: Iterable[Any], output: Any) -> _ProjectionCall | None:
    """Return the input and the output of a module call at three rows (tokens): the first, the middle and the last one.
    Return None if input and output are not tensors with the same number of rows.
    """
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if not tensors or not isinstance(output, Tensor) or not all(map(has_usual_values, (tensors[0], output))):
        return None
    if has_no_numbers():
        return None
    axis = 1 if has_convolution(module) else -1
    inputs, outputs = (tensor.detach().movedim(axis, -1).flatten(0, -2) for tensor in (tensors[0], output))
    if len(inputs) != len(outputs) or not len(inputs):
        return None
    rows = [0, len(inputs) // 2, -1]
    return _ProjectionCall(inputs[rows], outputs[rows], rows, len(inputs), module.training)


def _shows_nothing(call: _ProjectionCall, outputs: _HeadOutputs) -> bool:
    """Return True if a call of an output projection cannot show if its input consists of the head outputs. That is the
    case if some numbers are NaN or infinite, or if the inputs are all 0, as after gates that multiply by 0.
    """
    by_token = outputs.by_token
    is_off = not bool(call.inputs.any()) and (outputs.may_be_gated or not bool(by_token.any()))
    return is_off or not bool(call.inputs.isfinite().all() & by_token.isfinite().all())


def _consists_of(call: _ProjectionCall, outputs: _HeadOutputs) -> bool:
    """Return True if one of the input rows of an output projection consists of the outputs of all heads for one token,
    usually the token with the same index. If gates (factors for head outputs) may be active, the output of each head
    may be multiplied by a factor, as long as not all factors are 0.
    """
    by_token = outputs.by_token
    if call.inputs.shape[1] != by_token[0].numel():
        return False
    inputs = call.inputs.to(by_token.dtype).view(-1, 1, *by_token.shape[1:])
    has_same_places = call.row_count == len(by_token)
    if has_same_places and _has_same_row(inputs, by_token[call.rows][:, None], call.inputs.dtype, outputs.may_be_gated):
        return True
    return _has_same_row(inputs, by_token[None], call.inputs.dtype, outputs.may_be_gated)


def _has_same_row(
    inputs: Float[Tensor, "rows 1 heads value_dim"],
    by_token: Float[Tensor, "#rows tokens heads value_dim"],
    dtype: torch.dtype,
    may_be_gated: bool,
) -> bool:
    """Return True if one of the input rows of an output projection equals the head outputs of a token, up to rounding
    in `dtype`. If `may_be_gated`, the output of each head may be multiplied by a factor.
    """
    if may_be_gated:
        squares = by_token.square().sum(-1, keepdim=True)
        by_token = by_token * ((inputs * by_token).sum(-1, keepdim=True) / squares).nan_to_num()
    is_same = _is_close(inputs, by_token, dtype).all(-1)
    return bool((is_same & inputs.flatten(2).any(-1)).any())


def _maps(projection: LinearMap, call: _ProjectionCall) -> bool:
    """Return True if, in a call of an output projection, the linear map `projection` maps the input rows to the output
    rows, up to rounding.
    """
    dtype = torch.promote_types(call.inputs.dtype, torch.float32)
    mapped = call.inputs.to(dtype) @ projection.weight.detach().to(dtype).mT
    mapped = mapped if projection.bias is None else mapped + projection.bias.detach().to(dtype)
    is_shape = mapped.shape == call.outputs.shape
    return is_shape and bool(_is_close(call.outputs.to(dtype), mapped, call.outputs.dtype).all())


def _is_close(
    vectors: Float[Tensor, "*#axes width"], expected: Float[Tensor, "*#axes width"], dtype: torch.dtype
) -> Bool[Tensor, "*axes"]:
    """Return True for each vector that equals its vector in `expected` up to rounding in `dtype`."""
    tolerance = max(LARGEST_DIFFERENCE, 4 * torch.finfo(dtype).eps)
    is_close: Tensor = (vectors - expected).norm(dim=-1) <= tolerance * expected.norm(dim=-1)
    return is_close


def _versions(module: nn.Module) -> list[tuple[int, int, int]] | None:
    """Return a list that changes when a parameter or buffer of a module is written to or replaced, also by `tensor.data
    = other`. It contains the id, the in-place change count and the address of each parameter and buffer. Return None if
    a tensor has no change count, as under `torch.inference_mode`.
    """
    own = module._parameters.values(), module._buffers.values()
    tensors = [each for tensors in own for each in tensors if each is not None]
    if module._modules:
        tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.is_inference() for tensor in tensors):
        return None
    has_addresses = not has_no_numbers() and all(map(has_usual_values, tensors))
    addresses = [each.untyped_storage().data_ptr() if has_addresses else 0 for each in tensors]
    return [(id(each), each._version, address) for each, address in zip(tensors, addresses, strict=True)]
