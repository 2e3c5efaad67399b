"""Attention modules whose key/value heads are divided into streaming heads and heads that attend to all tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LocalizedModule:
    """Attention module of a decoder, and its streaming heads.

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

    @property
    def full(self) -> tuple[int, ...]:
        """Key/value heads that are not streaming heads."""
        return tuple(head for head in range(self.num_kv_heads) if head not in self.streaming)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of keys and values, as torch names it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def query_heads(self, kv_heads: tuple[int, ...]) -> list[int]:
        """Return the query heads that attend with key/value heads."""
        group = self.num_heads // self.num_kv_heads
        return [head * group + member for head in kv_heads for member in range(group)]
