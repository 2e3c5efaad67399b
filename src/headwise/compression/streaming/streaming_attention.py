"""Attention of modules with streaming heads: full and streaming heads attend separately, each to their own keys.

The positions of tokens in their sequences are read from the causal mask of each call. Position 0 is the first token of
a sequence that is not padding, and padding has position -1.
"""

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.attention.attend import attend
from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import causal, prefix, window
from headwise.checks import is_whole
from headwise.errors import InputError
from headwise.intercept.adapters.transformers_attention import HFCall, ModuleAttention, computing
from headwise.runs.json_result import is_number, require_each
from headwise.shapes import Float, Int

TENSOR_OPTIONS = ("position_ids", "cache_position", "s_aux")
"""Options of an attention function that may be tensors."""


@dataclass(frozen=True)
class LocalizedModule:
    """Attention module of a decoder, with the key/value heads that are streaming heads: they attend to the first tokens
    and a window of recent ones only.

    Attributes:
        layer: number of the module's layer in the cache of `transformers`.
        module: path of the module in the model.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads.
        features_per_token: number of features of the key and the value of one token in one key/value head.
        dtype: dtype of keys and values, such as "float32".
        own_window: number of tokens of the sliding window that the model itself applies in this layer; None if the
            layer attends to all tokens. A layer with a window has no streaming heads.
        streaming: key/value heads that attend to the first tokens and a window only.
        outside: for each key/value head, the share of its attention outside of the window and the first tokens. This
            is the mean over its query heads and over all queries that have such keys. Empty for a layer with a window.
        scores: for each key/value head, the estimated effect on the loss if it were a streaming head. Empty for a layer
            with a window.
    """

    layer: int
    module: str
    num_heads: int
    num_kv_heads: int
    features_per_token: int
    dtype: str
    own_window: int | None = None
    streaming: tuple[int, ...] = ()
    outside: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.torch_dtype, torch.dtype):
            raise ValueError(f"{self.dtype} is no dtype")

    def require_consistent(self) -> None:
        """Raise `InputError` if a field has the wrong type or contradicts another one, such as a streaming head that
        the module does not have.
        """
        lists = [len(each) in (0, self.num_kv_heads) for each in (self.outside, self.scores)]
        are_numbers = is_whole(self.num_heads, 1) and is_whole(self.num_kv_heads, 1)
        is_multiple = are_numbers and self.num_heads % self.num_kv_heads == 0
        are_heads = all(is_whole(head, 0) and head < self.num_kv_heads for head in self.streaming)
        are_different = len(set(self.streaming)) == len(self.streaming)
        values = (
            (self.layer, is_whole(self.layer, 0), "a number of a layer"),
            (self.module, isinstance(self.module, str), "the path of a module"),
            (self.num_kv_heads, is_whole(self.num_kv_heads, 1), "a number of key/value heads"),
            (self.num_heads, is_whole(self.num_heads, 1), "a number of heads"),
            (self.num_heads, is_multiple, f"a multiple of {self.num_kv_heads} heads"),
            (self.features_per_token, is_whole(self.features_per_token, 1), "a number of features"),
            (self.dtype, self.torch_dtype.is_floating_point, "a floating-point dtype"),
            (self.own_window, self.own_window is None or is_whole(self.own_window, 1), "a window, or null"),
            (self.streaming, are_heads and are_different, f"different heads of {self.num_kv_heads}"),
            (self.streaming, not self.streaming or self.own_window is None, "no streaming heads in its window"),
            ("other lists", all(lists), f"{self.num_kv_heads} numbers in `outside` and `scores`"),
            ((*self.outside, *self.scores), all(map(is_number, (*self.outside, *self.scores))), "numbers"),
        )
        require_each("streaming", ((value, is_right, f"{text} for {self.module}") for value, is_right, text in values))

    @property
    def full(self) -> tuple[int, ...]:
        """Key/value heads of the module that attend to all tokens: those that are not streaming heads."""
        return tuple(head for head in range(self.num_kv_heads) if head not in self.streaming)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of keys and values as a `torch.dtype`."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def query_heads(self, kv_heads: tuple[int, ...]) -> list[int]:
        """Return the numbers of the query heads that share the key/value heads `kv_heads`."""
        group = self.num_heads // self.num_kv_heads
        return [head * group + member for head in kv_heads for member in range(group)]


class TokenPositions(NamedTuple):
    """Position of each key in its sequence, for one attention call. The queries of the call belong to the last tokens.

    Attributes:
        tokens: number of keys that belong to tokens. Later keys are unused slots of a static cache.
        positions: position of each token, -1 for padding; None without padding.
    """

    tokens: int
    positions: Int[Tensor, "batch tokens"] | None


class PositionReader:
    """Reader of token positions from the masks of attention calls. A mask that several layers share is read once."""

    def __init__(self) -> None:
        self._mask: Any = lambda: None
        self._version: int | None = None
        self._last = TokenPositions(0, None)

    def read(self, path: str, call: HFCall) -> TokenPositions:
        """Return the positions of the keys in an attention call of the module at `path`. Raise `InputError` if its mask
        is not causal, apart from padding.
        """
        mask, queries, keys = call.passed_mask, call.q.shape[2], call.k.shape[2]
        if mask is None:
            if queries == 1:
                return TokenPositions(keys, None)
            if call.is_causal and queries <= keys:  # SDPA aligns the first query with the first key
                return TokenPositions(queries, None)
            raise _refusal(path, f"no mask for {queries} queries and {keys} keys")
        version = None if mask.is_inference() else mask._version
        if self._mask() is not mask or version is None or version != self._version:
            self._last = _positions_in(path, mask, queries, keys)
            self._mask, self._version = weakref.ref(mask), version
        tokens, positions = self._last
        return TokenPositions(tokens, None if positions is None else positions.expand(len(call.q), -1))


def _refusal(path: str, got: str) -> InputError:
    """Return the error for an attention mask that is not causal, so that token positions cannot be read from it. `got`
    describes the mask.
    """
    return InputError("model", expected=f"causal attention to all tokens that are not padding in {path}", got=got)


def _positions_in(path: str, mask: Tensor, queries: int, keys: int) -> TokenPositions:
    """Derive the positions of the keys from a causal attention mask with padding. A position counts the tokens before
    the key in its sequence, without padding. Raise `InputError` if the mask has another form.
    """
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[3] != keys or mask.shape[2] != queries:
        raise _refusal(path, f"a mask of shape {tuple(mask.shape)}")
    visible = mask[:, 0]
    if mask.dtype != torch.bool:
        visible = visible == 0
        if not bool((visible | (mask[:, 0] <= torch.finfo(mask.dtype).min / 2)).all()):
            raise _refusal(path, "a mask that adds other numbers to the scores")
    is_real = visible[:, -1]
    tokens = keys
    if queries != keys:
        # The last key that any last query sees is its own; later ones are unused slots of a static cache. All keys
        # count if each of these queries is padding.
        seen = is_real.any(0).nonzero()
        tokens = int(seen[-1]) + 1 if len(seen) else keys
    key, query = torch.arange(keys, device=mask.device), torch.arange(queries, device=mask.device) + tokens - queries
    if tokens < queries or not torch.equal(visible, (key <= query[:, None]) & is_real[:, None]):
        raise _refusal(path, "another mask")
    is_real = is_real[:, :tokens]
    if bool(is_real.all()):
        return TokenPositions(tokens, None)
    if int((is_real[:, 1:] & ~is_real[:, :-1]).sum(1).add(is_real[:, 0]).max()) > 1:
        raise _refusal(path, "padding between tokens")
    if queries != keys and bool((is_real.any(1) & ~is_real[:, -1]).any()):
        raise _refusal(path, "padding on the right with a cache")
    return TokenPositions(tokens, (is_real.cumsum(1) - 1).masked_fill(~is_real, -1))


def streaming_mask(width: int, first: int) -> Mask:
    """Return the mask of a streaming head. The query at position p attends to the keys `{0, ..., first - 1}` and
    `{p - width + 1, ..., p}`, but never to keys after p.
    """
    return causal() & (window(width) | prefix(first)) if first else window(width)


class HeadKeys(NamedTuple):
    """Keys and values that a group of heads of one attention module attends to in one call. A module has two groups,
    the streaming heads and the other heads, because these attend to different numbers of keys: a cache stores only the
    first tokens and a window of recent ones for streaming heads, and all tokens for the others.

    Attributes:
        keys: the keys.
        values: the values.
        positions: position of each key, -1 for padding and empty slots; None for keys numbered from 0.
        sees_all: True if every query sees all keys, so that no mask is needed.
    """

    keys: Float[Tensor, "batch kv_heads keys head_dim"]
    values: Float[Tensor, "batch kv_heads keys value_dim"]
    positions: Int[Tensor, "batch keys"] | None
    sees_all: bool


def attend_to(keys: HeadKeys, call: HFCall, heads: list[int] | slice, mask: Mask, *, return_lse: bool = False) -> Any:
    """Compute attention of the query heads `heads` of a call to the keys and values in `keys`, with the score options
    of the call. The last keys belong to the same tokens as the queries. The mask compares the positions of queries and
    keys.
    """
    q, positions, options = call.q[:, heads], keys.positions, call.score_options
    if options["sinks"] is not None:
        options["sinks"] = options["sinks"][heads]
    return attend(
        q,
        keys.keys,
        keys.values,
        mask=None if keys.sees_all else mask,
        query_positions=None if positions is None else positions[..., -q.shape[2] :],
        key_positions=positions,
        return_lse=return_lse,
        **options,
    )


def require_followed(call: HFCall, path: str) -> None:
    """Raise `InputError` if an attention call of the module at `path` has options that streaming heads do not
    support.
    """
    call.require_readable()
    unknown = {name for name, value in call.arguments.items() if isinstance(value, Tensor)}.difference(TENSOR_OPTIONS)
    unknown |= {name for name in ("sliding_window", "cache") if call.arguments.get(name) is not None}
    if unknown:
        expected = f"attention without {', '.join(sorted(unknown))} in {path}"
        raise InputError("model", expected=expected, got=type(call.module).__name__)


class StreamingAttention(ModuleAttention):
    """Interceptor of one attention module whose streaming heads attend only to the first tokens and a window of recent
    ones, and whose other heads attend to all tokens.

    Attributes:
        restriction: the heads, the window and the first tokens, which a cache compares with its own.
        cache_layer: layer of a cache that received the keys and values of the next call; None without a cache.
    """

    def __init__(self, module: LocalizedModule, width: int, first: int, reader: PositionReader) -> None:
        super().__init__(module.module)
        self.restriction = module, width, first
        self.cache_layer: Any = None
        self._module, self._reader = module, reader
        self._mask = streaming_mask(width, first)

    def on_start(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of an attention module. It discards the reference to a cache layer that remains from an
        earlier forward pass if an error interrupted that pass.
        """
        super().on_start(module, args)
        self.cache_layer = None

    def compute(self, call: HFCall) -> Tensor:
        """Compute attention of full and streaming heads separately, and return the output
        `(batch, queries, heads, value_dim)`. Keys and values come from the call or, with a streaming cache, from the
        cache.
        """
        require_followed(call, self.path)
        module = self._module
        batch, heads, queries, _ = call.q.shape
        if (heads, call.k.shape[1]) != (module.num_heads, module.num_kv_heads):
            expected = f"{module.num_heads} heads and {module.num_kv_heads} key/value heads in {self.path}"
            raise InputError("model", expected=expected, got=f"{heads} and {call.k.shape[1]}")
        tokens = self._reader.read(self.path, call)
        layer, self.cache_layer = self.cache_layer, None
        if layer is None:
            count, positions = tokens
            full, streaming = (
                HeadKeys(call.k[:, list(kv_heads), :count], call.v[:, list(kv_heads), :count], positions, sees_all)
                for kv_heads, sees_all in ((module.full, queries == 1 and positions is None), (module.streaming, False))
            )
        else:
            layer.require_returned(call.k, call.v)
            full, streaming = layer.join(tokens)
        out = call.q.new_empty((batch, queries, heads, streaming.values.shape[3]))
        for keys, kv_heads, mask in ((streaming, module.streaming, self._mask), (full, module.full, causal())):
            if kv_heads:
                query_heads = module.query_heads(kv_heads)
                out[:, :, query_heads] = attend_to(keys, call, query_heads, mask).transpose(1, 2)
        return out


def restricted(
    model: nn.Module, modules: tuple[LocalizedModule, ...], width: int, first: int
) -> AbstractContextManager[None]:
    """Return a context manager within which the streaming heads of a model attend to the first `first` tokens and a
    window of `width` tokens only.
    """
    reader = PositionReader()
    return computing(
        model, [StreamingAttention(module, width, first, reader) for module in modules if module.streaming]
    )
