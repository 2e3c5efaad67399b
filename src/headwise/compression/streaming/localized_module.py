"""Attention modules whose key/value heads are divided into streaming heads and heads that attend to all tokens."""

from dataclasses import dataclass

import torch

from headwise.checks import is_whole
from headwise.runs.json_result import is_number, require_each


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

    def __post_init__(self) -> None:
        if not isinstance(self.torch_dtype, torch.dtype):
            raise ValueError(f"{self.dtype} is no dtype")

    def require_consistent(self) -> None:
        """Raise `InputError` unless values have their types and fit each other."""
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
