"""Streaming heads of a decoder: which key/value heads attend to the first tokens and a window only."""

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise.checks import float_dtype, is_whole, require_module, whole_number
from headwise.compression.streaming.streaming_attention import LocalizedModule, restricted
from headwise.compression.streaming.streaming_cache import streaming_cache
from headwise.errors import InputError, require
from headwise.page.columns import ModelIdentity, is_identity
from headwise.runs.files import write_atomically
from headwise.runs.fingerprint import identity_of
from headwise.runs.json_result import JsonResult, is_number, require_each
from headwise.wording import counted


class CacheBytes(NamedTuple):
    """Bytes of the keys and values in a cache if all heads attend to all tokens (`dense`) and with streaming heads
    (`streaming`), and the dtype of the keys and values as text.

    Attributes:
        dense: bytes without streaming heads.
        streaming: bytes with streaming heads.
        dtype: dtype of the keys and values, such as "float32".
    """

    dense: int
    streaming: int
    dtype: str

    @property
    def saved(self) -> float:
        """Share of the bytes of a full cache that streaming heads save, from 0 to 1."""
        return 1.0 - self.streaming / self.dense


@dataclass(frozen=True)
class StreamingHeads(JsonResult):
    """Result of `hw.localize`: the streaming heads of a model, which attend only to the first tokens and a window of
    recent ones, and the losses with and without this restriction.

    Attributes:
        modules: the attention modules, in the order of the model.
        window: number of tokens of the window, up to the query's own, which is among them.
        first: number of first tokens that streaming heads also attend to.
        budget: largest relative rise of the loss that was allowed.
        selection_losses: mean loss of the model before and after, on the texts by which the heads were chosen.
        losses: mean loss of the model before and after, on other texts; on the same ones if there is one text only.
        selection_examples: number of texts by which the heads were chosen.
        examples: number of texts of `losses`.
        has_held_out: True if `losses` are of other texts than those by which the heads were chosen.
        identity: identity of the model; None if it is unknown.
        weights: samples of the model's weights, which identify it in another dtype; empty if they are unknown.
    """

    ARGUMENT, NOUN = "streaming", "streaming heads"

    modules: tuple[LocalizedModule, ...]
    window: int
    first: int
    budget: float
    selection_losses: tuple[float, float]
    losses: tuple[float, float]
    selection_examples: int
    examples: int
    has_held_out: bool
    identity: ModelIdentity | None = None
    weights: tuple[float, ...] = ()

    def require_consistent(self) -> None:
        """Raise `InputError` if a field has the wrong type, modules repeat, or a module contradicts itself."""
        paths = [module.module for module in self.modules]
        layers = [module.layer for module in self.modules]
        losses = (*self.selection_losses, *self.losses)
        are_positive = all(is_number(loss, 0.0) and loss > 0 for loss in losses)
        require_each(
            self.ARGUMENT,
            (
                (paths, len(paths) > 0 and len(set(paths)) == len(paths), "different modules, at least one"),
                (layers, len(set(layers)) == len(layers), "a layer of its own for each module"),
                (self.identity, is_identity(self.identity), "an identity of the model, or null"),
                (self.weights, all(is_number(each) for each in self.weights), "numbers as weights"),
                (self.window, is_whole(self.window, 1), "a window of at least 1 token"),
                (self.first, is_whole(self.first, 0), "a number of first tokens"),
                (self.budget, is_number(self.budget, 0.0), "a budget of 0 or more"),
                (losses, len(losses) == 4 and are_positive, "two pairs of losses above 0"),
                (self.selection_examples, is_whole(self.selection_examples, 1), "a number of texts"),
                (self.examples, is_whole(self.examples, 1), "a number of texts"),
                (self.has_held_out, isinstance(self.has_held_out, bool), "true or false in `has_held_out`"),
            ),
        )
        for module in self.modules:
            module.require_consistent()

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads in all modules."""
        return sum(module.num_kv_heads for module in self.modules)

    @property
    def streaming_kv_heads(self) -> int:
        """Number of streaming key/value heads in all modules."""
        return sum(len(module.streaming) for module in self.modules)

    @property
    def loss_rise(self) -> float:
        """Relative rise of the loss due to the streaming heads: the loss with them, divided by the loss without them,
        minus 1.
        """
        return self.losses[1] / self.losses[0] - 1.0

    def running(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager within which the streaming heads of a model attend to the first tokens and the
        window only. With the cache that the method `cache` returns, keys and values of other tokens are not stored for
        these heads. With another cache or without one, the outputs are the same. Inside the context, `torch.compile` is
        disabled, since code compiled earlier would ignore the restriction.

        Args:
            model: the model of these heads, with the attention implementation "sdpa" or "eager".

        Raises:
            InputError: the heads are those of another model; the calling code is being compiled. Inside of the context:
                padding between tokens or, with a cache, on the right; a mask that is not causal; `hw.watch` or
                `hw.gate` of the same model.

        Example:
            >>> with streaming.running(model):  # doctest: +SKIP
            ...     model.generate(**inputs, past_key_values=streaming.cache(model))
        """
        self._check(model)
        return restricted(model, self.modules, self.window, self.first)

    def cache(self, model: nn.Module) -> Any:
        """Return an empty `transformers` cache for a model. For streaming heads, it stores the keys and values of the
        first tokens and the window only.

        Use it inside of `running`, once per text, as you would use `DynamicCache`. It supports batches with padding on
        the left, chunks, and beam search; it cannot be cropped, which assisted generation would do. After a call that
        was refused or interrupted before all layers had stored its tokens, it is refused.

        Raises:
            InputError: the heads are those of another model.
        """
        self._check(model)
        return streaming_cache(model, self.modules, self.window, self.first)

    def cache_bytes(self, length: int, *, batch: int = 1, dtype: torch.dtype | None = None) -> CacheBytes:
        """Return the bytes of all keys and values after a text of `length` tokens, in a `DynamicCache` and in the
        streaming cache of the method `cache`. In both, a layer in which the model itself has a sliding window of w
        tokens stores at most w - 1 tokens.

        Args:
            length: number of tokens of the text, including padding.
            batch: number of sequences.
            dtype: dtype of the keys and values; by default the one with which the heads were found.
        """
        length = whole_number("length", length, least=1)
        batch = whole_number("batch", batch, least=1)
        dtype = float_dtype("dtype", dtype)
        dense = streaming = 0
        for module in self.modules:
            tokens = length if module.own_window is None else min(length, module.own_window - 1)
            shorter = min(tokens, self.first + self.window)
            token_bytes = module.features_per_token * (dtype or module.torch_dtype).itemsize
            dense += token_bytes * module.num_kv_heads * tokens
            streaming += token_bytes * (len(module.full) * tokens + len(module.streaming) * shorter)
        dtypes = {dtype or module.torch_dtype for module in self.modules}
        names = " and ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
        return CacheBytes(batch * dense, batch * streaming, names)

    def export_pattern(self, folder: str | Path) -> None:
        """Write the streaming heads to a folder in the format of DuoAttention (arXiv:2410.10819), which `kvpress` also
        reads. The file `full_attention_heads.tsv` has a rank from 0 to 1 for each layer and key/value head; streaming
        heads have the lowest ranks. `config.json` states the sizes of the window and of the first tokens.

        The streaming heads are the share `streaming_kv_heads / kv_heads` of all heads that has the lowest ranks.

        Args:
            folder: folder for the two files, which is made if there is none.

        Raises:
            InputError: a layer has a sliding window of its own, or layers differ in their number of heads.
        """
        counts = {module.num_kv_heads for module in self.modules}
        layers = [module.layer for module in self.modules]
        if len(counts) > 1 or layers != list(range(len(layers))) or any(module.own_window for module in self.modules):
            expected = "equally many key/value heads in all layers, none of which has a window of its own"
            raise InputError("model", expected=expected, got="other layers")
        order = sorted(
            (head not in module.streaming, module.scores[head], module.layer, head)
            for module in self.modules
            for head in range(module.num_kv_heads)
        )
        rank = {(layer, head): index / max(len(order) - 1, 1) for index, (*_, layer, head) in enumerate(order)}
        lines = [
            "\t".join(f"{rank[module.layer, head]:.9f}" for head in range(module.num_kv_heads))
            for module in self.modules
        ]
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / "full_attention_heads.tsv", "".join(f"{line}\n" for line in lines).encode())
        config = {"sink_size": self.first, "recent_size": self.window}
        write_atomically(path / "config.json", json.dumps(config, indent=1).encode())

    def _check(self, model: nn.Module) -> None:
        """Raise `InputError` if `model` has other modules or weights than the model in which these streaming heads were
        found.
        """
        paths = dict(require_module(model).named_modules())
        for module in self.modules:
            if module.module not in paths:
                raise InputError("model", expected=f"one with a module {module.module}", got=type(model).__name__)
        samples = weight_samples(model, [module.module for module in self.modules])
        weight_dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
        submodules = [model.get_submodule(module.module) for module in self.modules]
        tensors = [tensor for each in submodules for tensor in (*each.parameters(), *each.buffers())]
        is_quantised = any(not tensor.is_floating_point() and tensor.dtype != torch.bool for tensor in tensors)
        is_other = self.identity is not None and self.identity.is_other(identity_of(model))
        is_other |= bool(self.weights) and len(samples) != len(self.weights) and not is_quantised
        if is_other or not are_rounded(
            self.weights, samples, weight_dtypes | {module.torch_dtype for module in self.modules}
        ):
            raise InputError("model", expected="the model of these streaming heads", got="one with other weights")

    def __repr__(self) -> str:
        return (
            f"StreamingHeads({self.streaming_kv_heads} of {counted(self.kv_heads, 'key/value head')}, "
            f"window {self.window}, first {self.first})"
        )

    def __str__(self) -> str:
        texts = counted(self.examples, "other text" if self.has_held_out else "text")
        (before, after), (chosen_before, chosen_after) = self.losses, self.selection_losses
        lines = [
            f"{self.streaming_kv_heads} of {counted(self.kv_heads, 'key/value head')} stream "
            f"(the first {counted(self.first, 'token')} and a window of {self.window}), budget {self.budget:.2%}",
            f"loss {before:.4f} -> {after:.4f} ({self.loss_rise:+.2%}) on {texts}, "
            f"{chosen_before:.4f} -> {chosen_after:.4f} ({chosen_after / chosen_before - 1:+.2%}) "
            f"on the {counted(self.selection_examples, 'text')} by which they were chosen",
            "",
            "layer  streaming     attention outside of the window, by key/value head",
        ]
        for module in self.modules:
            heads = " ".join(map(str, module.streaming)) or ("own window" if module.own_window else "none")
            shares = " ".join(f"{share:6.1%}" for share in module.outside)
            lines.append(f"{module.layer:5}  {heads:12}  {shares}".rstrip())
        return "\n".join(lines)

    def table(self) -> Any:
        """Return a pandas DataFrame with one row per key/value head of the model.

        Raises:
            MissingExtra: pandas is not installed.
        """
        rows = [
            {
                "layer": module.layer,
                "kv_head": head,
                "module": module.module,
                "streaming": head in module.streaming,
                "outside": module.outside[head] if module.outside else None,
                "score": module.scores[head] if module.scores else None,
            }
            for module in self.modules
            for head in range(module.num_kv_heads)
        ]
        return require("pandas", purpose="a table", extra="tables").DataFrame(rows)


SAMPLES = 2
"""Number of weights of each parameter."""


def weight_samples(model: nn.Module, paths: Iterable[str]) -> tuple[float, ...]:
    """Return two weights of each floating-point parameter of the modules at `paths`, by which the model can be
    recognised. The positions of these weights depend on the size of the parameter only.
    """
    samples: list[float] = []
    for path in paths:
        for weight in model.get_submodule(path).parameters():
            if weight.is_floating_point() and weight.numel():
                generator = torch.Generator().manual_seed(0)
                positions = torch.randint(weight.numel(), (SAMPLES,), generator=generator)
                samples += weight.detach().flatten()[positions.to(weight.device)].tolist()
    return tuple(samples)


def are_rounded(samples: Sequence[float], others: Sequence[float], dtypes: Iterable[torch.dtype]) -> bool:
    """Return True if two lists of weight samples are equal up to rounding to one of the dtypes. Lists of different
    lengths, as for a quantized model, cannot be compared: True is returned for them, too.
    """
    if len(samples) != len(others):
        return True
    infos = [torch.finfo(dtype) for dtype in dtypes]
    relative = max(info.eps for info in infos)
    absolute = max(info.smallest_normal * info.eps for info in infos)  # the smallest number that is not 0
    return all(
        abs(one - other) <= relative * max(abs(one), abs(other)) + absolute
        for one, other in zip(samples, others, strict=True)
    )
