"""Interface of interceptors: objects that observe or change the attention calls of a model."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import Observer, RowBlock
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Problem
from headwise.intercept.received_mask import NO_MASK_SOURCE, MaskSource, ReceivedMask
from headwise.intercept.trace.tokens import CallTokens, ComparedTokens
from headwise.shapes import Bool, Float
from headwise.statistics.attend_observed import WholeCall


class SiteKey(NamedTuple):
    """Name of a site, one place where a model attends: the path of an attention module, and whether the attention there
    is self- or cross-attention.

    Attributes:
        path: path of the innermost module that computes the attention.
        cross: True for cross-attention, to something else than the module's own input.
        part: number of the layer among several that the module computes itself with different weights, by first call.
    """

    path: str
    cross: bool
    part: int = 0

    @property
    def label(self) -> str:
        """Name of the place, as shown in results and used for gates: the module's path. If the module computes several
        attention layers, the number of the layer follows in brackets, such as `blocks[1]`, except for the first one.
        """
        return f"{self.path}[{self.part}]" if self.part else self.path

    @staticmethod
    def path_of(label: str) -> str:
        """Return the module path in a label such as `blocks[1]`, that is the label without the number in brackets."""
        return re.sub(r"\[\d+\]$", "", label)


class InputSources(NamedTuple):
    """Sources on which the queries and keys of one attention call depend. A source is an input of the model, or a
    tensor in which tokens were mixed, such as an output of earlier attention. A set of sources is stored as the bits of
    an int, which is 0 if the set is empty or unknown.

    Attributes:
        of_queries: sources of the queries.
        of_keys: sources of the keys.
        may_be_cached: True if the keys depend on a tensor from outside of the model call, and the queries do not, or if
            they contain keys of earlier calls.
        is_recurrent: True if the keys contain those of earlier calls in the same call of the model.
        tokens: tokens of the queries, keys and values; None if they are unknown.
        are_moved: True if the model has moved queries or keys of the scores to other places, and their tokens there
            are unknown.
    """

    of_queries: int = 0
    of_keys: int = 0
    may_be_cached: bool = False
    is_recurrent: bool = False
    tokens: ComparedTokens | None = None
    are_moved: bool = False

    @property
    def are_in_order(self) -> bool:
        """True if it is known at once that queries, keys and values have the same tokens in the same order, as a plan
        states for most calls of self-attention.
        """
        tokens = self.tokens
        if tokens is None or tokens.values is None:
            return False
        return tokens.queries.numbers is tokens.keys.numbers is tokens.values.numbers

    @property
    def has_new_keys(self) -> bool:
        """True if it is known that the running call of the model has computed all keys of the attention call, so that
        none is cached. That is so if keys and queries are projections of equally many tokens. The keys may still be
        projected from cached latents.
        """
        tokens = self.tokens
        if self.is_recurrent or tokens is None or tokens.queries.linear_map.shape != tokens.keys.linear_map.shape:
            return False
        return bool((tokens.keys.numbers > 0).all())


UNKNOWN_SOURCES = InputSources()
"""Sources of a call about which nothing is known."""


@dataclass(eq=False)
class Call:
    """One attention call inside a model, as reported to interceptors (objects that observe or change attention): its
    module, its sizes, and its tokens and padding.

    Attributes:
        site: where in the model.
        layer: number of the layer in the model's own count; None where the model does not number it.
        index: number of the call among those of this site in one call of the model, from 0.
        grid: size of the scores: batch, query heads, queries, keys.
        kv_heads: number of key/value heads.
        value_dim: features of a value; None where unknown.
        tokens: token ids that the part of the model which attends was called with, or those that it looked up.
        padding: mask `(batch, length)` of that part's input, True or 1 at tokens that are not padding; None without.
        mask_source: the mask that this attention call received; `mask` reads it.
        is_recomputation: True if a backward pass repeats the call (activation checkpointing). The interceptor's changes
            must then be those of the forward pass, and nothing may be counted or stored again.
        keys: keys of the call, or some features of its values, by which later calls recognise cached keys; None if both
            are unknown.
        appended_keys: number of keys at the end that stand for no token.
        is_aligned: True if the call itself states the positions of its queries and keys, as `headwise.attend` does.
        sources: inputs of the model on which the queries and the keys depend.
        module_arguments: arguments of the module calls around the attention, by name, those of the innermost first.
        real_queries: True at queries that are tokens, False at padding, if the call itself states them, as a call with
            packed sequences does; None otherwise.
        real_keys: the same of the keys.
    """

    site: SiteKey
    layer: int | None
    index: int
    grid: Grid
    kv_heads: int
    value_dim: int | None
    tokens: CallTokens
    padding: Tensor | None
    mask_source: MaskSource = NO_MASK_SOURCE
    is_recomputation: bool = False
    keys: Tensor | None = None
    appended_keys: int = 0
    is_aligned: bool = False
    sources: InputSources = UNKNOWN_SOURCES
    module_arguments: tuple[Mapping[str, Any], ...] = ()
    real_queries: Bool[Tensor, "batch queries"] | None = None
    real_keys: Bool[Tensor, "batch keys"] | None = None

    def mask(self) -> ReceivedMask | None:
        """Return the mask that this attention call received, or None if it is unknown. Large negative numbers of an
        additive mask count as hidden keys.
        """
        return self.mask_source.read()


class Observation(NamedTuple):
    """Everything that one interceptor needs to observe one attention call: two or three functions, and the call's
    tokens and padding. The function `observer` receives the attention weights, block by block. The function `on_end` is
    called after the last block. The function `check` is optional: it compares the head outputs computed from these
    weights with those of the model's own attention function.

    Attributes:
        observer: function that receives every row block (the attention weights of some query rows) of the call once.
        call_context: tokens and padding of the call. Every row block that `observer` receives contains them.
        on_end: function without arguments that is called after the last row block.
        check: function that raises an error if two outputs of the same query rows disagree. It is called with each row
            block, whose attribute `out` is the observed weights times the values, and with the output `(batch, heads,
            rows, value_dim)` of the model's own attention function. With a check, the model continues with its own
            output. The check is not called where the model's own output is known to be the product of the weights and
            the values.
        whole_call: description of `observer`, if it needs no weights of single rows; otherwise None. Kernels may then
            compute the statistics without any row blocks, and `observer` is not called.
        keeps_output: True if the model's own attention function must answer the call although the call is observed, so
            that the output has the same bits as without observation. The attention weights are then computed in
            addition.
    """

    observer: Observer
    call_context: CallContext
    on_end: Callable[[], None]
    check: Callable[[RowBlock, Float[Tensor, "batch heads rows value_dim"]], None] | None = None
    whole_call: WholeCall | None = None
    keeps_output: bool = False


NO_EFFECT = Observation(lambda row_block: None, CallContext(), lambda: None)
"""Observation that does nothing, for a repeated call: the call is computed in the same way as when it was observed."""


class HeadOutput(NamedTuple):
    """Output of all heads in one attention call, before the output projection. Two functions come with it. One computes
    the output of these heads under uniform attention (equal weights for all visible keys). The other returns the call
    as a `Problem`, headwise's form of the call's tensors and options.

    Attributes:
        out: output of each head.
        uniform_output: function that computes each head's output under uniform attention over the visible keys.
        read_problem: function that returns the queries, keys, values and options of the call, without gradients; None
            if these are unknown, as where the model computes the weights itself.
    """

    out: Float[Tensor, "batch heads queries value_dim"]
    uniform_output: Callable[[], Float[Tensor, "batch heads queries value_dim"]]
    read_problem: Callable[[], Problem | None]


Change = Callable[[HeadOutput], Float[Tensor, "batch heads queries value_dim"]]
"""Function from the heads' output of a call to the output that takes its place."""


class Interceptor:
    """Base class of objects that observe or change the attention calls of a model; the methods of this class do
    nothing.
    """

    def on_model_call(self) -> None:
        """Method that is called when a call of the intercepted model starts. By default it does nothing."""

    def on_module_call(self, path: str) -> None:
        """Method that is called when a call of the module at `path` in the intercepted model starts. The path of the
        model itself is empty. By default it does nothing.
        """

    def on_module_end(self, path: str, arguments: Mapping[str, Any], output: Any) -> None:
        """Method that is called when a call of the module at `path` ends, with the call's arguments by name and its
        output. The output is None if the call raised an exception. By default the method does nothing.
        """

    def needs_end_of(self, path: str) -> bool:
        """Return True if `on_module_end` must be called for the module at `path` although no attention is inside. This
        method is asked while a plan states where the model attends; otherwise the ends of all modules are reported.
        """
        return False

    def on_unreadable(self, path: str, reason: str) -> None:
        """Method that is called if the module at `path` computes something like attention that cannot be observed or
        changed. It is also called if attention was reported already, and the model then uses its output in a way that
        contradicts the report. `reason` is the start of a sentence that ends with module paths. By default the method
        does nothing.
        """

    def on_empty(self, path: str) -> None:
        """Method that is called if the attention of the module at `path` has an empty output, as for a batch without
        sequences. By default it does nothing.
        """

    def on_projected(self, path: str, weights: Sequence[Tensor]) -> None:
        """Method that is called if the model applies a linear map to the head outputs of the module at `path`.
        `weights` are the parameters that the map reads. By default it does nothing.
        """

    def on_left_out(self, path: str, reason: str) -> None:
        """Method that is called if some statistics of the attention in the module at `path` are left out. `reason` is
        the start of a sentence that ends with module paths. By default the method does nothing.
        """

    def observe(self, call: Call) -> Observation | None:
        """Return the functions that observe the attention weights of `call`. Return None, the default, to observe
        nothing.
        """
        return None

    def change(self, call: Call) -> Change | None:
        """Return the function that changes the head outputs of `call`. Return None, the default, to leave them
        unchanged.
        """
        return None
