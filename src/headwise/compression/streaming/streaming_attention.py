"""Attention of modules with streaming heads: full and streaming heads attend separately, each to their own keys."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import causal, prefix, window
from headwise.compression.streaming.attention_calls import AttentionCall, answered
from headwise.compression.streaming.localized_module import LocalizedModule
from headwise.compression.streaming.streaming_cache import HeadKeys
from headwise.compression.streaming.token_positions import PositionReader, TokenPositions
from headwise.errors import InputError


def streaming_mask(width: int, first: int) -> Mask:
    """Return the mask of a streaming head: the query at position p attends to the keys `{0, ..., first - 1}` and
    `{p - width + 1, ..., p}`, as far as they are not after p.
    """
    return causal() & (window(width) | prefix(first)) if first else window(width)


class StreamingAttention:
    """Handler of the attention calls of one module with streaming heads.

    Args:
        module: the module's heads.
        width: number of tokens of the window.
        first: number of first tokens.
        reader: reader of the masks of all modules.

    Attributes:
        restriction: the heads, the window and the first tokens, which a cache compares with its own.
        cache_layer: layer of a cache that received the keys and values of the next call; None without a cache.
    """

    def __init__(self, module: LocalizedModule, width: int, first: int, reader: PositionReader) -> None:
        self.restriction = module, width, first
        self.cache_layer: Any = None
        self._module, self._reader = module, reader
        self._mask = streaming_mask(width, first)

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute a call, and return its output `(batch, queries, heads, value_dim)`."""
        module = self._module
        batch, heads, queries, _ = call.q.shape
        if (heads, call.k.shape[1]) != (module.num_heads, module.num_kv_heads):
            expected = f"{module.num_heads} heads and {module.num_kv_heads} key/value heads in {call.path}"
            raise InputError("model", expected=expected, got=f"{heads} and {call.k.shape[1]}")
        tokens = self._reader.read(call.path, call.mask, batch, queries, call.k.shape[2], call.is_causal)
        layer, self.cache_layer = self.cache_layer, None
        if layer is None:
            full, streaming = self._split(call, tokens)
        else:
            layer.require_returned(call.k, call.v)
            full, streaming = layer.join(tokens)
        out = call.q.new_empty((batch, queries, heads, streaming.values.shape[3]))
        parts = [(streaming, module.streaming, self._mask), (full, module.full, causal())]
        for keys, kv_heads, mask in parts:
            if keys is not None:
                query_heads = module.query_heads(kv_heads)
                attended = call.attend(
                    call.q[:, query_heads],
                    keys.keys,
                    keys.values,
                    query_heads,
                    mask=None if keys.sees_all else mask,
                    positions=keys.positions,
                )
                out[:, :, query_heads] = attended.transpose(1, 2)
        return out

    def forget_cache(self, *_: Any) -> None:
        """Forward pre-hook: forget the layer of a cache of an earlier call that was interrupted."""
        self.cache_layer = None

    def _split(self, call: AttentionCall, tokens: TokenPositions) -> tuple[HeadKeys | None, HeadKeys]:
        """Return the keys and values of full heads and of streaming heads from those of a call with all keys."""
        count, positions = tokens
        is_one = call.q.shape[2] == 1 and positions is None
        full, streaming = (
            HeadKeys(call.k[:, list(heads), :count], call.v[:, list(heads), :count], positions, sees_all)
            for heads, sees_all in ((self._module.full, is_one), (self._module.streaming, False))
        )
        return (full if self._module.full else None), streaming


@contextmanager
def restricted(model: nn.Module, modules: tuple[LocalizedModule, ...], width: int, first: int) -> Iterator[None]:
    """Restrict the streaming heads of a model to the first tokens and a window while the context is open."""
    reader = PositionReader()
    handlers = {
        module.module: StreamingAttention(module, width, first, reader) for module in modules if module.streaming
    }
    with ExitStack() as stack:
        for path, handler in handlers.items():
            stack.callback(model.get_submodule(path).register_forward_pre_hook(handler.forget_cache).remove)
        stack.enter_context(answered(model, handlers))
        yield
