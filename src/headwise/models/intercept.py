"""Attention calls inside any model, met where they are made and answered with all their rows shown.

    what a module calls                        is met
    transformers' attention interface          where it hands out the function, under the model's own implementation
    `scaled_dot_product_attention`             by a mode of torch that is on while the model runs
    `F.multi_head_attention_forward`           where that calls the one above, in its own module
    `headwise.attend`, so every layer of ours  by a variable that it reads

Nothing is changed at import. While a model is watched its modules have hooks, which know which of them runs, in every
thread; what is put in the place of others' functions leaves the calls of all other models alone.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.attention.attend import watcher
from headwise.attention.masks import Mask
from headwise.attention.observed import observed
from headwise.attention.problem import Answer, Problem, mask_and_bias
from headwise.attention.rows import Known, Observer, Rows
from headwise.attention.rules import causal
from headwise.errors import InputError
from headwise.models.transformers import read_call, require_readable

SDPA = F.scaled_dot_product_attention
"""Torch's own, whatever stands in its place later."""

FROM_ELSEWHERE = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context")
"""Arguments by which a module is told to attend to something else than its own input."""


@dataclass(frozen=True)
class Call:
    """One call of attention inside a model.

    Attributes:
        path: the innermost module that was running.
        layer: that module's number, where the model gives it one.
        cross: whether it attends to something else than its own input.
        problem: what is to be computed.
    """

    path: str
    layer: int | None
    cross: bool
    problem: Problem


class Look(NamedTuple):
    """How a call is looked at: who is shown its rows, what is known of it, and what is done when all were shown."""

    observer: Observer
    known: Known
    ends: Callable[[], None]


@runtime_checkable
class Watcher(Protocol):
    """Who watches a model."""

    def starts(self, arguments: dict[str, Any]) -> None:
        """The model is called, with these arguments by name."""

    def runs(self, path: str) -> None:
        """A module of it is called."""

    def sees(self, call: Call) -> Look:
        """A call of attention is to be answered."""


@contextmanager
def intercepted(model: nn.Module, by: Watcher) -> Iterator[None]:
    """Within the context, every attention call of `model` is shown to `by` and answered.

    All is put back when the context ends, also by an exception; contexts may be nested, over one model or several.

    Raises:
        InputError: a compiled or scripted model, whose calls do not pass through Python.
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError("model", expected="modules that run in Python", got="a scripted one")
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            remedy = "watch the module before it is compiled, model._orig_mod"
            raise InputError("model", expected="modules that run in Python", got="a compiled one", remedy=remedy)
    hooks = []
    with _in_place:
        for path, module in model.named_modules():
            enter, leave = _hooks(by, path, module)
            hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            hooks.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


# -- which module runs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    """A module that runs, of a model that is watched."""

    watcher: Watcher
    path: str
    module: nn.Module
    cross: bool


class _Running(threading.local):
    """What runs in this thread: modules from the outside in, and whether a call is being answered."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.mode: _Mode | None = None
        self.token: Any = None
        self.answering = False

    @property
    def are_met(self) -> bool:
        """Whether attention calls are those of a watched model."""
        return bool(self.frames) and not self.answering

    def push(self, frame: _Frame) -> None:
        if not self.frames:
            self.token, self.mode = watcher.set(_answer), _Mode()
            self.mode.__enter__()  # type: ignore[no-untyped-call]
        self.frames.append(frame)

    def pop(self) -> None:
        self.frames.pop()
        if not self.frames and self.mode is not None:
            self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            watcher.reset(self.token)


_running = _Running()


def _hooks(by: Watcher, path: str, module: nn.Module) -> tuple[Callable[..., None], ...]:
    """What says that a module begins, and that it ends."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outermost = all(frame.watcher is not by for frame in _running.frames)
        cross = any(kwargs.get(name) is not None for name in FROM_ELSEWHERE)
        _running.push(_Frame(by, path, module, cross))
        if outermost:
            by.starts(_by_name(module, args, kwargs))
        by.runs(path)

    def leave(*_: Any) -> None:
        # A hook of others' that fails before `enter` ends a module that never began.
        if _running.frames and _running.frames[-1].module is module and _running.frames[-1].watcher is by:
            _running.pop()

    return enter, leave


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a module's `forward`, by name."""
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs


# -- a call is answered -----------------------------------------------------------------------------------------------


def _answer(problem: Problem, otherwise: Callable[[Problem], Answer]) -> Answer:
    """The answer to a call, its rows shown to all who watch the modules that run; `otherwise` where nobody does."""
    if not _running.are_met:
        return otherwise(problem)
    innermost = {id(frame.watcher): frame for frame in _running.frames}
    looks = []
    for frame in innermost.values():
        layer = getattr(frame.module, "layer_idx", None)
        number = layer if isinstance(layer, int) else None
        looks.append(frame.watcher.sees(Call(frame.path, number, frame.cross, problem)))
    with _answering():
        answer = observed(problem, _each_of(looks), looks[0].known, otherwise)
    for look in looks:
        look.ends()
    return answer


@contextmanager
def _answering() -> Iterator[None]:
    """Calls made while one is answered are not met again."""
    before, _running.answering = _running.answering, True
    try:
        yield
    finally:
        _running.answering = before


def _each_of(looks: list[Look]) -> Observer:
    """One observer for all, each of whom knows other things."""
    if len(looks) == 1:
        return looks[0].observer

    def observer(rows: Rows) -> None:
        for look in looks:
            look.observer(replace(rows, known=look.known))

    return observer


# -- where calls are made ---------------------------------------------------------------------------------------------


class _Mode(TorchFunctionMode):
    """Torch's own attention, called by anybody, in the thread where it is on."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _sdpa(*args, **kwargs or {}) if func is SDPA else func(*args, **kwargs or {})


def _sdpa(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Torch's attention, answered where it is met."""
    if not _running.are_met:
        return SDPA(query, key, value, *args, **kwargs)
    names = ("attn_mask", "dropout_p", "is_causal")
    problem = _problem_of(query, key, value, **dict(zip(names, args, strict=False)), **kwargs)

    def otherwise(_: Problem) -> Answer:
        out = SDPA(query, key, value, *args, **kwargs)
        return Answer(out.reshape(-1, *out.shape[-3:]) if out.ndim > 3 else out[:, None], None, None)

    return _answer(problem, otherwise).out.reshape(*query.shape[:-1], value.shape[-1])


def _problem_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Problem:
    """The call in our terms. Heads stand on the third axis from the end; without one there is a single head."""
    q, k, v = (each[:, None] if each.ndim == 3 else each.reshape(-1, *each.shape[-3:]) for each in (query, key, value))
    mask: Mask | Tensor | None = attn_mask
    if attn_mask is not None and query.ndim == 3 and attn_mask.ndim == 3:
        mask = attn_mask[:, None]
    elif attn_mask is not None and attn_mask.ndim > 4:
        mask = attn_mask.expand(*query.shape[:-3], *attn_mask.shape[-3:]).reshape(-1, *attn_mask.shape[-3:])
    mask, bias = mask_and_bias(mask, None)
    where: dict[str, Any] = {}
    if is_causal:
        mask = causal() if mask is None else causal() & mask
        if q.shape[2] != k.shape[2]:  # torch aligns the first query with the first key
            of_queries, of_keys = (torch.arange(each.shape[2], device=q.device) for each in (q, k))
            where = {"query_positions": of_queries, "key_positions": of_keys}
    return Problem.checked(q, k, v, mask=mask, bias=bias, scale=scale, dropout=dropout_p, **where)


class _InPlace:
    """What stands in the place of others' functions while any model is watched; the last one out puts them back."""

    def __init__(self) -> None:
        self._lock, self._depth = threading.Lock(), 0
        self._put_back: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                # `F.multi_head_attention_forward` finds it under this name; the mode is off inside of it.
                self._put(F, "scaled_dot_product_attention", _sdpa)
                interfaces = sys.modules.get("transformers.modeling_utils")
                if interfaces is not None:
                    dispatch = interfaces.AttentionInterface.get_interface
                    self._put(interfaces.AttentionInterface, "get_interface", _watched(dispatch))

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._depth -= 1
            while not self._depth and self._put_back:
                self._put_back.pop()()

    def _put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        before = getattr(owner, name)
        self._put_back.append(lambda: setattr(owner, name, before))
        setattr(owner, name, function)


_in_place = _InPlace()


def _watched(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' choice of a function, which is wrapped where a watched model asks for one."""

    @wraps(dispatch)
    def chosen(interface: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attention = dispatch(interface, implementation, default)

        @wraps(attention)
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not _running.are_met:
                return attention(module, *args, **kwargs)
            require_readable(implementation)
            results: list[Any] = []

            def otherwise(_: Problem) -> Answer:
                results.append(attention(module, *args, **kwargs))
                return Answer(results[0][0].transpose(1, 2), None, None)

            answer = _answer(read_call(implementation, module, *args, **kwargs), otherwise)
            if implementation == "eager" and not results:
                with _answering():  # it also returns the weights, which the model may hand on
                    return attention(module, *args, **kwargs)
            return results[0] if results else (answer.out.transpose(1, 2).contiguous(), None)

        return called

    return chosen
