"""Interface of an adapter: an `Engine` names the functions of a library, and reads their calls as `EngineCall`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Problem
from headwise.intercept.packed_sequences import PackedSequences
from headwise.intercept.sdpa_calls import widest_dtype_under_autocast
from headwise.intercept.trace.axes import OutputAxes


class UnreadableCall(Exception):
    """Raised by an adapter for a call that it cannot read. The message names the argument or value that is the reason,
    as the end of "attention of these modules by flash_attn_func ...", such as "with qv".
    """


class Arguments:
    """Arguments of one call of an engine's function, by name.

    Args:
        values: the arguments, also those that the call leaves at their defaults.
        defaults: the function's own defaults.
    """

    def __init__(self, values: dict[str, Any], defaults: dict[str, Any]) -> None:
        self._values, self._defaults, self._unread = values, defaults, set(values)

    @staticmethod
    def of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Arguments":
        """Return the arguments `args`, by position, and `kwargs`, by name, of a call of a Python function."""
        parameters = signature(function).parameters
        bound = signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        for name, parameter in parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                values |= values.pop(name)
        return Arguments(values, {name: each.default for name, each in parameters.items()})

    def take(self, name: str, default: Any = None) -> Any:
        """Return the argument `name`, which then counts as read. Return `default` if the function has no such
        argument.
        """
        self._unread.discard(name)
        return self._values.get(name, default)

    def has(self, name: str) -> bool:
        """Return True if the function has an argument `name`."""
        return name in self._values

    def ignore(self, *names: str) -> None:
        """Count arguments as read that change neither attention weights nor head outputs."""
        self._unread.difference_update(names)

    def require_read(self) -> None:
        """Raise `UnreadableCall` if an argument was not read that differs from its default."""
        for name in sorted(self._unread):
            if not _is_default(self._values[name], self._defaults.get(name)):
                raise UnreadableCall(f"with {name}")


def _is_default(value: Any, default: Any) -> bool:
    """Return True if an argument has the value `default`. If this is one of None, False and 0, which turn an option
    off, the others count as equal.
    """
    if value is default:
        return True
    if not isinstance(value, int | float | str | tuple | None):
        return False
    return bool(value == default) or not (value or default)


def _transposed(out: Tensor) -> Tensor:
    """Swap the second and the third axis of a tensor."""
    return out.transpose(1, 2)


@dataclass(frozen=True, eq=False)
class HeadLayoutOfOutput:
    """Layout of an engine's output, and functions that convert it.

    Attributes:
        axes: numbers of its axes of values and queries.
        by_head: function that returns the output as `(batch, heads, queries, value_dim)`.
        written: function that receives changed head outputs and the engine's own output, and returns the former in the
            layout of the latter.
    """

    axes: OutputAxes
    by_head: Callable[[Tensor], Tensor]
    written: Callable[[Tensor, Tensor], Tensor]


TOKENS_FIRST = HeadLayoutOfOutput(OutputAxes(3, (1,)), _transposed, lambda changed, out: changed.transpose(1, 2))
"""Layout `(batch, queries, heads, value_dim)`."""

HEADS_FIRST = HeadLayoutOfOutput(OutputAxes(3, (2,)), lambda out: out, lambda changed, out: changed)
"""Layout `(batch, heads, queries, value_dim)`."""


def packed_layout(places: PackedSequences, *, has_batch_axis: bool = False) -> HeadLayoutOfOutput:
    """Return the layout `(queries of all sequences, heads, value_dim)`. If `has_batch_axis` is True, the queries are
    divided into two axes. In the order of all queries, `places` are those of each sequence.
    """

    def written(changed: Tensor, out: Tensor) -> Tensor:
        return places.written(changed.transpose(1, 2), out.flatten(0, -3)).view(out.shape)

    axes = OutputAxes(3, (1,)) if has_batch_axis else OutputAxes(2, (0,))
    return HeadLayoutOfOutput(axes, lambda out: places.padded(out.flatten(0, -3)).transpose(1, 2), written)


@dataclass(frozen=True, eq=False)
class EngineCall:
    """One call of an attention engine, read as tensors of heads.

    Attributes:
        q: queries `(batch, heads, queries, head_dim)`. They are computed from the engine's own argument by functions
            of torch, outside of `Session.paused()`, so that their sources are known; the same holds for k and v.
        k: keys `(batch, kv_heads, keys, head_dim)`.
        v: values `(batch, kv_heads, keys, value_dim)`.
        options: further arguments of `Problem.checked`, such as mask, bias, scale, softcap, sinks and dropout.
        layout: layout of the engine's output.
        packed: places of the queries among the model's tokens, if the call packs sequences; None otherwise.
        mask_origin: values that determine the mask: calls with the same ones have the same mask. Empty if unknown.
        modified_scores: function that computes the scores of all queries and keys from their scaled products, for an
            engine that lets the model change the scores in any way; None if `options` state the scores.
        sources: two tensors that depend on the same inputs as keys and values, if the engine itself writes these to a
            cache, which is not seen; None otherwise.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    layout: HeadLayoutOfOutput = TOKENS_FIRST
    packed: PackedSequences | None = None
    mask_origin: tuple[Any, ...] = ()
    modified_scores: Callable[[Tensor], Tensor] | None = None
    sources: tuple[Tensor, Tensor] | None = None

    @cached_property
    def problem(self) -> Problem:
        """The call as a `Problem`, without gradients; without changes by `modified_scores`."""
        tensors = (tensor.detach() for tensor in widest_dtype_under_autocast(self.q, self.k, self.v))
        options: dict[str, Any] = {
            name: value.detach() if isinstance(value, Tensor) else value for name, value in self.options.items()
        }
        return Problem.checked(*tensors, **options)

    @property
    def grid(self) -> Grid:
        """Sizes of the scores, and positions of queries and keys."""
        return self.problem.grid

    @cached_property
    def weights_and_scores(self) -> tuple[Tensor, Tensor]:
        """Attention weights `(batch, heads, queries, keys)` and the scores behind them, of a call with
        `modified_scores`. Both are whole matrices. Rows without a visible key have the weight 0.
        """
        assert self.modified_scores is not None
        problem = self.problem
        q, k = (tensor.to(problem.score_dtype) for tensor in (problem.q, problem.k))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = self.modified_scores(q @ k.mT * problem.scale)
        if problem.mask is not None:
            scores = scores.masked_fill(~problem.mask.block(problem.grid), -torch.inf)
        is_empty = (scores == -torch.inf).all(-1, keepdim=True)
        return scores.softmax(-1).masked_fill(is_empty, 0.0), scores


class HeadsInBatch(NamedTuple):
    """One call of an attention engine without an axis of heads: they may be in the axis of the batch. Later functions
    of the model show this, as for calls of torch's `scaled_dot_product_attention`.

    Attributes:
        q: queries `(..., queries, head_dim)`.
        k: keys `(..., keys, head_dim)`.
        v: values `(..., keys, value_dim)`.
        options: further arguments of an equal call of `scaled_dot_product_attention`, by name.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """Attention functions of one library.

    Attributes:
        modules: names of the modules that define the functions. A name without a dot also stands for modules of other
            packages whose last name is the same.
        functions: names of the functions.
        read: function that reads a call: it receives the function's name and the arguments, and returns an
            `EngineCall`, or `HeadsInBatch`. It is called after the engine has computed its output. It raises
            `UnreadableCall`, or `InputError`, if the call cannot be read.
    """

    modules: tuple[str, ...]
    functions: tuple[str, ...]
    read: Callable[[str, Arguments], EngineCall | HeadsInBatch]

    def is_module(self, name: str) -> bool:
        """Return True if a loaded module with this name may define the functions."""
        return name in self.modules or name.rpartition(".")[2] in self.modules
