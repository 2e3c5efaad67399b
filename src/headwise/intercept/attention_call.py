"""`AttentionCall`: one attention call of a model, as an adapter reads it, whichever function the model calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention.attend import uniform_output
from headwise.attention.autocast import autocast_dtype
from headwise.attention.masks.base import Mask
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Problem, mask_and_bias
from headwise.intercept.module_call import ModuleCall
from headwise.intercept.plans import Step
from headwise.intercept.received_mask import ReceivedMask, fill_hidden_rows_as_torch, with_infinite
from headwise.intercept.sequences import NO_TOKEN
from headwise.intercept.trace.axes import OutputAxes
from headwise.intercept.trace.lineage import CallOrigins
from headwise.shapes import Bool, Float, Int


@dataclass(frozen=True, eq=False)
class OutputLayout:
    """Order of the axes in the output of an attention function, and two functions that convert between this order and
    `(batch, heads, queries, value_dim)`.

    Attributes:
        axes: axes of values and queries; None if the output is not followed to the output projection, since the
            function belongs to a layer of headwise.
        by_head: function that returns the output as `(batch, heads, queries, value_dim)`.
        written: function that receives changed head outputs and the function's own output, and returns the former in
            the layout of the latter.
    """

    axes: OutputAxes | None
    by_head: Callable[[Tensor], Tensor]
    written: Callable[[Tensor, Tensor], Tensor]


TOKENS_FIRST = OutputLayout(
    OutputAxes(3, (1,)), lambda out: out.transpose(1, 2), lambda changed, out: changed.transpose(1, 2).contiguous()
)
"""Layout `(batch, queries, heads, value_dim)`."""

HEADS_FIRST = OutputLayout(OutputAxes(3, (2,)), lambda out: out, lambda changed, out: changed)
"""Layout `(batch, heads, queries, value_dim)`."""

NOT_FOLLOWED = replace(HEADS_FIRST, axes=None)
"""The same layout of an output that is not followed."""


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Places of the tokens of packed sequences: a table `(sequences, longest)` that has, for each token of each
    sequence, the token's index among the packed tokens. Shorter sequences are padded.

    Attributes:
        index: index of each token among the packed ones; that of another token at padding.
        is_real: True at tokens, False at padding.
        total: number of packed tokens, with those that are in no sequence.
        real_keys: for the queries of a call, True at the keys that are tokens; None if they are unknown.
    """

    index: Int[Tensor, "sequences longest"]
    is_real: Bool[Tensor, "sequences longest"]
    total: int
    real_keys: Bool[Tensor, "sequences keys"] | None = None

    @staticmethod
    def of(
        starts: Int[Tensor, " sequences"],
        lengths: Int[Tensor, " sequences"],
        total: int,
        *,
        is_padded_left: bool = False,
    ) -> "PackedSequences":
        """Return the places of sequences that start at `starts` among `total` packed tokens, and have these lengths.
        The padding follows the tokens, unless `is_padded_left` is True.
        """
        starts, lengths = starts.long(), lengths.long()
        longest = int(lengths.amax()) if len(lengths) else 0
        place = torch.arange(longest, device=lengths.device).expand(len(lengths), -1)
        if is_padded_left:
            place = place - (longest - lengths)[:, None]
        is_real = (place >= 0) & (place < lengths[:, None])
        # Padding repeats the first or last token, so that the order of the tokens is not disturbed.
        place = torch.minimum(place.clamp(min=0), (lengths[:, None] - 1).clamp(min=0))
        return PackedSequences((starts[:, None] + place).clamp(max=max(total - 1, 0)), is_real, total)

    def padded(self, packed: Tensor) -> Tensor:
        """Return packed tokens `(tokens, ...)` as a padded batch `(sequences, longest, ...)`, with any token at
        padding.
        """
        return packed[self.index.to(packed.device)]

    def token_ids(self, ids: Int[Tensor, "batch length"] | None) -> Int[Tensor, "sequences longest"] | None:
        """Return the token ids of the packed sequences as a padded batch, given `ids`, those that the model received.
        Return None unless `ids` has one for each packed token.
        """
        if ids is None or ids.numel() != self.total:
            return None
        return self.padded(ids.reshape(-1)).masked_fill(~self.is_real, NO_TOKEN)

    def layout(self, *, has_batch_axis: bool = False) -> OutputLayout:
        """Return the layout `(queries of all sequences, heads, value_dim)`, of which the queries of the sequences have
        these places. If `has_batch_axis` is True, the queries are divided into two axes.
        """

        def written(changed: Tensor, out: Tensor) -> Tensor:
            tokens = changed.transpose(1, 2)[self.is_real]
            return out.flatten(0, -3).index_copy(0, self.index[self.is_real], tokens).view(out.shape)

        axes = OutputAxes(3, (1,)) if has_batch_axis else OutputAxes(2, (0,))
        return OutputLayout(axes, lambda out: self.padded(out.flatten(0, -3)).transpose(1, 2), written)


class KnownWeights(NamedTuple):
    """Attention weights of one call, as a whole tensor. They exist already, so headwise does not compute them again
    from queries and keys.

    Attributes:
        weights: the weights, without dropout.
        out: output of the heads without dropout; None if the weights have several products.
        values: the values; None if they are unknown.
        scores: function that returns the scores `(batch, heads, queries, keys)` behind the weights, and those before a
            softcap; each is None if it is unknown, or without a softcap.
        is_checked: True if `out` is known to be the product of the weights and the values.
    """

    weights: Float[Tensor, "batch heads queries keys"]
    out: Float[Tensor, "batch heads queries value_dim"] | None
    values: Float[Tensor, "batch kv_heads keys value_dim"] | None
    scores: Callable[[], tuple[Tensor | None, Tensor | None]]
    is_checked: bool = False


@dataclass(eq=False)
class AttentionCall:
    """One attention call of a model, read as queries, keys and values with an axis of heads, and options. A subclass
    overrides the properties and methods that do not follow from these.

    Attributes:
        q: queries `(batch, heads, queries, head_dim)`. They are computed from the function's own argument by functions
            of torch that are followed, outside of `Session.paused()`, so that their sources are known; the same
            holds for k and v.
        k: keys `(batch, kv_heads, keys, head_dim)`.
        v: values `(batch, kv_heads, keys, value_dim)`.
        options: further arguments of `Problem.checked`, such as mask, bias, scale, softcap, sinks and dropout.
        layout: layout of the function's output.
        added: tensor of the model that is added to the scores, and hides keys by large negative numbers; or a boolean
            tensor, True at keys that are visible. None without.
        arranged: function that returns `added` with the axes `(batch, heads, queries, keys)`.
        is_top_left: True if the first query has the position of the first key, as under torch's `is_causal`; otherwise
            the last query has the position of the last key.
        keys_in_use: number of keys that queries may attend to, from the first; None for all.
        packed: places of the queries among the model's tokens, if the call packs sequences; None otherwise.
        mask_origin: values that determine the mask: calls with the same ones have the same mask. Empty if unknown.
        sources: two tensors that depend on the same inputs as keys and values, if the function itself writes these to a
            cache, which is not seen; None otherwise.
        appended_keys: number of keys at the end that stand for no token.
        is_aligned: True if the call itself states the positions of its queries and keys.
        is_replaceable: True if headwise may compute the output in place of the model's function, in the pass that
            observes the weights.
        is_observed: False if the weights were observed in another call.
        module_calls: the running module calls; None for those that run when the call is reported.
        origins: sources of queries, keys and values; None if they are unknown.
        step: the call as it is recorded for a plan, or as a plan states it; None if there is no plan for such a call.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    layout: OutputLayout = TOKENS_FIRST
    added: Tensor | None = None
    arranged: Callable[[Tensor], Tensor] = lambda added: added
    is_top_left: bool = False
    keys_in_use: int | None = None
    packed: PackedSequences | None = None
    mask_origin: tuple[Any, ...] = ()
    sources: tuple[Tensor, Tensor] | None = None
    appended_keys: int = 0
    is_aligned: bool = False
    is_replaceable: bool = False
    is_observed: bool = True
    module_calls: Sequence[ModuleCall] | None = None
    origins: CallOrigins | None = None
    step: Step | None = None

    @property
    def grid(self) -> Grid:
        """Sizes of the score tensor, `(batch, heads, queries, keys)`, and positions of queries and keys."""
        if self.is_aligned or "query_positions" in self.options:
            return self.problem.grid
        (batch, heads, queries, _), keys = self.q.shape, self.k.shape[2]
        return Grid(batch, heads, queries, keys, self.q.device)

    @property
    def has_weights(self) -> bool:
        """True if the method `weights` may return weights of the call."""
        return False

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.k.shape[1]

    @property
    def value_dim(self) -> int:
        """Number of features of a value vector."""
        return self.v.shape[3]

    @property
    def keys(self) -> Tensor | None:
        """Keys, or features of the values, by which later calls recognise cached keys; None if they are unknown."""
        return self.k.detach()

    @cached_property
    def mask(self) -> Tensor | None:
        """The tensor `added` with the axes `(batch, heads, queries, keys)`."""
        if self.added is None:
            return None
        return self.arranged(self.added if self.is_replaceable else self.added.detach())

    @cached_property
    def problem(self) -> Problem:
        """The call as a `Problem` (tensors and options, in the form that headwise's backends read). It has gradients
        only if headwise may compute the output.
        """
        tensors, options = widest_dtype_under_autocast(self.q, self.k, self.v), dict(self.options)
        if not self.is_replaceable:
            tensors = tuple(tensor.detach() for tensor in tensors)
            options = {name: each.detach() if isinstance(each, Tensor) else each for name, each in options.items()}
        rule, bias = options.get("mask"), options.get("bias")
        q, k, v = tensors
        if self.keys_in_use is not None:
            k, v = k[:, :, : self.keys_in_use], v[:, :, : self.keys_in_use]
            bias = None if bias is None else bias[..., : self.keys_in_use]
        visible, added = mask_and_bias(self.mask, None)
        if added is not None:
            bias = with_infinite(added) if bias is None else bias + with_infinite(added)
        if self.is_top_left and q.shape[2] != k.shape[2]:
            places = (torch.arange(tensor.shape[2], device=q.device) for tensor in (q, k))
            options["query_positions"], options["key_positions"] = places
        return Problem.checked(q, k, v, **options | {"mask": both(rule, visible), "bias": bias})

    def stated_problem(self) -> Problem | None:
        """Return the call as a `Problem` (tensors and options) for interceptors that change its output. Return None if
        a `Problem` cannot state the call.
        """
        return self.problem

    def received(self) -> ReceivedMask:
        """Return the mask of the call."""
        return ReceivedMask.of_problem(self.problem)

    def weights(self, out: Float[Tensor, "batch heads queries value_dim"]) -> KnownWeights | None:
        """Return the attention weights of the call, which has computed the output `out`. Return None, the default, if
        they are to be computed from queries and keys.
        """
        return None

    def uniform_output(self) -> Float[Tensor, "batch heads queries value_dim"]:
        """Return the output of each head if every query attended with equal weights to all keys that it may see."""
        return fill_hidden_rows_as_torch(uniform_output(self.problem), self.problem.v, self.mask)


def both(one: Mask | None, other: Mask | None) -> Mask | None:
    """Return the mask that allows what both masks allow; None stands for a mask that hides nothing."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def widest_dtype_under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Return q, k and v in one common dtype if autocast is on, since their dtypes may then differ. It is the dtype to
    which torch promotes all three. Without autocast, return them unchanged.
    """
    if autocast_dtype(q.device) is None:
        return q, k, v
    widest = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return q.to(widest), k.to(widest), v.to(widest)
