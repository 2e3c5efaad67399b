"""Slices of parameters that compute queries and keys in attention modules of unknown classes, derived from their runs.

The model runs once on a batch. In front of each attention module of an unknown class:

1. The module runs, and the derivative of one logit of each head, of query i for key j, is taken with respect to the
   outputs of all linear maps in the module. Features of these with a derivative at token i alone compute the query, and
   those with one at token j alone the key.
2. The module runs again for each head, with these rows of the weights, and of the biases, halved. All logits of the
   head must be halved exactly, and those of the other heads must keep their bits. A factor of 1/2 is exact, so that a
   norm, a softcap or a bias between the projection and the softmax cannot pass. Attention is then computed from the
   logits of the first run, and the module's output must keep its bits, so that the projections compute neither values
   nor gates.

A module in which this is not so is refused by name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from headwise.attention.autocast import without_autocast
from headwise.data.batches import call_model, copied, device_of, evaluation_mode, with_cache_disabled
from headwise.errors import InputError
from headwise.intercept.call_stack import call_stack
from headwise.intercept.eager_softmax import SOFTMAXES
from headwise.intercept.foreign_functions import SDPA
from headwise.monitoring.head_slices import HeadSlice, HeadSlices

Rows = dict[str, tuple[int, ...]]
"""Output features of linear maps, by the path of the map in the attention module."""

EXPECTED = "attention modules whose logits scale with their query and key projections"
"""Expectation, in errors, of each module whose slices are derived."""


def derived_slices(
    model: nn.Module, heads: Mapping[str, int | None], inputs: Mapping[str, Any]
) -> dict[str, HeadSlices]:
    """Return the slices that compute the query and the key of each head of attention modules of unknown classes.

    Args:
        model: the model.
        heads: number of query heads by the path of the module; None if it is unknown.
        inputs: arguments of the model.

    Raises:
        InputError: a module does not run on these, or its logits do not follow from linear maps of its own.
    """
    slices: dict[str, HeadSlices] = {}

    def deriving(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path not in slices:
                slices[path] = _of_module(path, module, heads[path], args, kwargs)

        return hook

    devices = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda})
    with (
        ExitStack() as stack,
        call_stack.paused(),
        evaluation_mode(model),
        torch.no_grad(),
        torch.random.fork_rng(devices),
    ):
        for path in heads:
            hook = model.get_submodule(path).register_forward_pre_hook(deriving(path), with_kwargs=True)
            stack.callback(hook.remove)
        arguments = {name: value for name, value in inputs.items() if name != "use_cache"}
        call_model(model, copied(with_cache_disabled(model, arguments)))
    for path in heads:
        if path not in slices:
            raise _refused(path, model.get_submodule(path), "no run on these inputs")
    return slices


class _Logits(TorchFunctionMode):
    """Mode that records the logits of attention calls: products of queries and keys, or arguments of softmax.

    Args:
        replacements: what takes the place of queries and keys, or of arguments of softmax, after they are recorded.

    Attributes:
        recorded: the logits.
        inputs: queries and keys, or the argument of softmax, of each call.
    """

    def __init__(self, replacements: Sequence[tuple[Tensor, ...]] = ()) -> None:
        self.recorded: list[Tensor] = []
        self.inputs: list[tuple[Tensor, ...]] = []
        self._replacements = replacements

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        names = ("query", "key") if func is SDPA else ("input",) if func in SOFTMAXES else ()
        positional, named = list(args), dict(kwargs or {})
        inputs = tuple(
            positional[index] if index < len(positional) else named[name] for index, name in enumerate(names)
        )
        if not inputs or inputs[0].ndim <= 2:
            return func(*args, **named)
        if func is SDPA:
            q, k = inputs
            group = q.shape[-3] // k.shape[-3] if named.get("enable_gqa") else 1
            self.recorded.append(q @ (k.repeat_interleave(group, -3) if group > 1 else k).mT)
        else:
            self.recorded.append(inputs[0])
        call, replacements = len(self.inputs), self._replacements
        self.inputs.append(inputs)
        for index, tensor in enumerate(replacements[call] if call < len(replacements) else ()):
            if index < len(positional):
                positional[index] = tensor
            else:
                named[names[index]] = tensor
        return func(*positional, **named)


def _of_module(
    path: str, module: nn.Module, heads: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> HeadSlices:
    """Return the slices of each head of one attention module, which runs with these arguments."""

    def run(replacements: Sequence[tuple[Tensor, ...]] = ()) -> tuple[Tensor, list[tuple[Tensor, ...]], list[Tensor]]:
        """Return the logits `(batch, heads, queries, keys)` of a run of the module, queries and keys, or the argument
        of softmax, of each attention call, and the tensors that the module returned.
        """
        with _Logits(replacements) as mode:
            output = module.forward(*args, **kwargs)
        if len(mode.recorded) != 1:
            raise _refused(path, module, f"{len(mode.recorded)} attention calls in one run")
        scores: Tensor = mode.recorded[0]
        if scores.ndim == 3 and heads and len(scores) % heads == 0:
            scores = scores.unflatten(0, (-1, heads))  # type: ignore[no-untyped-call]
        if scores.ndim != 4 or heads not in (None, scores.shape[1]) or min(scores.shape[2:]) < 2:
            stated = "an unknown number of" if heads is None else heads
            raise _refused(path, module, f"logits of shape {tuple(scores.shape)} for {stated} heads")
        return scores, mode.inputs, [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]

    device = device_of(module)
    with without_autocast(device):
        rows = _rows_of_heads(path, module, lambda: run()[0])
        logits, inputs, outputs = run()
        of_keys = [(name, feature) for _, keys in rows for name, features in keys.items() for feature in features]
        is_shared = not all(keys for _, keys in rows) or len(set(of_keys)) < len(of_keys)
        parts: list[list[Rows]] = [[queries] if is_shared else [queries, keys] for queries, keys in rows]
        for head, of_head in enumerate(parts):
            for part in of_head:
                with _halved(module, part):
                    changed_logits, _, changed = run(inputs)
                _require_halved(path, module, logits, changed_logits, head)
                pairs = zip(outputs, changed, strict=True)
                if not all(bool(((old == new) | (old != old) & (new != new)).all()) for old, new in pairs):  # noqa: PLR0124
                    got = f"a projection of head {head} that changes more than logits, such as values or a gate,"
                    raise _refused(path, module, got)
    exponent = 1.0 if is_shared else 0.5
    prefix = f"{path}." if path else ""
    return tuple(
        tuple(
            HeadSlice(f"{prefix}{name}.{parameter}", axis, *run, exponent)
            for part in of_head
            for name, features in part.items()
            for run in _runs(features)
            for parameter, axis in _parameters(module, name).items()
        )
        for of_head in parts
    )


def _rows_of_heads(path: str, module: nn.Module, logits: Callable[[], Tensor]) -> list[tuple[Rows, Rows]]:
    """Return the output features of linear maps that compute the query, and those that compute the key, of each head,
    by derivatives of the logits.
    """
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(linear: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            if name in outputs:
                raise _refused(path, module, f"several runs of {name}")
            outputs[name] = output if output.requires_grad else output.detach().requires_grad_()
            return outputs[name]

        return hook

    with ExitStack() as stack, torch.enable_grad():
        for name, linear in module.named_modules():
            if isinstance(linear, nn.Linear) or type(linear).__name__ == "Conv1D":
                stack.callback(linear.register_forward_hook(keep(name)).remove)
        scores = logits()
        query, key = scores.shape[2] - 1, scores.shape[3] - 2
        rows = []
        for head in range(scores.shape[1]):
            one = scores[:, head, query, key].sum()
            slopes: Sequence[Tensor | None] = (
                torch.autograd.grad(one, list(outputs.values()), retain_graph=True, allow_unused=True)
                if one.requires_grad and outputs
                else [None] * len(outputs)
            )
            at = {name: slope for name, slope in zip(outputs, slopes, strict=True) if slope is not None}
            rows.append((_only_at(at, query), _only_at(at, key)))
    query_rows = _own([queries for queries, _ in rows])
    if not all(query_rows):
        raise _refused(path, module, "no linear map of its own that computes the queries of single heads")
    return [(queries, keys) for queries, (_, keys) in zip(query_rows, rows, strict=True)]


def _only_at(slopes: Mapping[str, Tensor], token: int) -> Rows:
    """Return the features of each linear map whose derivatives are not 0 at one token, and 0 at all others."""
    features = {}
    for name, slope in slopes.items():
        if slope.ndim < 2 or slope.shape[-2] <= token:
            continue
        at_token = (slope != 0).flatten(0, -3).any(0) if slope.ndim > 2 else slope != 0
        elsewhere = at_token.any(0) & (at_token.sum(0) > at_token[token].to(at_token.sum(0)))
        found = (at_token[token] & ~elsewhere).nonzero()[:, 0].tolist()
        if found:
            features[name] = tuple(found)
    return features


def _own(rows: Sequence[Rows]) -> list[Rows]:
    """Return the features of each head that no other head has, of the linear maps in which each head has some: those in
    front of these, such as latents, are of all heads.
    """
    counts: dict[tuple[str, int], int] = {}
    for of_head in rows:
        for name, features in of_head.items():
            for feature in features:
                counts[name, feature] = counts.get((name, feature), 0) + 1
    names = {name for name, _ in counts if all(number == 1 for (other, _), number in counts.items() if other == name)}
    return [{name: features for name, features in of_head.items() if name in names} for of_head in rows]


@contextmanager
def _halved(module: nn.Module, rows: Rows) -> Iterator[None]:
    """Multiply features of linear maps by 1/2 while the context is open."""
    saved: list[tuple[Tensor, Tensor]] = []
    try:
        for name, features in rows.items():
            for parameter, axis in _parameters(module, name).items():
                tensor: Tensor = module.get_submodule(name).get_parameter(parameter)
                saved.append((tensor, tensor.clone()))
                index = torch.tensor(features, device=tensor.device)
                tensor.index_copy_(axis, index, tensor.index_select(axis, index) * 0.5)
        yield
    finally:
        for changed, before in saved:
            changed.copy_(before)


def _require_halved(path: str, module: nn.Module, before: Tensor, after: Tensor, head: int) -> None:
    """Raise `InputError` unless the logits of one head are halved, and those of the other heads unchanged. Logits that
    do not change are those of hidden keys.
    """
    own, halved = before[:, head], after[:, head]
    is_scaled = (halved == own * 0.5) | ((halved == own) & ((own < HIDDEN) | own.isinf()))
    others = [other for other in range(before.shape[1]) if other != head]
    if not torch.equal(before[:, others], after[:, others]):
        raise _refused(path, module, f"a projection of head {head} that changes the logits of other heads")
    if not bool(is_scaled.all()):
        got = "logits that are not halved with their projection, as by a norm, a softcap or a bias after it,"
        raise _refused(path, module, got)


HIDDEN = -1e3
"""Logits below this number that do not follow the projections are those of keys that a mask hides."""


def _parameters(module: nn.Module, name: str) -> dict[str, int]:
    """Return the axis of the output features in the weight of a linear map, and in its bias if it has one, by name."""
    linear = module.get_submodule(name)
    axes = {"weight": 0 if isinstance(linear, nn.Linear) else 1}
    return axes if getattr(linear, "bias", None) is None else axes | {"bias": 0}


def _runs(features: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield first feature and length of each run of consecutive features."""
    start = 0
    for index in range(1, len(features) + 1):
        if index == len(features) or features[index] != features[index - 1] + 1:
            yield features[start], index - start
            start = index


def _refused(path: str, module: nn.Module, reason: str) -> InputError:
    return InputError("model", expected=EXPECTED, got=f"{reason} in {path or type(module).__name__}")
