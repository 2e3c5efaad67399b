"""Answers to the attention calls of some modules of `transformers`, in place of the library's attention functions.

As in `headwise.intercept.hf_calls`, the method that looks up an attention function is replaced, and the model keeps the
name of its implementation, since some models read it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.attention.attend import attend
from headwise.attention.masks.base import Mask
from headwise.errors import InputError, require
from headwise.intercept.call_stack import call_stack
from headwise.intercept.patches import Patches, Replacement

TENSOR_OPTIONS = ("position_ids", "cache_position", "s_aux")
"""Options of an attention function that may be tensors."""


@dataclass(frozen=True)
class AttentionCall:
    """A call of an attention function of `transformers`.

    Attributes:
        implementation: name of the function, "sdpa" or "eager".
        path: path of the calling module.
        module: the calling module.
        q, k, v: queries `(batch, heads, queries, head_dim)`, keys and values `(batch, kv_heads, keys, ...)`.
        mask: the mask that the model passes, a tensor in the implementations "sdpa" and "eager"; None without.
        options: all further arguments by name.
        dense: function that computes the call as the model does, and returns `(batch, queries, heads, value_dim)`.
    """

    implementation: str
    path: str
    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    options: Mapping[str, Any]
    dense: Callable[[], Tensor]

    @property
    def is_causal(self) -> bool:
        """True if the function hides later keys where it receives no mask: SDPA does, and eager attention does not."""
        option = self.options.get("is_causal")
        return self.implementation == "sdpa" and bool(
            getattr(self.module, "is_causal", True) if option is None else option
        )

    @property
    def sees_later_keys(self) -> bool:
        """True if the first query attends to the last key, of several."""
        if self.q.shape[2] == 1:
            return False
        if self.mask is None:
            return not self.is_causal
        first_row = self.mask[..., 0, -1]
        is_visible = first_row if first_row.dtype == torch.bool else first_row > torch.finfo(first_row.dtype).min / 2
        return bool(is_visible.any())

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: list[int], *, mask: Mask | None, positions: Tensor | None,
        return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """Compute attention of some heads with the options of this call.

        Args:
            q: queries of the heads.
            k: keys.
            v: values.
            heads: numbers of the query heads.
            mask: mask by positions; None if all keys are visible.
            positions: position of each key, `(keys,)` or `(batch, keys)`; the last ones are those of the queries. By
                default, keys are numbered from 0.
            return_lse: also return the log-sum-exp.
        """
        sinks = self.options.get("s_aux") if self.implementation == "eager" else None  # SDPA ignores them
        return attend(
            q,
            k,
            v,
            mask=mask,
            scale=self.options.get("scaling"),
            softcap=self.options.get("softcap"),
            sinks=None if sinks is None else sinks[heads],
            dropout=float(self.options.get("dropout") or 0.0),
            query_positions=None if positions is None else positions[..., -q.shape[2] :],
            key_positions=positions,
            return_lse=return_lse,
        )

    def require_known_implementation(self) -> None:
        """Raise `InputError` if the masks of the attention function cannot be read."""
        if self.implementation not in ("sdpa", "eager"):
            remedy = "call model.set_attn_implementation('sdpa')"
            raise InputError(
                "model", expected="attention implementation sdpa or eager", got=self.implementation, remedy=remedy
            )

    def require_readable(self) -> None:
        """Raise `InputError` if the call has options that streaming heads cannot follow."""
        self.require_known_implementation()
        unknown = [
            name for name, value in self.options.items() if isinstance(value, Tensor) and name not in TENSOR_OPTIONS
        ]
        unknown += [name for name in ("sliding_window", "cache") if self.options.get(name) is not None]
        if unknown:
            expected = f"attention without {', '.join(sorted(set(unknown)))} in {self.path}"
            raise InputError("model", expected=expected, got=type(self.module).__name__)


Handler = Callable[[AttentionCall], Tensor]
"""Function that computes a call, and returns `(batch, queries, heads, value_dim)`."""


class _Entry(NamedTuple):
    """Module whose attention a handler computes.

    Attributes:
        path: path of the module in the model.
        handler: the function that computes its attention.
        calls: one number, which counts the attention calls of the current run of the module.
        is_checked: True if calls with options that streaming heads cannot follow are refused.
    """

    path: str
    handler: Handler
    calls: list[int]
    is_checked: bool


_entries: dict[int, _Entry] = {}
"""Modules whose attention a handler computes, by their `id`."""


@contextmanager
def answered(model: nn.Module, handlers: Mapping[str, Handler], *, reads_windows: bool = False) -> Iterator[None]:
    """Let handlers compute the attention of modules of a model while the context is open. All code runs as without
    `torch.compile`, since code compiled earlier would not call the handlers.

    Args:
        model: the model.
        handlers: the handlers, by the path of the module.
        reads_windows: accept calls with options that streaming heads cannot follow, such as a sliding window.

    Raises:
        InputError: a module is answered already, or the calling code is being compiled. Inside of the context: a module
            attends in another way than by the attention functions of `transformers`, or is watched or gated.
    """
    with ExitStack() as stack:
        stack.enter_context(without_compiled_code())
        stack.enter_context(_PATCHES)
        for path, handler in handlers.items():
            module = model.get_submodule(path)
            if id(module) in _entries:
                raise InputError("model", expected="a model whose heads are not restricted yet", got=path)
            count = [0]
            _entries[id(module)] = _Entry(path, handler, count, not reads_windows)
            stack.callback(_entries.pop, id(module))
            stack.callback(module.register_forward_pre_hook(_start_of(count)).remove)
            stack.callback(module.register_forward_hook(_end_of(path, count)).remove)
        yield


@contextmanager
def without_compiled_code() -> Iterator[None]:
    """Run all code as without `torch.compile` while the context is open.

    Raises:
        InputError: the calling code is itself being compiled.
    """
    error = InputError("model", expected="a call outside of code that torch.compile compiles", got="one inside")
    if torch.compiler.is_compiling():
        raise error
    try:
        stance = torch.compiler.set_stance("force_eager")
    except RuntimeError as in_compiled_region:
        raise error from in_compiled_region
    with stance:
        yield


def handler_of(module: nn.Module | None) -> Handler | None:
    """Return the handler that computes the attention of a module; None if there is none."""
    entry = None if module is None else _entries.get(id(module))
    return None if entry is None else entry.handler


def _start_of(count: list[int]) -> Callable[..., None]:
    """Return a hook that runs before a module."""

    def hook(module: nn.Module, arguments: Any) -> None:
        count[0] = 0

    return hook


def _end_of(path: str, count: list[int]) -> Callable[..., None]:
    """Return a hook that runs after a module, and raises if its attention was not answered."""

    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        if not count[0]:
            expected = f"one attention function of transformers in {path}, without hw.watch or hw.gate"
            raise InputError("model", expected=expected, got=type(module).__name__)

    return hook


def _answering(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for `AttentionInterface.get_interface`, whose functions leave calls of other modules to the
    library.
    """

    @wraps(dispatch)
    def get_interface(interface: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attention = dispatch(interface, implementation, default)

        @wraps(attention)
        def attention_or_answer(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            entry = _entries.get(id(module))
            if entry is None:
                return attention(module, *args, **kwargs)
            if call_stack.intercepts:
                expected = "a model without hw.watch or hw.gate while its heads are restricted"
                raise InputError("model", expected=expected, got=f"an intercepted call in {entry.path}")
            entry.calls[0] += 1
            call = _call(implementation, entry.path, attention, module, *args, **kwargs)
            if entry.is_checked:
                call.require_readable()
            return entry.handler(call), None

        return attention_or_answer

    return get_interface


def _call(
    implementation: str, path: str, attention: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor,
    value: Tensor, attention_mask: Any = None, **options: Any,
) -> AttentionCall:  # fmt: skip
    """Return the description of a call of an attention function."""

    def dense() -> Tensor:
        out: Tensor = attention(module, query, key, value, attention_mask, **options)[0]
        return out

    return AttentionCall(implementation, path, module, query, key, value, attention_mask, options, dense)


def _replacements() -> Iterator[Replacement]:
    """Yield the replacement of the method that looks up attention functions."""
    interface = require("transformers", purpose="streaming heads", extra="hf").AttentionInterface
    yield Replacement(interface, "get_interface", _answering(interface.get_interface))


_PATCHES = Patches(_replacements)
