"""Cache that keeps all keys and values of some heads, and of streaming heads only those of the first tokens and a
window (Xiao et al. 2024, arXiv:2309.17453; Xiao et al. 2024, DuoAttention, arXiv:2410.10819).

Slots of streaming heads: while a text has at most `first + window` tokens, each token has a slot. After that, slot f
below `first` has the token at position f once this token has left the window, and the other slots have the last
`window` tokens. In a batch with padding on the left, sequences begin at different tokens, and a slot below `first` is
empty while the token at this position is still in the window.
"""

import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headwise.compression.streaming.streaming_attention import HeadKeys, LocalizedModule, TokenPositions
from headwise.errors import InputError, require
from headwise.intercept.adapters.transformers_attention import module_attentions
from headwise.shapes import Int


def streaming_cache(model: Any, modules: tuple[LocalizedModule, ...], window: int, first: int) -> Any:
    """Return an empty `transformers` cache for a model. Layers with streaming heads store, for these heads, the keys
    and values of the first tokens and a window only.
    """
    cache_class, layer_class = _classes()
    made = cache_class([module.layer for module in modules], model.config)
    for module in modules:
        if module.streaming:
            made.layers[module.layer] = layer_class(module, model.get_submodule(module.module), window, first)
    return made


@cache
def _classes() -> tuple[Any, Any]:
    """Return the class of the cache and the class of its layers with streaming heads. Both inherit from classes of
    `transformers`, an optional package, so they are created at the first call only.
    """
    library = require("transformers.cache_utils", purpose="a cache", extra="hf")

    class StreamingCache(library.DynamicCache):  # type: ignore[name-defined,misc]
        """Cache for a model with streaming heads (heads that attend only to the first tokens and recent ones).
        `attention_layers` lists the numbers of the layers that store keys.
        """

        def __init__(self, attention_layers: list[int], config: Any) -> None:
            super().__init__(config=config)
            self.attention_layers = attention_layers

        def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            """Add keys and values of new tokens to a layer, as `DynamicCache` does. Raise `InputError` if the previous
            forward pass was interrupted, so that some layers did not store its tokens.
            """
            if layer_idx == self.attention_layers[0]:
                layers = [self.layers[layer] for layer in self.attention_layers]
                is_waiting = any(getattr(layer, "is_waiting", False) for layer in layers)
                if is_waiting or len({layer.get_seq_length() for layer in layers}) > 1:
                    expected, remedy = "a cache whose last call was not interrupted or refused", "use a new one"
                    raise InputError("past_key_values", expected=expected, got="an incomplete one", remedy=remedy)
            return super().update(keys, values, layer_idx, *args, **kwargs)

    class StreamingLayer(StreamingStorage, library.DynamicLayer):  # type: ignore[name-defined,misc]
        """Layer of a `transformers` cache that stores fewer keys and values for streaming heads, which attend only to
        the first tokens and recent ones, than for others.
        """

    return StreamingCache, StreamingLayer


class StreamingStorage:
    """Keys and values of one layer: of all tokens for full heads, and of the first tokens and a window of recent ones
    for streaming heads. `update` returns placeholder tensors in the shape of all keys and values. The module's
    attention then calls `join`, which stores the new keys and values, and returns the keys and values of both kinds of
    heads.

    Attributes:
        keys, values: those of the heads that attend to all tokens `(batch, full heads, tokens, ...)`; None at first.
        window_keys, window_values: those of the streaming heads `(batch, streaming heads, slots, ...)`; None at first.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, module: LocalizedModule, owner: nn.Module, window: int, first: int) -> None:
        super().__init__()
        self.module, self._owner = module, weakref.ref(owner)
        self._window, self._first = window, first
        self.reset()

    def reset(self) -> None:
        """Remove all stored keys and values, so that the layer is empty."""
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.window_keys: Tensor | None = None
        self.window_values: Tensor | None = None
        self.is_initialized = False
        self._tokens = 0
        self._starts: Tensor | None = None  # number of each sequence's first token, (batch, 1); None without padding
        self._pending: tuple[Tensor, Tensor] | None = None  # keys and values that are not stored yet
        self._placeholders: tuple[Tensor, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self)(self.module, self._owner(), self._window, self._first)  # type: ignore[arg-type]
        for name, value in vars(self).items():
            is_tensor = isinstance(value, Tensor)
            setattr(copied, name, value.clone() if is_tensor else value)
        return copied

    @property
    def is_waiting(self) -> bool:
        """True if `update` received keys and values that `join` has not stored yet."""
        return self._pending is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens temporarily, until `join` adds them to the cache. Return placeholder
        tensors in the shape of all keys and values.
        """
        owner = self._owner()
        attention: Any = None if owner is None else module_attentions.get(owner)
        if getattr(attention, "restriction", None) != (self.module, self._window, self._first):
            remedy = "open `with streaming.running(model)` around the call"
            expected = "a model that runs with these streaming heads"
            raise InputError("past_key_values", expected=expected, got="another", remedy=remedy)
        if key_states.shape[1] != self.module.num_kv_heads:
            expected = f"{self.module.num_kv_heads} key/value heads in the cache of {self.module.module}"
            raise InputError("model", expected=expected, got=key_states.shape[1])
        self._pending, attention.cache_layer = (key_states, value_states), self
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self._tokens += key_states.shape[2]
        self._placeholders = self._placeholder(key_states), self._placeholder(value_states)
        return self._placeholders

    def _placeholder(self, states: Tensor) -> Tensor:
        """Return a tensor in the shape of all keys or values that takes no memory for them. All its elements are NaN,
        so that a computation with it is noticed.
        """
        shape = (*states.shape[:2], self._tokens, states.shape[3])
        return states.new_full((), float("nan")).expand(shape)

    def require_returned(self, keys: Tensor, values: Tensor) -> None:
        """Raise `InputError` unless the keys and values of an attention call are the placeholder tensors that the last
        `update` returned.
        """
        if self._placeholders is None or keys is not self._placeholders[0] or values is not self._placeholders[1]:
            expected = f"attention to the keys and values of the cache, unchanged, in {self.module.module}"
            raise InputError("model", expected=expected, got="other ones")

    def join(self, tokens: TokenPositions) -> tuple[HeadKeys | None, HeadKeys]:
        """Store the new keys and values from `update`. Return the keys and values that the new queries attend to: first
        those of full heads (None if the layer has none), then those of streaming heads. `tokens` has the positions of
        all tokens so far.
        """
        if self._pending is None or self._placeholders is None:
            raise InputError("model", expected="one reading of the cache in each call", got=self.module.module)
        (keys, values), self._placeholders = self._pending, None
        new, positions = keys.shape[2], tokens.positions
        if tokens.tokens < self._tokens:
            raise _right_padding()
        self._set_starts(positions, self._tokens - new)
        full = None
        if self.module.full:
            heads = list(self.module.full)
            self.keys, self.values = _joined(self.keys, keys[:, heads]), _joined(self.values, values[:, heads])
            full = HeadKeys(self.keys, self.values, positions, new == 1 and positions is None)
        heads = list(self.module.streaming)
        in_batch = torch.arange(self._tokens - new, self._tokens, device=self.device)
        slots = torch.cat([self._slot_positions(self._tokens - new), self._relative(in_batch)], 1)
        keys = _joined(self.window_keys, keys[:, heads])
        values = _joined(self.window_values, values[:, heads])
        self.window_keys, self.window_values = self._trimmed(slots, keys), self._trimmed(slots, values)
        if new == 1:
            keys, values, slots = self.window_keys, self.window_values, self._slot_positions(self._tokens)
        is_plain = positions is None and (new == 1 or keys.shape[2] == self._tokens)
        slots = slots.expand(len(keys), -1)
        self._pending = None
        return full, HeadKeys(keys, values, None if is_plain else slots, new == 1 and is_plain)

    def _set_starts(self, positions: Tensor | None, before: int) -> None:
        """Store the index at which each sequence begins after its padding, derived from the positions of all tokens.
        Raise `InputError` if padding is on the right, or if the padding of the `before` earlier tokens has changed.
        """
        starts = None
        if positions is not None:
            starts = self._tokens - 1 - positions[:, -1:]
            if not torch.equal(positions[:, -1:] >= 0, (positions >= 0).any(1, keepdim=True)):
                raise _right_padding()
        if before:
            old = torch.zeros((1, 1), dtype=torch.long, device=self.device) if self._starts is None else self._starts
            now = torch.zeros_like(old) if starts is None else starts
            if not bool(((now == old) | ((old == before) & (now >= old))).all()):
                raise InputError("attention_mask", expected="the same padding in each call", got="another")
        self._starts = starts

    def _slot_positions(self, tokens: int) -> Int[Tensor, "#batch slots"]:
        """Return the position of the token in each slot of a streaming head after `tokens` tokens; -1 for padding and
        empty slots. A slot is a place for one key and value.
        """
        if tokens <= self._first + self._window:
            return self._relative(torch.arange(tokens, device=self.device))
        first = torch.arange(self._first, device=self.device)[None]
        if self._starts is not None:
            first = torch.where(first + self._starts < tokens - self._window, first, -1)
        in_window = self._relative(torch.arange(tokens - self._window, tokens, device=self.device))
        return torch.cat([first, in_window], 1)

    def _relative(self, tokens: Int[Tensor, " tokens"]) -> Int[Tensor, "#batch tokens"]:
        """Return the positions of tokens in each sequence, counted without padding, from their indices in the padded
        batch; -1 for padding.
        """
        return tokens[None] if self._starts is None else (tokens - self._starts).clamp(min=-1)

    def _trimmed(self, positions: Int[Tensor, "#batch slots"], states: Tensor) -> Tensor:
        """Return the keys or values of streaming heads without those that no later query can attend to. Only the first
        tokens and the window remain.
        """
        if self._tokens <= self._first + self._window:
            return states
        older, window = states[:, :, : -self._window], states[:, :, -self._window :]
        if self._starts is None:
            return torch.cat([older[:, :, : self._first], window], 2)
        wanted = torch.arange(self._first, device=self.device)[None, :, None]
        index = (positions[:, None, : -self._window] == wanted).int().argmax(2)[:, None, :, None]
        return torch.cat([older.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3])), window], 2)

    def get_seq_length(self) -> int:
        """Return the number of tokens that the cache has received, including those that streaming heads no longer
        store.
        """
        return self._tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that the attention mask of the next call covers, and the index of the first one,
        which is 0. The mask covers all tokens, including `query_length` new ones.
        """
        return self._tokens + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences of the batch for beam search: sequence i becomes the present sequence `beam_idx[i]`."""
        self._map_sequences(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch `repeats` times, one copy after the other."""
        self._map_sequences(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences of the batch at `indices`, in this order."""
        self._map_sequences(lambda tensor: tensor[indices.to(tensor.device)])

    def _map_sequences(self, function: Any) -> None:
        """Call `function` on each stored tensor that has a batch axis, and store the returned tensor in its place."""
        for name in ("keys", "values", "window_keys", "window_values", "_starts"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, function(tensor))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise `InputError` if tokens would be removed from the end of the cache. The window would then reach back to
        keys that streaming heads no longer store.
        """
        if tokens_to_remove:
            raise InputError("past_key_values", expected="a cache that is not cropped", got="one with streaming heads")

    def offload(self) -> None:
        """Raise `InputError`: a cache with streaming heads cannot be moved to another device."""
        raise InputError("past_key_values", expected="a cache without offloading", got="one with streaming heads")

    @property
    def nbytes(self) -> int:
        """Number of bytes of all stored keys and values."""
        tensors = (self.keys, self.values, self.window_keys, self.window_values)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _right_padding() -> InputError:
    """Return the error for a batch in which padding follows the tokens of a sequence."""
    remedy = "pad on the left"
    return InputError("attention_mask", expected="no padding on the right", got="some", remedy=remedy)


def _joined(before: Tensor | None, new: Tensor) -> Tensor:
    """Return the keys (or values) of earlier tokens, if any, followed by those of new tokens."""
    return new if before is None else torch.cat([before, new], 2)
